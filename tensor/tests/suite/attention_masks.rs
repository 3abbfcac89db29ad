//! Windows, ranges of keys and soft caps of attention, alone and together, against a plain loop in f64.

use crate::reference::*;
use ferrotron_tensor::ops::attention::*;
use ferrotron_tensor::{DType, Device, RandomKey, Result, ShardSpec, Tensor};

/// (B, T, S, H, G, D)
type Sizes = [usize; 6];

/// A combination of options; lengths and documents are of each batch row.
#[derive(Debug, Clone)]
struct Options {
    mask: AttentionMask,
    window: Option<usize>,
    lengths: Option<Vec<usize>>,
    documents: Option<Vec<Vec<usize>>>,
    softcap: Option<f64>,
    dropout: f64,
}

const PLAIN: Options = Options {
    mask: AttentionMask::Causal,
    window: None,
    lengths: None,
    documents: None,
    softcap: None,
    dropout: 0.0,
};

impl Options {
    /// Whether query i sees key j, by the definitions.
    fn sees(&self, [_, t, s, ..]: Sizes, b: usize, i: usize, j: usize) -> bool {
        // The query's position among the keys.
        let position = i as i64 + s as i64 - t as i64;
        let distance = position - j as i64;
        let document = |boundaries: &[usize], at: usize| {
            let inside = |pair: &[usize]| pair[0] <= at && at < pair[1];
            boundaries.windows(2).position(inside)
        };
        (self.mask == AttentionMask::None || distance >= 0)
            && self.window.is_none_or(|window| distance.unsigned_abs() < window as u64)
            && self.lengths.as_ref().is_none_or(|lengths| j < lengths[b])
            && self.documents.as_ref().is_none_or(|rows| {
                let own = document(&rows[b], i);
                own.is_some() && own == document(&rows[b], j)
            })
    }

    fn config(&self, [b, t, s, h, _, d]: Sizes) -> Result<AttentionConfig> {
        let lengths = self.lengths.as_ref().map(|lengths| KeyRanges::from_lengths(lengths, t));
        let documents = self.documents.as_ref().map(|rows| KeyRanges::from_documents(rows, t));
        let ranges = match (lengths.transpose()?, documents.transpose()?) {
            (Some(lengths), Some(documents)) => Some(lengths.intersect(&documents)?),
            (lengths, documents) => lengths.or(documents),
        };
        let place = ShardSpec::unsharded(&[b, h, t, s]);
        Ok(AttentionConfig {
            mask: self.mask,
            window: self.window,
            ranges,
            softcap: self.softcap,
            bias: None,
            diagonals: None,
            dropout: Some(AttentionDropout::new(self.dropout, key(), place)?),
            // Twice the usual scale, so that a soft cap near 1 bends.
            scale: 2.0 / (d as f64).sqrt(),
        })
    }
}

fn key() -> RandomKey {
    RandomKey::new(3, 1, "attention")
}

