//! Attention against naive f64 arithmetic and finite differences.

use crate::reference::*;
use ferrotron_tensor::ops::attention::*;
use ferrotron_tensor::ops::concat::concat;
use ferrotron_tensor::{DType, Device, RandomKey, Result, ShardSpec, Tensor};

/// (B, T, S, H, G, D)
type Sizes = [usize; 6];

fn operands(device: &Device, dtype: DType, sizes: Sizes) -> Result<(Tensor, Tensor, Tensor)> {
    let [b, t, s, h, g, d] = sizes;
    Ok((
        normal(device, dtype, &[b, t, h, d], "q")?,
        normal(device, dtype, &[b, s, g, d], "k")?,
        normal(device, dtype, &[b, s, g, d], "v")?,
    ))
}

fn config(sizes: Sizes, mask: AttentionMask) -> AttentionConfig {
    AttentionConfig { mask, ..AttentionConfig::causal(sizes[5]) }
}

/// The factors of dropout over the whole (B, H, T, S) for a place that is the whole tensor.
fn factors(sizes: Sizes, key: RandomKey, p: f64) -> Vec<f64> {
    let [b, t, s, h, ..] = sizes;
    let count = (b * h * t * s) as u64;
    (0..count).map(|i| if key.uniform(i) >= p { 1.0 / (1.0 - p) } else { 0.0 }).collect()
}

struct Naive {
    out: Vec<f64>,
    lse: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
}

/// The formulas of the header, element by element.
fn naive(
    sizes: Sizes,
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    dout: &[f64],
    config: &AttentionConfig,
    factors: Option<&[f64]>,
) -> Result<Naive> {
    let [batch, t, s, h, g, d] = sizes;
    let (q, k, v) = (q.to_f64()?, k.to_f64()?, v.to_f64()?);
    let mut n = Naive {
        out: vec![0.0; q.len()],
        lse: vec![f64::NEG_INFINITY; batch * h * t],
        dq: vec![0.0; q.len()],
        dk: vec![0.0; k.len()],
        dv: vec![0.0; v.len()],
    };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    for b in 0..batch {
        for head in 0..h {
            for i in 0..t {
                let row = ((b * t + i) * h + head) * d;
                let at = |j: usize| ((b * s + j) * g + head / (h / g)) * d;
                let seen = match config.mask {
                    AttentionMask::None => s,
                    AttentionMask::Causal => (i + 1 + s).saturating_sub(t).min(s),
                };
                let qi = &q[row..row + d];
                let scores: Vec<f64> =
                    (0..seen).map(|j| config.scale * dot(qi, &k[at(j)..at(j) + d])).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|x| (x - max).exp()).sum();
                if seen == 0 {
                    continue;
                }
                let lse = max + sum.ln();
                n.lse[(b * h + head) * t + i] = lse;
                let factor =
                    |j: usize| factors.map_or(1.0, |f| f[((b * h + head) * t + i) * s + j]);
                let p: Vec<f64> = scores.iter().map(|x| (x - lse).exp()).collect();
                for j in 0..seen {
                    for c in 0..d {
                        n.out[row + c] += factor(j) * p[j] * v[at(j) + c];
                    }
                }
                let gi = &dout[row..row + d];
                let delta = dot(gi, &n.out[row..row + d]);
                for j in 0..seen {
                    let dp = factor(j) * dot(gi, &v[at(j)..at(j) + d]);
                    let ds = p[j] * (dp - delta) * config.scale;
                    for c in 0..d {
                        n.dq[row + c] += ds * k[at(j) + c];
                        n.dk[at(j) + c] += ds * qi[c];
                        n.dv[at(j) + c] += factor(j) * p[j] * gi[c];
                    }
                }
            }
        }
    }
    Ok(n)
}

