//! Cross-entropy of a vocabulary in shards against the same of the whole.

use std::sync::atomic::Ordering::Relaxed;

use crate::reference::head::{ALL, gradients};
use crate::reference::shards::*;
use crate::reference::*;
use ferrotron_tensor::ops::cross_entropy::*;
use ferrotron_tensor::ops::linear_cross_entropy::*;
use ferrotron_tensor::{DType, Device, Result, Tensor};

const N: usize = 12;
const C: usize = 5;
const SCALE: f64 = 0.5;

/// The results of one rank, or the only one.
struct Found {
    loss: Tensor,
    lse: Tensor,
    dx: Tensor,
    dweight: Tensor,
    /// Whether logits are kept, calls of the join and elements it got.
    made: (bool, usize, usize),
}

fn config(smoothing: f64) -> CrossEntropyConfig {
    CrossEntropyConfig { ignore_index: 2, label_smoothing: smoothing }
}

fn head(
    (x, weight, targets): (&Tensor, &Tensor, &Tensor),
    config: &CrossEntropyConfig,
    bound: usize,
    shard: Option<(VocabShard, &Rank)>,
) -> Result<Found> {
    let found = match shard {
        None => linear_cross_entropy(x, weight, targets, config, bound, ALL)?,
        Some((shard, rank)) => {
            linear_cross_entropy_shard(x, weight, targets, config, bound, ALL, (shard, rank))?
        }
    };
    let (loss, lse) = (found.loss, found.lse);
    let count = |rank: &Rank| (rank.calls.load(Relaxed), rank.elements.load(Relaxed));
    let (calls, elements) = shard.map_or((0, 0), |(_, rank)| count(rank));
    let made = (matches!(found.kept, Kept::Logits(_)), calls, elements);
    let mut dweight = Tensor::zeros(x.device(), lse.dtype(), weight.dims())?;
    let operands = (x, weight.into(), targets);
    let dx = gradients(found.kept, operands, &lse, config, SCALE, &mut dweight)?;
    // Backward joins nothing.
    assert_eq!(shard.map_or((0, 0), |(_, rank)| count(rank)), (calls, elements));
    Ok(Found { loss, lse, dx, dweight, made })
}

fn targets_of(device: &Device, list: impl Fn(i64) -> i64) -> Result<Tensor> {
    let list: Vec<i64> = (0..N as i64).map(list).collect();
    Tensor::from_slice(device, &list, &[3, N / 3])
}

/// Every rank's loss, lse, dW and, summed, dx against the whole.
fn check(dtype: DType, ranks: usize, v: usize, smoothing: f64, chunk: usize, targets: &Tensor) {
    let name =
        format!("{dtype}, {v} classes, {ranks} shards, smoothing {smoothing}, {chunk} tokens");
    let device = targets.device();
    let x = normal(device, dtype, &[3, N / 3, C], "x").unwrap();
    let weight = normal(device, dtype, &[v, C], "weight").unwrap();
    let config = config(smoothing);
    let want = head((&x, &weight, targets), &config, 1 << 20, None).unwrap();
    let bound = chunk * v.div_ceil(ranks) * dtype.size();
    let found = on_ranks(ranks, |rank| {
        let (shard, classes) = shard_of(rank.rank, ranks, v);
        let weight = weight.narrow(0, shard.offset, classes)?;
        head((&x, &weight, targets), &config, bound, Some((shard, &rank)))
    });
    let found: Vec<Found> = found.into_iter().map(|found| found.expect(&name)).collect();

    // Rounding of the sums of exponentials and of their sum over the shards.
    let eps = dtype.accumulator().epsilon() * (ranks + 4) as f64;
    // A gradient of a logit is rounded to 16 bits, perhaps the other way; these of a token are at most
    // 2 SCALE = 1 together, and elements of the normal operands at most 4. dx is rounded in each part.
    let rounding = 4.0 * (dtype.epsilon() + eps);
    let mut dx = vec![0.0; N * C];
    for (rank, found) in found.iter().enumerate() {
        let name = format!("{name}, rank {rank}");
        let per_token = if smoothing == 0.0 { 3 } else { 4 };
        let made = (chunk >= N, 2 * N.div_ceil(chunk), per_token * N);
        assert_eq!(found.made, made, "{name}");
        let whole = |x: &Tensor| x.to_f64().unwrap();
        assert_close(&format!("{name} loss"), &found.loss, &whole(&want.loss), N as f64 * eps);
        assert_close(&format!("{name} lse"), &found.lse, &whole(&want.lse), eps);
        let (shard, classes) = shard_of(rank, ranks, v);
        let own = want.dweight.narrow(0, shard.offset, classes).unwrap();
        let tolerance = rounding * (N as f64).sqrt();
        assert_close(&format!("{name} dweight"), &found.dweight, &whole(&own), tolerance);
        dx.iter_mut().zip(whole(&found.dx)).for_each(|(sum, part)| *sum += part);
    }
    for other in &found[1..] {
        assert_same_bits(&format!("{name} loss of all ranks"), &other.loss, &found[0].loss);
        assert_same_bits(&format!("{name} lse of all ranks"), &other.lse, &found[0].lse);
    }
    let tolerance = rounding * (1 + ranks) as f64;
    let sum = of(device, DType::F64, want.dx.dims(), &dx).unwrap();
    assert_close(&format!("{name} dx"), &sum, &want.dx.to_f64().unwrap(), tolerance);
}

