//! Attention to blocks of keys in turn, as ranks of a ring see them, against attention to all at once.

use crate::reference::*;
use ferrotron_tensor::ops::attention::*;
use ferrotron_tensor::ops::concat::concat;
use ferrotron_tensor::ops::pointwise::add_assign;
use ferrotron_tensor::{DType, Device, RandomKey, Result, ShardSpec, Tensor};

const B: usize = 2;
const H: usize = 4;
const D: usize = 8;

/// A ring of ranks; rank r holds the chunks r and 2 ranks - 1 - r of the sequence.
#[derive(Clone, Copy)]
struct Ring {
    ranks: usize,
    chunk: usize,
    p: f64,
}

/// A rank's q, k, v and dout.
type Held = [Tensor; 4];

/// One turn of the ring: the rank's queries from `first` on see keys of a rank.
struct Turn {
    first: usize,
    queries: Vec<(usize, usize)>,
    keys: Vec<(usize, usize)>,
    mask: AttentionMask,
}

impl Ring {
    fn length(self) -> usize {
        2 * self.ranks * self.chunk
    }

    /// The (offset, length) pieces of the sequence that a rank holds.
    fn pieces(self, rank: usize) -> Vec<(usize, usize)> {
        let piece = |at: usize| (at * self.chunk, self.chunk);
        vec![piece(rank), piece(2 * self.ranks - 1 - rank)]
    }

    /// The mask between `rank`'s queries and rank `other`'s keys. Its own are causal; of an earlier rank it sees the
    /// first chunk; of a later one both chunks, but only from its own second chunk.
    fn turn(self, rank: usize, other: usize) -> Turn {
        let (queries, keys) = (self.pieces(rank), self.pieces(other));
        match other.cmp(&rank) {
            std::cmp::Ordering::Equal => {
                Turn { first: 0, queries, keys, mask: AttentionMask::Causal }
            }
            std::cmp::Ordering::Less => {
                Turn { first: 0, queries, keys: keys[..1].into(), mask: AttentionMask::None }
            }
            std::cmp::Ordering::Greater => Turn {
                first: self.chunk,
                queries: queries[1..].into(),
                keys,
                mask: AttentionMask::None,
            },
        }
    }

    /// The config of all queries (`None`) or of a turn.
    fn config(self, turn: Option<&Turn>) -> Result<AttentionConfig> {
        let t = self.length();
        let mask = turn.map_or(AttentionMask::Causal, |turn| turn.mask);
        let all = [(0, t)];
        let (queries, keys) = turn.map_or((&all[..], &all[..]), |t| (&t.queries, &t.keys));
        let place = ShardSpec::new(&[B, H, t, t], &[&[(0, B)], &[(0, H)], queries, keys])?;
        let key = RandomKey::new(3, 1, "ring");
        let dropout =
            if self.p > 0.0 { Some(AttentionDropout::new(self.p, key, place)?) } else { None };
        Ok(AttentionConfig { mask, dropout, ..AttentionConfig::causal(D) })
    }
}

fn take(x: &Tensor, pieces: &[(usize, usize)]) -> Result<Tensor> {
    let parts = pieces.iter().map(|&(at, len)| x.narrow(1, at, len)).collect::<Result<Vec<_>>>()?;
    concat(&parts.iter().collect::<Vec<_>>(), 1)
}

/// Adds `part` to the pieces of `sum`, in the dtype of the sum.
fn add(sum: &mut Tensor, part: &Tensor, pieces: &[(usize, usize)]) -> Result<()> {
    let part = part.cast(sum.dtype())?;
    let mut start = 0;
    for &(at, len) in pieces {
        let part = part.narrow(1, start, len)?;
        sum.narrow_mut(1, at, len, |sum| add_assign(sum, &part))?;
        start += len;
    }
    Ok(())
}

