//! Cross-entropy of whole and sharded vocabularies, and its gradient.

use ferrotron_tensor::ops::cross_entropy::{
    CrossEntropyConfig, cross_entropy, cross_entropy_backward, cross_entropy_shard,
    cross_entropy_shard_backward, num_valid_tokens,
};
use ferrotron_tensor::{DType, Result, Tensor};

use crate::both::{assert_close, cpu, rounding, there, views};
use crate::reference::shards::{on_ranks, shard_of};
use crate::support::{FLOATS, gpu, random};

const SCALE: f64 = 0.3;

/// The loss's scale, in its dtype.
fn scale(like: &Tensor) -> Result<Tensor> {
    Tensor::full(like.device(), like.dtype().accumulator(), &[], SCALE)
}

/// Classes below `v`, some of them to be ignored.
fn targets(dtype: DType, n: usize, v: usize) -> Result<Tensor> {
    let list = (0..n as i64).map(|i| {
        if dtype == DType::I64 && i % 5 == 3 { -1 - i } else { i * i * 7 % v.min(200) as i64 }
    });
    let list: Vec<i64> = list.collect();
    match dtype {
        DType::I64 => Tensor::from_slice(&cpu()?, &list, &[n]),
        DType::U32 => {
            Tensor::from_slice(&cpu()?, &list.iter().map(|&i| i as u32).collect::<Vec<_>>(), &[n])
        }
        _ => Tensor::from_slice(&cpu()?, &list.iter().map(|&i| i as u8).collect::<Vec<_>>(), &[n]),
    }
}

/// Relative and absolute tolerances of lse and loss, and of the gradient. Sums of n exponentials are added in different
/// orders. Logits and losses are up to 16, and so is the argument of an exponential, off by its rounding.
fn tolerances(dtype: DType, width: usize) -> ([f64; 2], [f64; 2]) {
    let acc = dtype.accumulator().epsilon();
    let (eps, dx) = (acc * (width as f64 / 32.0 + 40.0), 32.0 * acc);
    // The smallest numbers of f16 are 2^-24 apart.
    let smallest = if dtype == DType::F16 { 2.0_f64.powi(-24) } else { 0.0 };
    ([eps, 4.0 * eps], [rounding(dtype) + dx, dx * SCALE + smallest])
}

