//! Decides on the device whether a step is applied, the gradient scale, and the next loss scale.

use ferrotron_cuda::arguments;

use super::kernel;
use crate::ops::optim::config::{CheckStepConfig, LossScaleRule, OverflowPolicy, StepSums};
use crate::{DType, Result, Tensor};

/// Updates `step` and the loss scale from the sums, and writes the outcome to a row of `outcomes`.
pub(crate) fn check_step(
    step: &mut Tensor,
    loss_scale: &mut Tensor,
    (outcomes, rows): (&mut Tensor, usize),
    config: &CheckStepConfig,
    sums: &StepSums,
) -> Result<()> {
    let CheckStepConfig { tokens, max_norm, overflow } = *config;
    let (skips, rule) = match overflow {
        OverflowPolicy::SkipStep(rule) => (1, rule),
        OverflowPolicy::Stop => (0, LossScaleRule { window: 0, hysteresis: 0, minimum: 0.0 }),
    };
    let LossScaleRule { window, hysteresis, minimum } = rule;
    let rows = rows as u64;
    kernel(&step.device().clone(), "outcome", DType::F64, "outcome")?
        .output(step)
        .output(loss_scale)
        .output(outcomes)
        .input(sums.loss)
        .input(sums.sq_norm)
        .optional(sums.others)
        .value(arguments::Outcome { tokens, max_norm, skips, window, hysteresis, minimum, rows })
        .run([1, 1, 1], [32, 1, 1])
}