/// Forward and backward against the naive formulas.
fn check(dtype: DType, sizes: Sizes, mask: AttentionMask, p: f64) -> Result<()> {
    let [b, t, s, h, g, d] = sizes;
    let device = Device::cpu(2)?;
    let (q, k, v) = operands(&device, dtype, sizes)?;
    let dout = normal(&device, dtype, &[b, t, h, d], "dout")?;
    let mut config = config(sizes, mask);
    let key = RandomKey::new(3, 1, "attention");
    let drawn = (p > 0.0).then(|| factors(sizes, key, p));
    if p > 0.0 {
        config.dropout = Some(AttentionDropout::new(p, key, ShardSpec::unsharded(&[b, h, t, s]))?);
    }
    let want = naive(sizes, (&q, &k, &v), &dout.to_f64()?, &config, drawn.as_deref())?;
    let name = format!("{dtype} {sizes:?} {mask:?} {p}");
    let (out, lse) = attention(&q, &k, &v, &config)?;
    // Scores of size sqrt(D) carry errors of D eps / 2 each; sums over keys add theirs.
    let eps = dtype.accumulator().epsilon() * (d + 16) as f64;
    assert_close(&format!("{name} out"), &out, &want.out, 4.0 * eps + dtype.epsilon());
    assert_close(&format!("{name} lse"), &lse, &want.lse, 4.0 * eps);
    let (dq, dk, dv) = attention_backward(&dout, (&q, &k, &v), (&out, &lse), &config)?;
    // delta carries the rounding of out; dk and dv sum over all queries of H / G heads.
    let size = (d as f64).sqrt() / (1.0 - p);
    let each = (16.0 * eps + 4.0 * dtype.epsilon()) * size;
    let sums = each * ((t * h / g) as f64).sqrt();
    assert_close(&format!("{name} dq"), &dq, &want.dq, each);
    assert_close(&format!("{name} dk"), &dk, &want.dk, sums);
    assert_close(&format!("{name} dv"), &dv, &want.dv, sums);
    Ok(())
}

#[test]
fn every_length_agrees_with_naive_arithmetic() -> Result<()> {
    for t in [1, 2, 63, 64, 65, 130] {
        for mask in [AttentionMask::Causal, AttentionMask::None] {
            check(DType::F64, [1, t, t, 2, 2, 8], mask, 0.0)?;
            check(DType::F32, [2, t, t, 2, 1, 32], mask, 0.0)?;
        }
    }
    Ok(())
}

#[test]
fn every_width_and_dtype_agrees_with_naive_arithmetic() -> Result<()> {
    for dtype in FLOATS {
        for d in [1, 4, 32, 64, 80, 128] {
            check(dtype, [1, 70, 70, 2, 2, d], AttentionMask::Causal, 0.0)?;
        }
    }
    Ok(())
}

#[test]
fn caches_and_groups_agree_with_naive_arithmetic() -> Result<()> {
    for (t, s) in [(1, 200), (3, 67), (70, 130), (64, 128), (130, 70), (5, 1), (1, 1)] {
        for mask in [AttentionMask::Causal, AttentionMask::None] {
            check(DType::F64, [2, t, s, 6, 2, 4], mask, 0.0)?;
            check(DType::F32, [1, t, s, 4, 1, 16], mask, 0.0)?;
        }
    }
    Ok(())
}

#[test]
fn dropout_agrees_with_naive_arithmetic() -> Result<()> {
    for (t, s) in [(1, 1), (66, 66), (3, 70), (67, 131)] {
        check(DType::F64, [2, t, s, 4, 2, 5], AttentionMask::Causal, 0.3)?;
        check(DType::F32, [1, t, s, 2, 2, 32], AttentionMask::None, 0.1)?;
        check(DType::BF16, [1, t, s, 2, 2, 32], AttentionMask::Causal, 0.1)?;
    }
    Ok(())
}

#[test]
fn gradients_agree_with_finite_differences() -> Result<()> {
    let device = Device::cpu(1)?;
    for (sizes, p) in [
        ([1, 1, 1, 1, 1, 1], 0.0),
        ([1, 5, 5, 2, 1, 3], 0.0),
        ([2, 3, 4, 2, 2, 2], 0.0),
        ([1, 4, 3, 2, 2, 2], 0.0),
        ([1, 5, 5, 2, 1, 3], 0.4),
    ] {
        let [b, t, s, h, _, d] = sizes;
        let (q, k, v) = operands(&device, DType::F64, sizes)?;
        let dout = normal(&device, DType::F64, &[b, t, h, d], "dout")?;
        let mut config = config(sizes, AttentionMask::Causal);
        let place = ShardSpec::unsharded(&[b, h, t, s]);
        config.dropout = Some(AttentionDropout::new(p, RandomKey::new(5, 2, "x"), place)?);
        let (out, lse) = attention(&q, &k, &v, &config)?;
        let (dq, dk, dv) = attention_backward(&dout, (&q, &k, &v), (&out, &lse), &config)?;
        let f = |q: &Tensor, k: &Tensor, v: &Tensor| dot(&attention(q, k, v, &config)?.0, &dout);
        let name = format!("{sizes:?} {p}");
        assert_gradient(&format!("{name} dq"), &q, &dq, |q| f(q, &k, &v))?;
        assert_gradient(&format!("{name} dk"), &k, &dk, |k| f(&q, k, &v))?;
        assert_gradient(&format!("{name} dv"), &v, &dv, |v| f(&q, &k, v))?;
    }
    Ok(())
}

