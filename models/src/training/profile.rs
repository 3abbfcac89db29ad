//! A profile of training steps: calls, time and work of each operation, beside the ceilings of the machine.
//!
//! The crates mark operations with spans of the `tracing` crate. [`profile`] subscribes to those of its thread, and
//! without a subscriber a span costs a comparison. A kernel's span states its work, and the spans around it say which
//! pass it belongs to:
//!
//! | pass | kernels |
//! |---|---|
//! | `forward`, `backward` | within an operation, or within its gradient |
//! | `update` | within the optimizer's update |
//! | `step` | other ones of a step, such as the norm of the gradients |
//!
//! The time of a span is its own, without the spans within. So the times of all rows, and the time outside of them, add
//! up to that of the step.
//!
//! A GPU does work later than it is given. There a row is a kernel or the product of some sizes, and its time is that from
//! its own beginning to that of the work behind it, which the GPU notes: gaps between kernels are within. Work in a step before
//! the first kernel is outside of operations. The bytes are those that the kernel must move.

mod launches;
mod recorder;
mod rows;

use ferrotron_parallel::trace::Watch;
use ferrotron_tensor::ceilings::Ceilings;
use ferrotron_tensor::{Device, Error, Result};
use serde::Serialize;
use std::sync::Arc;

use recorder::Recorder;
use rows::{Recording, Row};

/// The times of operations, as averages over some steps.
#[derive(Debug, Clone, Serialize)]
pub struct Profile {
    /// Number of steps.
    pub steps: usize,
    /// Seconds of a step, which are more than without a profile by a few microseconds per call. On a processor most of these stand
    /// outside of operations, on a GPU in the rows.
    pub s_per_step: f64,
    /// The largest rates that the machine reaches.
    pub ceilings: ProfileCeilings,
    /// The operations, the longest first.
    pub operations: Vec<OperationProfile>,
    /// Milliseconds of a step outside of all operations; on a processor what recording takes is among them.
    pub other_ms: f64,
}

/// [`Ceilings`] in the units of a profile.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ProfileCeilings {
    /// 10^9 floating-point operations per second, in f32.
    pub f32_gflops: f64,
    /// The same in f64.
    pub f64_gflops: f64,
    /// The same of products of bf16 matrices.
    pub bf16_gflops: f64,
    /// The same of products of f16 matrices.
    pub f16_gflops: f64,
    /// 10^9 bytes per second, read only.
    pub read_gb_per_s: f64,
    /// 10^9 bytes per second, read and written.
    pub update_gb_per_s: f64,
}

/// One kernel in one pass, or an operation without kernels; per step.
#[derive(Debug, Clone, Serialize)]
pub struct OperationProfile {
    /// The kernel or operation.
    pub operation: String,
    /// The part of the step: see the [module](self).
    pub pass: &'static str,
    /// Number of calls.
    pub calls: f64,
    /// Milliseconds of all calls.
    pub ms: f64,
    /// 10^9 floating-point operations per second, of products.
    pub gflops: Option<f64>,
    /// 10^9 bytes of operands and results per second.
    pub gb_per_s: Option<f64>,
    /// The least time for the same work, of products or from memory, divided by the measured time. Operands in caches may
    /// make it exceed 1.
    pub of_ceiling: Option<f64>,
}

/// Runs `steps`, which takes some steps of a trainer on this thread and `device`, and returns their profile.
///
/// `ceilings` measures the machine before and after the steps, as another program may slow either; the higher rates count.
///
/// Errors if `steps` or `ceilings` does, or there is no step.
pub fn profile(
    ceilings: impl Fn() -> Result<Ceilings>,
    device: &Device,
    steps: impl FnOnce() -> Result<()>,
) -> Result<Profile> {
    let recorder = Arc::new(Recorder::new(device));
    let before = ceilings()?;
    Watch::new(recorder.clone()).over(steps)?;
    let recording = recorder.take()?;
    if recording.steps == 0 {
        return Err(Error::value("profile", "there was no step of a trainer on this thread"));
    }
    Ok(Profile::new(&before.max(&ceilings()?), recording))
}

impl Profile {
    fn new(ceilings: &Ceilings, recording: Recording) -> Profile {
        let Recording { steps, total, outside, rows } = recording;
        let (count, giga) = (steps as f64, |x: f64| x / 1e9);
        let row = |((pass, operation), row): ((&'static str, String), Row)| {
            let seconds = row.time.as_secs_f64().max(1e-9);
            let some = |x: f64| (x > 0.0).then_some(x);
            OperationProfile {
                operation,
                pass,
                calls: row.calls.len() as f64 / count,
                ms: 1e3 * row.time.as_secs_f64() / count,
                gflops: some(giga(row.flops() / seconds)),
                gb_per_s: some(giga(row.bytes() / seconds)),
                of_ceiling: some(row.least_seconds(ceilings) / seconds),
            }
        };
        let mut operations: Vec<OperationProfile> = rows.into_iter().map(row).collect();
        operations.sort_by(|a, b| b.ms.total_cmp(&a.ms));
        Profile {
            steps,
            s_per_step: total.as_secs_f64() / count,
            ceilings: ProfileCeilings {
                f32_gflops: giga(ceilings.f32),
                f64_gflops: giga(ceilings.f64),
                bf16_gflops: giga(ceilings.bf16),
                f16_gflops: giga(ceilings.f16),
                read_gb_per_s: giga(ceilings.read),
                update_gb_per_s: giga(ceilings.update),
            },
            operations,
            other_ms: 1e3 * outside.as_secs_f64() / count,
        }
    }
}