#[test]
fn shards_find_what_the_whole_finds() -> Result<()> {
    let device = Device::cpu(2)?;
    // Ignored by sign, and by value where the class is 2.
    let targets = |v: i64| targets_of(&device, |i| if i % 5 == 3 { -1 } else { i * i % v });
    for dtype in FLOATS {
        for ranks in 1..=4 {
            for smoothing in [0.0, 0.125] {
                for chunk in [1, 4, N] {
                    check(dtype, ranks, 13, smoothing, chunk, &targets(13)?);
                }
            }
        }
        // Ranks without a class.
        check(dtype, 4, 3, 0.125, 4, &targets(3)?);
        check(dtype, 2, 1, 0.0, N, &targets(1)?);
    }
    Ok(())
}

#[test]
fn long_rows_agree() -> Result<()> {
    let device = Device::cpu(2)?;
    for dtype in [DType::F64, DType::F32] {
        check(dtype, 3, 4099, 0.125, 6, &targets_of(&device, |i| i * 331)?);
    }
    Ok(())
}

#[test]
fn shards_without_a_target_and_batches_without_one_agree() -> Result<()> {
    let device = Device::cpu(1)?;
    for smoothing in [0.0, 0.125] {
        for chunk in [4, N] {
            check(DType::F64, 4, 13, smoothing, chunk, &targets_of(&device, |i| i % 2)?);
            check(DType::F64, 4, 13, smoothing, chunk, &targets_of(&device, |_| -100)?);
            check(DType::F64, 4, 13, smoothing, chunk, &targets_of(&device, |_| 2)?);
        }
    }
    Ok(())
}

/// Vocab-parallel logits as in Megatron-LM's test of its cross-entropy: each of four shards has 0..8 four
/// times over, so lse = ln(16 sum_k e^k).
#[test]
fn given_logits_agree_with_the_closed_form() -> Result<()> {
    let device = Device::cpu(1)?;
    let local: Vec<f64> = (0..16 * 32).map(|i| (i % 8) as f64).collect();
    let logits = Tensor::from_slice(&device, &local, &[16, 32])?;
    let list: Vec<i64> = (0..32).step_by(2).collect();
    let targets = Tensor::from_slice(&device, &list, &[16])?;
    let config = CrossEntropyConfig::default();
    let lse = (16.0 * (0..8).map(|k| f64::from(k).exp()).sum::<f64>()).ln();
    let found = on_ranks(4, |rank| -> Result<_> {
        let (shard, classes) = shard_of(rank.rank, 4, 128);
        assert_eq!((shard.offset, classes), (32 * rank.rank, 32));
        let found = cross_entropy_shard(&logits, &targets, &config, (shard, &rank))?;
        let calls = (rank.calls.load(Relaxed), rank.elements.load(Relaxed));
        let held = logits.clone();
        let one = Tensor::full(&device, DType::F64, &[], 1.0)?;
        let dx = cross_entropy_shard_backward(held, &targets, &found.lse, &config, &one, shard)?;
        let owned = logits.copy()?;
        let id = owned.buffer_id();
        let over = cross_entropy_shard_backward(owned, &targets, &found.lse, &config, &one, shard)?;
        assert_eq!(over.buffer_id(), id);
        assert_same_bits("in place", &over, &dx);
        Ok((found, dx, calls))
    });
    for (rank, found) in found.into_iter().enumerate() {
        let (found, dx, calls) = found?;
        assert_eq!(calls, (2, 3 * 16));
        let losses: f64 = list.iter().map(|t| lse - (t % 8) as f64).sum();
        assert!((lse - 10.2309).abs() < 1e-4);
        let eps = 16.0 * f64::EPSILON;
        assert_close("loss", &found.loss, &[losses], 16.0 * eps);
        assert_close("lse", &found.lse, &[lse; 16], eps);
        let want: Vec<f64> = (0..16 * 32)
            .map(|at| {
                let (token, class) = (at / 32, at % 32 + 32 * rank);
                let hit = if list[token] == class as i64 { 1.0 } else { 0.0 };
                (local[at] - lse).exp() - hit
            })
            .collect();
        assert_close(&format!("gradient of shard {rank}"), &dx, &want, 2.0 * eps);
    }
    Ok(())
}