/// Forward and backward over the ring against the whole.
fn check(dtype: DType, groups: usize, ring: Ring) -> Result<()> {
    let Ring { ranks, chunk, p } = ring;
    let t = ring.length();
    let name = format!("{dtype}, {ranks} ranks, chunks of {chunk}, {groups} groups, dropout {p}");
    let device = Device::cpu(2)?;
    let acc = dtype.accumulator();
    let (q, dout) = (
        normal(&device, dtype, &[B, t, H, D], "q")?,
        normal(&device, dtype, &[B, t, H, D], "dout")?,
    );
    let (k, v) = (
        normal(&device, dtype, &[B, t, groups, D], "k")?,
        normal(&device, dtype, &[B, t, groups, D], "v")?,
    );
    let config = ring.config(None)?;
    let (out, lse) = attention(&q, &k, &v, &config)?;
    let (dq, dk, dv) = attention_backward(&dout, (&q, &k, &v), (&out, &lse), &config)?;

    let held = |rank: usize| -> Result<Held> {
        let pieces = ring.pieces(rank);
        Ok([take(&q, &pieces)?, take(&k, &pieces)?, take(&v, &pieces)?, take(&dout, &pieces)?])
    };
    let zeros = |dims: &[usize]| Tensor::zeros(&device, acc, dims);
    let (mut dq_sum, mut dk_sum, mut dv_sum) =
        (zeros(&[B, t, H, D])?, zeros(&[B, t, groups, D])?, zeros(&[B, t, groups, D])?);
    // As in attention.rs; the parts of a 16-bit result, whose weights are 1 together, are rounded each, and
    // elements are below 4.
    let eps = dtype.accumulator().epsilon() * (D + 16) as f64;
    let forward = 4.0 * (ranks as f64) * eps + 4.0 * dtype.epsilon();
    let size = (D as f64).sqrt() / (1.0 - p);
    let each = (16.0 * eps + 4.0 * dtype.epsilon()) * size * (ranks as f64).sqrt();
    let sums = each * ((t * H / groups) as f64).sqrt();
    for rank in 0..ranks {
        let [q, _, _, dout] = held(rank)?;
        let mut out_sum = Tensor::full(&device, acc, &[B, 2 * chunk, H, D], f64::NAN)?;
        let mut lse_sum = Tensor::full(&device, acc, &[B, H, 2 * chunk], f64::NEG_INFINITY)?;
        let turns = || (0..ranks).map(|step| (rank + ranks - step) % ranks);
        // The block of another rank's keys that a turn sees is the front of what that rank holds.
        let keys_of = |turn: &Turn, other: usize| -> Result<(Tensor, Tensor)> {
            let [_, k, v, _] = held(other)?;
            let len = turn.keys.len() * chunk;
            Ok((k.narrow(1, 0, len)?, v.narrow(1, 0, len)?))
        };
        for other in turns() {
            let turn = ring.turn(rank, other);
            let (k, v) = keys_of(&turn, other)?;
            let q = q.narrow(1, turn.first, 2 * chunk - turn.first)?;
            let (block_out, block_lse) = attention(&q, &k, &v, &ring.config(Some(&turn))?)?;
            let block = (&block_out, &block_lse);
            merge_attention((&mut out_sum, &mut lse_sum), turn.first, block)?;
        }
        let pieces = ring.pieces(rank);
        let want = take(&out, &pieces)?.to_f64()?;
        assert_close(&format!("{name}, rank {rank}: out"), &out_sum, &want, forward);
        let want = take(&lse.transpose(1, 2)?, &pieces)?.transpose(1, 2)?.to_f64()?;
        let lse_tolerance = 4.0 * ranks as f64 * eps;
        assert_close(&format!("{name}, rank {rank}: lse"), &lse_sum, &want, lse_tolerance);

        let out_sum = out_sum.cast(dtype)?;
        for other in turns() {
            let turn = ring.turn(rank, other);
            let (k, v) = keys_of(&turn, other)?;
            let rows = |x: &Tensor, dim| x.narrow(dim, turn.first, 2 * chunk - turn.first);
            let (q, dout) = (rows(&q, 1)?, rows(&dout, 1)?);
            let (out, lse) = (rows(&out_sum, 1)?, rows(&lse_sum, 2)?);
            let config = ring.config(Some(&turn))?;
            let (dq, dk, dv) = attention_backward(&dout, (&q, &k, &v), (&out, &lse), &config)?;
            add(&mut dq_sum, &dq, &turn.queries)?;
            add(&mut dk_sum, &dk, &turn.keys)?;
            add(&mut dv_sum, &dv, &turn.keys)?;
        }
    }
    assert_close(&format!("{name}: dq"), &dq_sum, &dq.to_f64()?, each);
    assert_close(&format!("{name}: dk"), &dk_sum, &dk.to_f64()?, sums);
    assert_close(&format!("{name}: dv"), &dv_sum, &dv.to_f64()?, sums);
    Ok(())
}

