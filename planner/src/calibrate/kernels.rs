//! Times matrix products, and the kernels of small models' steps.

use ferrotron_models::bench::{BenchConfig, bench};
use ferrotron_models::gpt::GptConfig;
use ferrotron_models::profile::{OperationProfile, Profile};
use ferrotron_tensor::ops::matmul::matmul;
use ferrotron_tensor::{DType, Device, Error, Result, Tensor};
use std::collections::BTreeMap;
use std::time::Instant;

use crate::curve::Curve;

/// Rows, inner dim and columns of the products that are timed.
const SHAPES: [[usize; 3]; 7] = [
    [1024, 256, 256],
    [1024, 256, 1024],
    [1024, 1024, 256],
    [256, 64, 256],
    [256, 1024, 256],
    [512, 512, 512],
    [1024, 512, 2048],
];
/// Rounds of each measurement, of which the best counts.
const ROUNDS: usize = 5;
/// Seconds of a round at least.
const SECONDS: f64 = 0.02;
/// Samples of a step and their tokens, of the profiled steps.
const STEPS: [[usize; 2]; 3] = [[1, 128], [4, 256], [16, 256]];
/// Bytes of a call from which on its bandwidth is that of larger calls.
const LEAST_BYTES: f64 = 65_536.0;
/// The same for operations.
const LEAST_OPERATIONS: f64 = 1e5;

/// A small model whose step has all kernels of training, and `samples` of so many `tokens`.
pub(super) fn model(dtype: DType, [samples, tokens]: [usize; 2]) -> BenchConfig {
    let model = GptConfig::gpt2(4096, 4, 256, 4, tokens);
    BenchConfig { steps: 3, micro_batch_size: samples, dtype, ..BenchConfig::new(model) }
}

/// Profiles of steps of several sizes.
pub(super) fn profiles(device: &Device, dtype: DType) -> Result<Vec<Profile>> {
    let profiled = |size| -> Result<Profile> {
        let report = bench(&BenchConfig { profile: true, ..model(dtype, size) }, device)?;
        report.profile.ok_or_else(|| Error::value("calibrate", "there is no profile"))
    };
    STEPS.into_iter().map(profiled).collect()
}

/// Seconds between two kernels of a step.
pub(super) fn launch(profiles: &[Profile]) -> f64 {
    let other: f64 = profiles.iter().map(|profile| profile.other_ms.max(0.0)).sum();
    let operations = profiles.iter().flat_map(|profile| &profile.operations);
    1e-3 * other / operations.map(|operation| operation.calls).sum::<f64>().max(1.0)
}

/// The best of some rounds of `f`, in seconds of a call.
fn seconds(mut f: impl FnMut() -> Result<()>) -> Result<f64> {
    f()?;
    let mut times = 1;
    let mut best = f64::INFINITY;
    let mut round = 0;
    while round < ROUNDS {
        let started = Instant::now();
        (0..times).try_for_each(|_| f())?;
        let taken = started.elapsed().as_secs_f64();
        if taken < SECONDS && times < 1 << 20 {
            times *= 2;
            continue;
        }
        best = best.min(taken / f64::from(times));
        round += 1;
    }
    Ok(best)
}

/// Operations, bytes and seconds of the products.
pub(super) fn products(device: &Device, dtype: DType) -> Result<Vec<[f64; 3]>> {
    let time = |[rows, inner, columns]: [usize; 3]| -> Result<[f64; 3]> {
        let a = Tensor::full(device, dtype, &[rows, inner], 0.5)?;
        let b = Tensor::full(device, dtype, &[inner, columns], 0.5)?;
        let seconds = seconds(|| matmul(&a, &b).map(drop))?;
        let elements = rows * inner + inner * columns + rows * columns;
        let operations = 2.0 * (rows * inner * columns) as f64;
        Ok([operations, (elements * dtype.size()) as f64, seconds])
    };
    SHAPES.into_iter().map(time).collect()
}