#[test]
fn infinite_and_undefined_logits_spread_as_in_the_whole() -> Result<()> {
    let device = Device::cpu(1)?;
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    // A shard of nothing but minus infinity, rows of it, and NaN in either shard.
    let rows = [
        [-inf, -inf, 1.0, 2.0],
        [-inf, -inf, -inf, -inf],
        [nan, 0.0, 1.0, 2.0],
        [0.0, 1.0, nan, nan],
        [1e4, 0.0, -1e4, 9e3],
    ];
    let logits = Tensor::from_slice(&device, rows.as_flattened(), &[5, 4])?;
    let targets = Tensor::from_slice(&device, &[3_i64; 5], &[5])?;
    let config = CrossEntropyConfig::default();
    let want = cross_entropy(&logits, &targets, &config)?.lse.to_f64()?;
    let found = on_ranks(2, |rank| -> Result<Vec<f64>> {
        let (shard, classes) = shard_of(rank.rank, 2, 4);
        let local = logits.narrow(1, shard.offset, classes)?;
        cross_entropy_shard(&local, &targets, &config, (shard, &rank))?.lse.to_f64()
    });
    for found in found {
        for (i, (got, want)) in found?.into_iter().zip(&want).enumerate() {
            let same = got == *want || got.is_nan() && want.is_nan();
            assert!(same || (got - want).abs() < 8.0 * f64::EPSILON, "row {i}: {got}, want {want}");
        }
    }
    Ok(())
}

#[test]
fn every_shard_finds_the_same_error() -> Result<()> {
    let device = Device::cpu(1)?;
    let x = Tensor::zeros(&device, DType::F32, &[2, 3])?;
    let weight = Tensor::zeros(&device, DType::F32, &[13, 3])?;
    let config = CrossEntropyConfig::default();
    let targets = Tensor::from_slice(&device, &[12_i64, 13], &[2])?;
    let run = |targets: &Tensor, shift: usize| {
        on_ranks(4, |rank| {
            let (shard, classes) = shard_of(rank.rank, 4, 13);
            let weight = weight.narrow(0, shard.offset, classes)?;
            let shard = VocabShard { offset: shard.offset + shift, ..shard };
            linear_cross_entropy_shard(&x, &weight, targets, &config, 64, ALL, (shard, &rank))
        })
    };
    for found in run(&targets, 0) {
        assert_eq!(
            found.unwrap_err().to_string(),
            "linear_cross_entropy: target 13 at position 1 is not below 13"
        );
    }
    let targets = Tensor::from_slice(&device, &[12_i64, 0], &[2])?;
    assert_eq!(
        run(&targets, 1)[3].as_ref().unwrap_err().to_string(),
        "linear_cross_entropy: 3 classes from 11 on are no shard of 13 classes in 4 shards of at most 4"
    );
    struct Scalar;
    impl VocabAllReduce for Scalar {
        fn max(&self, per_token: Tensor) -> Result<Tensor> {
            per_token.narrow(0, 0, 1)
        }
        fn sum(&self, per_token: Tensor) -> Result<Tensor> {
            Ok(per_token)
        }
    }
    let shard = VocabShard { offset: 0, global: 13, shards: 1 };
    let shard = (shard, &Scalar as &dyn VocabAllReduce);
    let found = linear_cross_entropy_shard(&x, &weight, &targets, &config, 104, ALL, shard);
    assert_eq!(found.unwrap_err().to_string(), "join_shards: joining [2] gave [1]");
    Ok(())
}