#[test]
fn packed_strided_and_broadcast_operands_change_no_bit() -> Result<()> {
    let device = Device::cpu(2)?;
    for dtype in FLOATS {
        let packed = normal(&device, dtype, &[2, 70, 8 * 20], "packed")?;
        let (q, k, v) = split_packed(&packed, 4, 2)?;
        assert_eq!((q.dims(), v.dims()), (&[2, 70, 4, 20][..], &[2, 70, 2, 20][..]));
        assert!(!q.is_contiguous());
        let dout = normal(&device, dtype, &[2, 70, 4, 20], "dout")?;
        let config = AttentionConfig::causal(20);
        let (out, lse) = attention(&q, &k, &v, &config)?;
        let (dq, dk, dv) = attention_backward(&dout, (&q, &k, &v), (&out, &lse), &config)?;

        let dense = (q.contiguous()?, k.contiguous()?, v.contiguous()?);
        let got = attention(&dense.0, &dense.1, &dense.2, &config)?;
        assert_same_bits("dense out", &got.0, &out);
        assert_same_bits("dense lse", &got.1, &lse);
        let turned = |x: &Tensor| x.transpose(1, 3)?.contiguous()?.transpose(1, 3);
        let (q2, k2, v2, dout2) = (turned(&q)?, turned(&k)?, turned(&v)?, turned(&dout)?);
        assert_same_bits("turned out", &attention(&q2, &k2, &v2, &config)?.0, &out);
        let got = attention_backward(&dout2, (&q2, &k2, &v2), (&out, &lse), &config)?;
        assert_same_bits("turned dq", &got.0, &dq);
        assert_same_bits("turned dk", &got.1, &dk);
        assert_same_bits("turned dv", &got.2, &dv);

        let all = attention_backward_packed(&dout, (&q, &k, &v), (&out, &lse), &config)?;
        assert_eq!(all.dims(), packed.dims());
        let (a, b, c) = split_packed(&all, 4, 2)?;
        assert_same_bits("packed dq", &a, &dq);
        assert_same_bits("packed dk", &b, &dk);
        assert_same_bits("packed dv", &c, &dv);

        let one = k.narrow(0, 0, 1)?.broadcast_to(&[2, 70, 2, 20])?;
        let want = attention(&q, &one.contiguous()?, &v, &config)?.0;
        assert_same_bits("broadcast", &attention(&q, &one, &v, &config)?.0, &want);
    }
    Ok(())
}

#[test]
fn bits_do_not_depend_on_threads_batch_or_heads() -> Result<()> {
    let sizes = [2, 150, 150, 4, 2, 32];
    let run = |dtype: DType, threads: usize| -> Result<[Tensor; 5]> {
        let device = Device::cpu(threads)?;
        let (q, k, v) = operands(&device, dtype, sizes)?;
        let config = config(sizes, AttentionMask::Causal);
        let (out, lse) = attention(&q, &k, &v, &config)?;
        let (dq, dk, dv) = attention_backward(&q, (&q, &k, &v), (&out, &lse), &config)?;
        // The second sample's last group alone, and its last query alone.
        let part = |x: &Tensor, from, len| x.narrow(0, 1, 1)?.narrow(2, from, len);
        let (q1, k1, v1) = (part(&q, 2, 2)?, part(&k, 1, 1)?, part(&v, 1, 1)?);
        let (out1, lse1) = attention(&q1, &k1, &v1, &config)?;
        assert_same_bits("alone: out", &out1, &part(&out, 2, 2)?);
        let got = attention_backward(&q1, (&q1, &k1, &v1), (&out1, &lse1), &config)?;
        assert_same_bits("alone: dq", &got.0, &part(&dq, 2, 2)?);
        assert_same_bits("alone: dk", &got.1, &part(&dk, 1, 1)?);
        assert_same_bits("alone: dv", &got.2, &part(&dv, 1, 1)?);
        let last = attention(&q1.narrow(1, 149, 1)?, &k1, &v1, &config)?.0;
        assert_same_bits("with a cache", &last, &out1.narrow(1, 149, 1)?);
        // Fewer keys than the queries beside it see.
        let (k2, v2) =
            (concat(&[&k1, &k1.narrow(1, 7, 19)?], 1)?, concat(&[&v1, &v1.narrow(1, 7, 19)?], 1)?);
        let (out2, lse2) = attention(&q1, &k2, &v2, &config)?;
        for query in [0, 12, 40, 90, 149] {
            let keys = query + 20;
            let (k, v) = (k2.narrow(1, 0, keys)?, v2.narrow(1, 0, keys)?);
            let (out, lse) = attention(&q1.narrow(1, query, 1)?, &k, &v, &config)?;
            assert_same_bits("few keys: out", &out, &out2.narrow(1, query, 1)?);
            assert_same_bits("few keys: lse", &lse, &lse2.narrow(2, query, 1)?);
        }
        Ok([out, lse, dq, dk, dv])
    };
    for dtype in [DType::F32, DType::BF16] {
        let one = run(dtype, 1)?;
        for threads in [2, 3] {
            for (a, b) in one.iter().zip(run(dtype, threads)?) {
                assert_same_bits(&format!("{dtype}, {threads} threads"), a, &b);
            }
        }
    }
    Ok(())
}