/// The seconds of an operation and of a byte that give the least sum of squared relative errors, none negative.
pub(super) fn fit(measured: &[[f64; 3]]) -> [f64; 2] {
    let sum = |of: &dyn Fn([f64; 2]) -> f64| -> f64 {
        measured.iter().map(|[x, y, seconds]| of([x / seconds, y / seconds])).sum()
    };
    let (xx, xy, yy) = (sum(&|[x, _]| x * x), sum(&|[x, y]| x * y), sum(&|[_, y]| y * y));
    let (x, y) = (sum(&|[x, _]| x), sum(&|[_, y]| y));
    let determinant = xx * yy - xy * xy;
    let found = [(x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant];
    match found {
        [a, b] if a > 0.0 && b >= 0.0 => found,
        _ => [x / xx, 0.0],
    }
}

/// Bytes a second of the kernels without products by the bytes of a call, over all passes. Those of small calls say
/// nothing of larger ones.
pub(super) fn kernels(profiles: &[Profile]) -> BTreeMap<String, Curve> {
    curves(profiles, LEAST_BYTES, |operation| {
        operation.gb_per_s.filter(|_| operation.gflops.is_none())
    })
}

/// Operations a second of the kernels with products by the operations of a call, over all passes.
pub(super) fn rates(profiles: &[Profile]) -> BTreeMap<String, Curve> {
    curves(profiles, LEAST_OPERATIONS, |operation| operation.gflops)
}

/// Rates in 1/s by the work of a call, from those in 10^9/s that operations have. Calls of less than `least` count for nothing.
fn curves(
    profiles: &[Profile],
    least: f64,
    rate: impl Fn(&OperationProfile) -> Option<f64>,
) -> BTreeMap<String, Curve> {
    let mut points: BTreeMap<String, Vec<[f64; 2]>> = BTreeMap::new();
    for profile in profiles {
        let mut sums: BTreeMap<&str, [f64; 3]> = BTreeMap::new();
        for operation in &profile.operations {
            let Some(rate) = rate(operation) else { continue };
            let sum = sums.entry(&operation.operation).or_default();
            sum[0] += 1e6 * rate * operation.ms;
            sum[1] += 1e-3 * operation.ms;
            sum[2] += operation.calls;
        }
        let is_key =
            |name: &str| name.chars().all(|letter| letter.is_alphanumeric() || letter == '_');
        let sums = sums.into_iter().filter(|(name, sum)| is_key(name) && sum[1] > 0.0);
        for (name, [work, seconds, calls]) in sums {
            let each = (work / calls).round();
            if each >= least {
                points.entry(name.to_string()).or_default().push([each, work / seconds]);
            }
        }
    }
    points.into_iter().map(|(name, points)| (name, Curve::new(points))).collect()
}

/// Operations a second of attention, forward and backward.
pub(super) fn attention(profiles: &[Profile]) -> f64 {
    let operations = profiles.iter().flat_map(|profile| &profile.operations);
    let found = operations.filter(|operation| operation.operation.starts_with("attention"));
    let (work, ms) = found.fold((0.0, 0.0), |(work, ms), operation| {
        (work + operation.gflops.unwrap_or(0.0) * operation.ms, ms + operation.ms)
    });
    1e9 * work / ms.max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fit_finds_two_speeds_and_none_that_is_negative() {
        let measured = |a: f64, b: f64| {
            [[4e9, 1e6], [1e9, 5e6], [2e9, 1e7]].map(|[x, y]| [x, y, a * x + b * y])
        };
        let [a, b] = fit(&measured(1e-11, 2e-9));
        assert!((a / 1e-11 - 1.0).abs() < 1e-9 && (b / 2e-9 - 1.0).abs() < 1e-9, "{a} {b}");
        let [a, b] = fit(&measured(1e-11, -1e-10));
        assert!(a > 0.0 && b == 0.0, "{a} {b}");
    }
}