#[test]
fn a_ring_finds_what_the_whole_finds() -> Result<()> {
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        for ranks in 1..=4 {
            for p in [0.0, 0.25] {
                for (chunk, groups) in [(1, 4), (5, 2), (33, 1)] {
                    check(dtype, groups, Ring { ranks, chunk, p })?;
                }
            }
        }
    }
    // Longer than the tiles of queries and of keys.
    check(DType::F64, 2, Ring { ranks: 2, chunk: 131, p: 0.25 })
}

#[test]
fn queries_that_see_nothing_and_extreme_sums_merge() -> Result<()> {
    let device = Device::cpu(2)?;
    let (inf, big) = (f64::INFINITY, 1e4);
    // (lse, lse of the block, lse of both, share of the block); out is 1 and 3, or NaN where nothing was seen.
    let cases = [
        (-inf, -inf, -inf, 0.0),
        (-inf, 0.5, 0.5, 1.0),
        (0.5, -inf, 0.5, 0.0),
        (0.0, 0.0, std::f64::consts::LN_2, 0.5),
        (big, 0.0, big, 0.0),
        (-big, big, big, 1.0),
        (-big, -big, std::f64::consts::LN_2 - big, 0.5),
    ];
    let n = cases.len();
    for dtype in FLOATS {
        let acc = dtype.accumulator();
        let lse = |f: fn(&(f64, f64, f64, f64)) -> f64| cases.iter().map(f).collect::<Vec<_>>();
        // Two samples, whose queries 2.. are merged; two elements a head.
        let state: Vec<f64> = lse(|c| if c.0 == -f64::INFINITY { f64::NAN } else { 1.0 });
        let block: Vec<f64> = lse(|c| if c.1 == -f64::INFINITY { 0.0 } else { 3.0 });
        let pad = |values: &[f64], of: f64| [&[of, of], values, &[of, of], values].concat();
        let twice = |values: Vec<f64>| values.iter().flat_map(|&x| [x, x]).collect::<Vec<_>>();
        let mut out = of(&device, acc, &[2, n + 2, 1, 2], &twice(pad(&state, 7.0)))?;
        let mut sums = of(&device, acc, &[2, 1, n + 2], &pad(&lse(|c| c.0), 8.0))?;
        let block_out = of(&device, dtype, &[2, n, 1, 2], &twice([&block[..], &block].concat()))?;
        let block_lse = lse(|c| c.1);
        let block_lse = of(&device, acc, &[2, 1, n], &[&block_lse[..], &block_lse].concat())?;
        // A block whose heads and queries are exchanged in memory is the same block.
        let turned = block_out.transpose(1, 3)?.contiguous()?.transpose(1, 3)?;
        merge_attention((&mut out, &mut sums), 2, (&turned, &block_lse))?;
        let eps = 4.0 * acc.epsilon();
        let mean: Vec<f64> = lse(|c| if c.2 == -f64::INFINITY { 0.0 } else { 1.0 + 2.0 * c.3 });
        assert_close(&format!("{dtype} out"), &out, &twice(pad(&mean, 7.0)), eps);
        assert_close(&format!("{dtype} lse"), &sums, &pad(&lse(|c| c.2), 8.0), eps);
    }
    Ok(())
}

#[test]
fn merging_refuses_what_does_not_fit() -> Result<()> {
    let device = Device::cpu(1)?;
    let x = |dtype, dims: &[usize]| Tensor::zeros(&device, dtype, dims);
    let mut out = x(DType::F32, &[1, 4, 2, 3])?;
    let mut lse = x(DType::F32, &[1, 2, 4])?;
    let mut says = |first: usize, block: &Tensor, block_lse: &Tensor| {
        merge_attention((&mut out, &mut lse), first, (block, block_lse)).unwrap_err().to_string()
    };
    let (block, block_lse) = (x(DType::BF16, &[1, 2, 2, 3])?, x(DType::F32, &[1, 2, 2])?);
    assert_eq!(
        says(3, &block, &block_lse),
        "merge_attention: needs out (B, T, H, D), lse (B, H, T) and a block of queries among them, got \
         [1, 4, 2, 3], [1, 2, 4] and, from query 3 on, [1, 2, 2, 3], [1, 2, 2]"
    );
    let wide = x(DType::F64, &[1, 2, 2, 3])?;
    assert!(says(0, &wide, &block_lse).contains("f64"));
    // Nothing is merged, nothing changes.
    let none = (x(DType::BF16, &[1, 0, 2, 3])?, x(DType::F32, &[1, 2, 0])?);
    merge_attention((&mut out, &mut lse), 4, (&none.0, &none.1))
}