#[test]
fn dropout_keeps_the_expectation_and_follows_the_place() -> Result<()> {
    let device = Device::cpu(2)?;
    let [b, t, h, d] = [2, 20, 4, 8];
    let sizes = [b, t, t, h, h, d];
    let (q, k, v) = operands(&device, DType::F64, sizes)?;
    let plain = config(sizes, AttentionMask::Causal);
    let want = attention(&q, &k, &v, &plain)?.0.to_f64()?;
    let with = |key, place| -> Result<AttentionConfig> {
        Ok(AttentionConfig {
            dropout: Some(AttentionDropout::new(0.25, key, place)?),
            ..plain.clone()
        })
    };
    let draws = 400;
    let mut mean = vec![0.0; want.len()];
    for step in 0..draws {
        let config = with(RandomKey::new(1, step, "p"), ShardSpec::unsharded(&[b, h, t, t]))?;
        let out = attention(&q, &k, &v, &config)?.0.to_f64()?;
        mean.iter_mut().zip(out).for_each(|(mean, x)| *mean += x / draws as f64);
    }
    // An element's variance is p / (1 - p) sum (p_ij v_j)^2 <= 1/3 max |v|^2; six standard errors.
    let bound = 6.0 * (16.0 / 3.0 / draws as f64).sqrt();
    for (mean, want) in mean.iter().zip(&want) {
        assert!((mean - want).abs() < bound, "mean {mean}, want {want}");
    }
    // A rank with sample 1 and heads 1 and 3 draws what the whole draws there.
    let key = RandomKey::new(1, 0, "p");
    let whole = attention(&q, &k, &v, &with(key, ShardSpec::unsharded(&[b, h, t, t]))?)?.0;
    let pieces: [&[(usize, usize)]; 4] = [&[(1, 1)], &[(1, 1), (3, 1)], &[(0, t)], &[(0, t)]];
    let config = with(key, ShardSpec::new(&[b, h, t, t], &pieces)?)?;
    // Heads 1 and 3: the second of each pair.
    let part = |x: &Tensor| -> Result<Tensor> {
        x.narrow(0, 1, 1)?.reshape(&[1, t, 2, 2, d])?.narrow(3, 1, 1)?.reshape(&[1, t, 2, d])
    };
    let got = attention(&part(&q)?, &part(&k)?, &part(&v)?, &config)?.0;
    assert_same_bits("part", &got, &part(&whole)?);
    Ok(())
}

#[test]
fn empty_and_unseen_rows_pass() -> Result<()> {
    let device = Device::cpu(2)?;
    for sizes in [
        [0, 3, 3, 2, 1, 4],
        [2, 0, 3, 2, 1, 4],
        [2, 3, 0, 2, 1, 4],
        [2, 3, 3, 0, 0, 4],
        [2, 3, 3, 2, 1, 0],
        [1, 9, 4, 1, 1, 2],
    ] {
        let [b, t, _, h, _, d] = sizes;
        for dtype in [DType::F32, DType::BF16] {
            let (q, k, v) = operands(&device, dtype, sizes)?;
            let config = config(sizes, AttentionMask::Causal);
            let (out, lse) = attention(&q, &k, &v, &config)?;
            assert_eq!((out.dims(), lse.dims()), (&[b, t, h, d][..], &[b, h, t][..]));
            let (dq, dk, dv) = attention_backward(&out, (&q, &k, &v), (&out, &lse), &config)?;
            assert_eq!((dq.dims(), dk.dims(), dv.dims()), (q.dims(), k.dims(), v.dims()));
            for x in [&out, &dq, &dk, &dv] {
                assert!(x.to_f64()?.iter().all(|x| x.is_finite()), "{sizes:?} {x:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn large_scores_do_not_overflow() -> Result<()> {
    let device = Device::cpu(1)?;
    let q = Tensor::full(&device, DType::F32, &[1, 70, 1, 4], 100.0)?;
    let v = normal(&device, DType::F32, &[1, 70, 1, 4], "v")?;
    let (out, lse) = attention(&q, &q, &v, &AttentionConfig::causal(4))?;
    let (dq, dk, _) =
        attention_backward(&v, (&q, &q, &v), (&out, &lse), &AttentionConfig::causal(4))?;
    for x in [out, lse, dq, dk] {
        assert!(x.to_f64()?.iter().all(|x| x.is_finite()));
    }
    Ok(())
}