/// out, lse, dq, dk and dv.
fn naive(
    sizes: Sizes,
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    dout: &[f64],
    options: &Options,
) -> Result<[Vec<f64>; 5]> {
    let [batch, t, s, h, g, d] = sizes;
    let scale = options.config(sizes)?.scale;
    let (q, k, v) = (q.to_f64()?, k.to_f64()?, v.to_f64()?);
    let (mut out, mut lse) = (vec![0.0; q.len()], vec![f64::NEG_INFINITY; batch * h * t]);
    let (mut dq, mut dk, mut dv) = (out.clone(), vec![0.0; k.len()], vec![0.0; v.len()]);
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    for (b, head, i) in
        (0..batch * h * t).map(|n| (n / t / h, n / t % h, n % t)).collect::<Vec<_>>()
    {
        let row = ((b * t + i) * h + head) * d;
        let at = |j: usize| ((b * s + j) * g + head / (h / g)) * d;
        let seen: Vec<usize> = (0..s).filter(|&j| options.sees(sizes, b, i, j)).collect();
        let (qi, gi) = (&q[row..row + d], &dout[row..row + d]);
        let score = |j: usize| {
            let raw = scale * dot(qi, &k[at(j)..at(j) + d]);
            options.softcap.map_or((raw, 1.0), |cap| {
                let t = (raw / cap).tanh();
                (cap * t, 1.0 - t * t)
            })
        };
        if seen.is_empty() {
            continue;
        }
        let scores: Vec<(f64, f64)> = seen.iter().map(|&j| score(j)).collect();
        let max = scores.iter().map(|x| x.0).fold(f64::NEG_INFINITY, f64::max);
        let own = max + scores.iter().map(|x| (x.0 - max).exp()).sum::<f64>().ln();
        lse[(b * h + head) * t + i] = own;
        let factor = |j: usize| {
            let kept = key().uniform((((b * h + head) * t + i) * s + j) as u64) >= options.dropout;
            if kept { 1.0 / (1.0 - options.dropout) } else { 0.0 }
        };
        for (&j, (x, _)) in seen.iter().zip(&scores) {
            let p = factor(j) * (x - own).exp();
            (0..d).for_each(|c| out[row + c] += p * v[at(j) + c]);
        }
        let delta = dot(gi, &out[row..row + d]);
        for (&j, (x, slope)) in seen.iter().zip(&scores) {
            let p = (x - own).exp();
            let ds = p * (factor(j) * dot(gi, &v[at(j)..at(j) + d]) - delta) * slope * scale;
            for c in 0..d {
                dq[row + c] += ds * k[at(j) + c];
                dk[at(j) + c] += ds * qi[c];
                dv[at(j) + c] += factor(j) * p * gi[c];
            }
        }
    }
    Ok([out, lse, dq, dk, dv])
}

fn operands(device: &Device, dtype: DType, sizes: Sizes) -> Result<[Tensor; 4]> {
    let [b, t, s, h, g, d] = sizes;
    Ok([
        normal(device, dtype, &[b, t, h, d], "q")?,
        normal(device, dtype, &[b, s, g, d], "k")?,
        normal(device, dtype, &[b, s, g, d], "v")?,
        normal(device, dtype, &[b, t, h, d], "dout")?,
    ])
}

fn check(dtype: DType, sizes: Sizes, options: &Options) -> Result<()> {
    let [_, t, _, h, g, d] = sizes;
    let device = Device::cpu(2)?;
    let [q, k, v, dout] = operands(&device, dtype, sizes)?;
    let want = naive(sizes, (&q, &k, &v), &dout.to_f64()?, options)?;
    let config = options.config(sizes)?;
    let (out, lse) = attention(&q, &k, &v, &config)?;
    let (dq, dk, dv) = attention_backward(&dout, (&q, &k, &v), (&out, &lse), &config)?;
    // As in attention.rs; scores are twice as large.
    let eps = 2.0 * dtype.accumulator().epsilon() * (d + 16) as f64;
    let kept = 1.0 / (1.0 - options.dropout);
    let each = (16.0 * eps + 8.0 * dtype.epsilon()) * (d as f64).sqrt() * kept;
    let sums = each * ((t * h / g) as f64).sqrt();
    let bounds = [(4.0 * eps + 2.0 * dtype.epsilon()) * kept, 4.0 * eps, each, sums, sums];
    let got = [out, lse, dq, dk, dv];
    for (i, name) in ["out", "lse", "dq", "dk", "dv"].iter().enumerate() {
        let what = format!("{dtype} {sizes:?} {options:?} {name}");
        assert_close(&what, &got[i], &want[i], bounds[i]);
    }
    Ok(())
}

/// Every combination of the options, each on or off.
fn combinations(positions: usize) -> impl Iterator<Item = Options> {
    let n = positions;
    (0..64).map(move |bits: usize| {
        let on = |bit: usize| bits >> bit & 1 == 1;
        Options {
            mask: if on(0) { AttentionMask::Causal } else { AttentionMask::None },
            window: on(1).then_some(n / 3 + 1),
            lengths: on(2).then(|| vec![n * 3 / 4, n]),
            documents: on(3).then(|| vec![vec![0, n / 4, n / 4, n - 2], vec![0, n / 2 + 1, n]]),
            softcap: on(4).then_some(1.5),
            dropout: if on(5) { 0.2 } else { 0.0 },
        }
    })
}

