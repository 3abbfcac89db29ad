//! The head fused with its cross-entropy, in chunks of tokens and shards of the vocabulary.

use ferrotron_tensor::ops::cross_entropy::{CrossEntropyConfig, VocabShard};
use ferrotron_tensor::ops::linear_cross_entropy::{
    HeadWeights, LinearCrossEntropy, linear_cross_entropy, linear_cross_entropy_shard,
};
use ferrotron_tensor::{DType, Result, Tensor};

use crate::both::{assert_close, cpu, there};
use crate::reference::head::{ALL, gradients};
use crate::reference::shards::{Rank, on_ranks, shard_of};
use crate::support::{FLOATS, gpu, random};

/// Tokens, width, classes.
const N: usize = 12;
const C: usize = 24;
const V: usize = 40;
const SCALE: f64 = 0.25;
const CONFIG: CrossEntropyConfig = CrossEntropyConfig { ignore_index: 2, label_smoothing: 0.125 };

/// Soft caps of the logits, which are up to about 4.
const SOFTCAPS: [Option<f64>; 2] = [None, Some(2.0)];

/// x (3, 4, C), W (V, C) and targets, one of them negative.
fn operands(dtype: DType) -> Result<[Tensor; 3]> {
    let list: Vec<i64> =
        (0..N as i64).map(|i| if i == 4 { -1 } else { i * i * 7 % V as i64 }).collect();
    Ok([
        random(&cpu()?, dtype, &[3, N / 3, C], 1)?.mul_scalar(0.25)?,
        random(&cpu()?, dtype, &[V, C], 2)?,
        Tensor::from_slice(&cpu()?, &list, &[3, N / 3])?,
    ])
}

/// Loss, lse, dx and dW on the operands' device.
fn run(
    [x, weight, targets]: [&Tensor; 3],
    softcap: Option<f64>,
    bytes: usize,
    shard: Option<(VocabShard, &Rank)>,
) -> Result<[Tensor; 4]> {
    let head = HeadWeights { softcap, ..HeadWeights::from(weight) };
    let found = match shard {
        None => linear_cross_entropy(x, head, targets, &CONFIG, bytes, ALL)?,
        Some((shard, rank)) => {
            linear_cross_entropy_shard(x, head, targets, &CONFIG, bytes, ALL, (shard, rank))?
        }
    };
    let LinearCrossEntropy { loss, lse, kept } = found;
    let mut dweight = Tensor::full(x.device(), lse.dtype(), weight.dims(), 1.0)?;
    let dx = gradients(kept, (x, head, targets), &lse, &CONFIG, SCALE, &mut dweight)?;
    Ok([loss, lse, dx, dweight])
}

/// Tolerances of logits up to 4, which are sums of C products up to 1, rounded to the dtype. lse is as far off as they
/// are. A logit's gradient is at most SCALE, and rounded too.
fn tolerances(dtype: DType) -> [f64; 4] {
    let eps = dtype.accumulator().epsilon() * (C + V) as f64 + 8.0 * dtype.epsilon();
    let sums = eps * SCALE * 2.0;
    [eps * N as f64, eps, sums * V as f64, sums * N as f64]
}

#[test]
fn every_bound_gives_what_the_cpu_gives() -> Result<()> {
    let Some(gpu) = gpu("every_bound_gives_what_the_cpu_gives")? else { return Ok(()) };
    for (dtype, softcap) in FLOATS.into_iter().flat_map(|dtype| SOFTCAPS.map(|cap| (dtype, cap))) {
        let [x, weight, targets] = operands(dtype)?;
        let want = run([&x, &weight, &targets], softcap, usize::MAX, None)?;
        let there = |x: &Tensor| there(&gpu, x);
        let (x, weight, targets) = (there(&x)?, there(&weight)?, there(&targets)?);
        for tokens in [1, 5, N] {
            let got = run([&x, &weight, &targets], softcap, tokens * V * dtype.size(), None)?;
            for (((name, got), want), eps) in
                ["loss", "lse", "dx", "dW"].iter().zip(&got).zip(&want).zip(tolerances(dtype))
            {
                let what = format!("{name} of {tokens} tokens at a time");
                assert_close(&what, got, want, eps, eps)?;
            }
        }
    }
    Ok(())
}

#[test]
fn shards_give_their_parts() -> Result<()> {
    let Some(gpu) = gpu("shards_give_their_parts")? else { return Ok(()) };
    let cases = [DType::F32, DType::BF16].map(|dtype| SOFTCAPS.map(|cap| (dtype, cap)));
    for (dtype, softcap) in cases.into_iter().flatten() {
        let [x, weight, targets] = operands(dtype)?;
        let [loss, lse, dx, dweight] = run([&x, &weight, &targets], softcap, usize::MAX, None)?;
        for bytes in [usize::MAX, 100 * dtype.size()] {
            let ranks = on_ranks(3, |rank| -> Result<_> {
                let (shard, classes) = shard_of(rank.rank, 3, V);
                let there = |x: &Tensor| there(&gpu, x);
                let part = there(&weight.narrow(0, shard.offset, classes)?.contiguous()?)?;
                let operands = [&there(&x)?, &part, &there(&targets)?];
                let [loss, lse, dx, dweight] = run(operands, softcap, bytes, Some((shard, &rank)))?;
                Ok((loss, lse, rank.sum_over_ranks(&dx)?, dweight, shard.offset, classes))
            });
            for found in ranks {
                let (got_loss, got_lse, got_dx, got_dweight, offset, classes) = found?;
                let part = dweight.narrow(0, offset, classes)?.contiguous()?;
                let pairs =
                    [(got_loss, &loss), (got_lse, &lse), (got_dx, &dx), (got_dweight, &part)];
                for (((got, want), eps), name) in
                    pairs.iter().zip(tolerances(dtype)).zip(["loss", "lse", "dx", "dW"])
                {
                    let what = format!("{name} of {classes} classes from {offset}");
                    // dx is rounded in each part.
                    assert_close(&what, got, want, 3.0 * eps, 3.0 * eps)?;
                }
            }
        }
    }
    Ok(())
}