#[test]
fn losses_and_gradients_are_those_of_the_cpu() -> Result<()> {
    let Some(gpu) = gpu("losses_and_gradients_are_those_of_the_cpu")? else { return Ok(()) };
    for dtype in FLOATS {
        for (n, v, index) in [
            (1, 1, DType::U8),
            (5, 7, DType::I64),
            (6, 33, DType::U32),
            (7, 1031, DType::I64),
            (0, 5, DType::I64),
        ] {
            let targets = targets(index, n, v)?;
            let classes = there(&gpu, &targets)?;
            let own = random(&cpu()?, dtype, &[n, v], 1)?.mul_scalar(2.0)?;
            let all = if n > 0 { views(&own)? } else { vec![own] };
            for label_smoothing in [0.0, 0.1] {
                let config = CrossEntropyConfig { ignore_index: 2, label_smoothing };
                assert_eq!(
                    num_valid_tokens(&classes, &config)?,
                    num_valid_tokens(&targets, &config)?
                );
                for logits in &all {
                    let what = format!("{n} of {v}, smoothing {label_smoothing}");
                    let (got, want) = (
                        cross_entropy(&there(&gpu, logits)?, &classes, &config)?,
                        cross_entropy(logits, &targets, &config)?,
                    );
                    let ([near, far], [dx_near, dx_far]) = tolerances(dtype, v);
                    assert_close(&format!("{what}, lse"), &got.lse, &want.lse, near, far)?;
                    let far = 4.0 * far * n as f64;
                    assert_close(&format!("{what}, loss"), &got.loss, &want.loss, near, far)?;
                    let lse = there(&gpu, &want.lse)?;
                    let x = there(&gpu, logits)?.copy()?;
                    let (held, id) = (x.clone(), x.buffer_id());
                    let scales = (scale(&x)?, scale(logits)?);
                    let got = cross_entropy_backward(held, &classes, &lse, &config, &scales.0)?;
                    let want = cross_entropy_backward(
                        logits.clone(),
                        &targets,
                        &want.lse,
                        &config,
                        &scales.1,
                    )?;
                    assert_close(&format!("{what}, gradient"), &got, &want, dx_near, dx_far)?;
                    // Unshared buffers are overwritten.
                    let over = cross_entropy_backward(x, &classes, &lse, &config, &scales.0)?;
                    assert_eq!(over.buffer_id(), id);
                    assert_close("in place", &over, &got, 0.0, 0.0)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn shards_of_a_vocabulary_join_what_they_find() -> Result<()> {
    let Some(gpu) = gpu("shards_of_a_vocabulary_join_what_they_find")? else { return Ok(()) };
    let n = 9;
    for dtype in FLOATS {
        // Some of the last are empty.
        for (v, ranks, label_smoothing) in [(37, 3, 0.0), (37, 2, 0.1), (2, 3, 0.1)] {
            let (targets, config) = (
                targets(DType::I64, n, v)?,
                CrossEntropyConfig { ignore_index: 1, label_smoothing },
            );
            let logits = random(&cpu()?, dtype, &[n, v], 1)?.mul_scalar(2.0)?;
            let want = cross_entropy(&logits, &targets, &config)?;
            let dx = cross_entropy_backward(
                logits.clone(),
                &targets,
                &want.lse,
                &config,
                &scale(&logits)?,
            )?;
            let found = on_ranks(ranks, |rank| -> Result<_> {
                let (shard, classes) = shard_of(rank.rank, ranks, v);
                let part = logits.narrow(1, shard.offset, classes)?.contiguous()?;
                let (x, t) = (there(&gpu, &part)?, there(&gpu, &targets)?);
                let found = cross_entropy_shard(&x, &t, &config, (shard, &rank))?;
                let scale = scale(&x)?;
                let dx = cross_entropy_shard_backward(x, &t, &found.lse, &config, &scale, shard)?;
                Ok((found, dx, shard.offset, classes))
            });
            let ([near, far], [dx_near, dx_far]) = tolerances(dtype, v);
            for found in found {
                let (found, part, offset, classes) = found?;
                let what = format!("{classes} classes from {offset} of {v}, {label_smoothing}");
                assert_close(&format!("{what}, lse"), &found.lse, &want.lse, near, far)?;
                let far = 4.0 * far * n as f64;
                assert_close(&format!("{what}, loss"), &found.loss, &want.loss, near, far)?;
                // From an lse of its own, whose error multiplies probabilities.
                let dx = dx.narrow(1, offset, classes)?.contiguous()?;
                let near = dx_near + far;
                assert_close(&format!("{what}, gradient"), &part, &dx, near, 2.0 * dx_far)?;
            }
        }
    }
    Ok(())
}

#[test]
fn a_bad_target_is_an_error_when_the_device_is_waited_for() -> Result<()> {
    let Some(gpu) = gpu("a_bad_target_is_an_error_when_the_device_is_waited_for")? else {
        return Ok(());
    };
    let logits = Tensor::zeros(&gpu, DType::F32, &[4, 3])?;
    let targets = Tensor::from_slice(&gpu, &[0_i64, 9, 3, 4], &[4])?;
    let config = CrossEntropyConfig { ignore_index: 9, label_smoothing: 0.0 };
    let error = cross_entropy(&logits, &targets, &config)?.loss.item().unwrap_err().to_string();
    assert!(error.starts_with("cross_entropy: the index at position 2"), "{error}");
    let floats = Tensor::zeros(&gpu, DType::F32, &[4])?;
    let error = cross_entropy(&logits, &floats, &config).unwrap_err().to_string();
    assert!(error.contains("takes integer indices, got f32"), "{error}");
    Ok(())
}