#[test]
fn every_combination_agrees_with_a_plain_loop() -> Result<()> {
    for options in combinations(9) {
        check(DType::F64, [2, 9, 9, 4, 2, 3], &options)?;
    }
    for options in combinations(150) {
        check(DType::F32, [2, 150, 150, 2, 1, 16], &options)?;
        check(DType::BF16, [2, 150, 150, 2, 2, 32], &options)?;
    }
    for options in combinations(70) {
        check(DType::F16, [2, 70, 70, 1, 1, 8], &options)?;
    }
    Ok(())
}

#[test]
fn windows_of_every_width_cross_every_block() -> Result<()> {
    for mask in [AttentionMask::Causal, AttentionMask::None] {
        for window in [1, 2, 31, 32, 33, 64, 127, 128, 129, 200, 299, 300, 301, usize::MAX] {
            for dtype in [DType::F64, DType::BF16] {
                let options = Options { mask, window: Some(window), ..PLAIN };
                check(dtype, [1, 300, 300, 1, 1, 4], &options)?;
            }
        }
        // Cached keys before the queries, and queries before the first key.
        for (t, s) in [(3, 200), (150, 40)] {
            check(DType::F32, [1, t, s, 2, 1, 8], &Options { mask, window: Some(37), ..PLAIN })?;
        }
    }
    Ok(())
}

#[test]
fn lengths_reach_from_nothing_to_all_keys() -> Result<()> {
    for length in [0, 1, 31, 32, 33, 127, 128, 129, 260] {
        for mask in [AttentionMask::Causal, AttentionMask::None] {
            let lengths = Some(vec![length, 260 - length]);
            let options = Options { mask, lengths, ..PLAIN };
            check(DType::F32, [2, 260, 260, 1, 1, 4], &options)?;
            check(DType::BF16, [2, 260, 260, 1, 1, 4], &options)?;
        }
    }
    Ok(())
}

#[test]
fn packed_documents_are_attended_as_if_alone() -> Result<()> {
    let device = Device::cpu(2)?;
    let sizes = [1, 300, 300, 4, 2, 16];
    let [q, k, v, dout] = operands(&device, DType::F64, sizes)?;
    let boundaries = [0, 1, 100, 131, 256, 300];
    for mask in [AttentionMask::Causal, AttentionMask::None] {
        let alone = AttentionConfig { mask, ..AttentionConfig::causal(16) };
        let ranges = KeyRanges::from_documents(&[boundaries.to_vec()], 300)?;
        let packed = AttentionConfig { ranges: Some(ranges), ..alone.clone() };
        let (out, lse) = attention(&q, &k, &v, &packed)?;
        let (dq, dk, dv) = attention_backward(&dout, (&q, &k, &v), (&out, &lse), &packed)?;
        for document in boundaries.windows(2) {
            let part = |x: &Tensor| x.narrow(1, document[0], document[1] - document[0]);
            let (q, k, v, dout) = (part(&q)?, part(&k)?, part(&v)?, part(&dout)?);
            let (want, lse) = attention(&q, &k, &v, &alone)?;
            let wants = attention_backward(&dout, (&q, &k, &v), (&want, &lse), &alone)?;
            for (what, got, want) in [
                ("out", &out, want),
                ("dq", &dq, wants.0),
                ("dk", &dk, wants.1),
                ("dv", &dv, wants.2),
            ] {
                let what = format!("{document:?} {mask:?} {what}");
                assert_close(&what, &part(got)?, &want.to_f64()?, 1e-12);
            }
        }
    }
    Ok(())
}

