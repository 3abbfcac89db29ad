//! Decides on the device whether a step is applied, and the gradient scale.

use ferrotron_cuda::arguments;

use super::kernel;
use crate::ops::optim::config::{CheckStepConfig, OverflowPolicy, StepSums};
use crate::{DType, Result, Tensor};

/// Updates `step` from the sums, and writes the outcome to a row of `outcomes`.
pub(crate) fn check_step(
    step: &mut Tensor,
    (outcomes, rows): (&mut Tensor, usize),
    config: &CheckStepConfig,
    sums: &StepSums,
) -> Result<()> {
    let CheckStepConfig { tokens, loss_scale, max_norm, overflow } = *config;
    let skips = u64::from(overflow == OverflowPolicy::SkipStep);
    let rows = rows as u64;
    kernel(&step.device().clone(), "outcome", DType::F64, "outcome")?
        .output(step)
        .output(outcomes)
        .input(sums.loss)
        .input(sums.sq_norm)
        .optional(sums.others)
        .value(arguments::Outcome { tokens, loss_scale, max_norm, skips, rows })
        .run([1, 1, 1], [32, 1, 1])
}