#[test]
fn what_is_not_seen_changes_no_bit() -> Result<()> {
    let device = Device::cpu(2)?;
    for dtype in FLOATS {
        let sizes = [1, 140, 140, 2, 1, 16];
        let [q, k, v, _] = operands(&device, dtype, sizes)?;
        let ranges = KeyRanges::from_documents(&[vec![0, 60, 140]], 140)?;
        let config = AttentionConfig { ranges: Some(ranges), ..AttentionConfig::bidirectional(16) };
        let out = attention(&q, &k, &v, &config)?.0;
        // Other keys and values of the first document leave the second one's results as they are.
        let mut other = Tensor::full(&device, dtype, k.dims(), 3.0)?;
        other.narrow_mut(1, 60, 80, |part| part.copy_from(&k.narrow(1, 60, 80)?))?;
        let got = attention(&q, &other, &v, &config)?.0;
        let second = |x: &Tensor| x.narrow(1, 60, 80);
        assert_same_bits(&format!("{dtype}"), &second(&got)?, &second(&out)?);
        for threads in [1, 3] {
            let device = Device::cpu(threads)?;
            let [q, k, v, _] = operands(&device, dtype, sizes)?;
            let got = attention(&q, &k, &v, &config)?.0;
            assert_same_bits(&format!("{dtype}, {threads} threads"), &got, &out);
        }
    }
    Ok(())
}

#[test]
fn gradients_agree_with_finite_differences() -> Result<()> {
    let device = Device::cpu(1)?;
    for options in combinations(5) {
        let sizes = [2, 5, 5, 2, 1, 2];
        let [q, k, v, dout] = operands(&device, DType::F64, sizes)?;
        let config = options.config(sizes)?;
        let (out, lse) = attention(&q, &k, &v, &config)?;
        let (dq, dk, dv) = attention_backward(&dout, (&q, &k, &v), (&out, &lse), &config)?;
        let f = |q: &Tensor, k: &Tensor, v: &Tensor| dot(&attention(q, k, v, &config)?.0, &dout);
        let name = format!("{options:?}");
        assert_gradient(&format!("{name} dq"), &q, &dq, |q| f(q, &k, &v))?;
        assert_gradient(&format!("{name} dk"), &k, &dk, |k| f(&q, k, &v))?;
        assert_gradient(&format!("{name} dv"), &v, &dv, |v| f(&q, &k, v))?;
    }
    Ok(())
}

#[test]
fn wrong_options_are_refused_in_one_line() -> Result<()> {
    let x = Tensor::zeros(&Device::cpu(1)?, DType::F32, &[2, 3, 1, 4])?;
    let says = |config: AttentionConfig| attention(&x, &x, &x, &config).unwrap_err().to_string();
    let plain = AttentionConfig::causal(4);
    assert_eq!(
        says(AttentionConfig { window: Some(0), ..plain.clone() }),
        "attention: a window must be at least 1, got 0: a query sees itself"
    );
    assert_eq!(
        says(AttentionConfig { softcap: Some(0.0), ..plain.clone() }),
        "attention: softcap must be positive, got 0; omit it instead"
    );
    let ranges = Some(KeyRanges::from_lengths(&[1, 2, 3], 3)?);
    assert_eq!(
        says(AttentionConfig { ranges, ..plain }),
        "attention: ranges of keys for 3 rows of 3 queries, q is [2, 3, 1, 4]"
    );
    let refused = |ranges: Result<KeyRanges>| ranges.unwrap_err().to_string();
    assert_eq!(
        refused(KeyRanges::new(1, 2, vec![[1, 2], [0, 2]])),
        "attention: the ranges of keys must not decrease: row 0 has 1..2 for query 0 and 0..2 for the next"
    );
    assert_eq!(
        refused(KeyRanges::from_documents(&[vec![0, 4], vec![0, 3, 9]], 8)),
        "attention: document boundaries must begin with 0, not decrease, and end at 8 at most: row 1 has [0, 3, 9]"
    );
    assert_eq!(
        refused(KeyRanges::new(2, 8, vec![[0, 8]; 8])),
        "attention: 8 ranges for 2 rows of 8 queries"
    );
    Ok(())
}
