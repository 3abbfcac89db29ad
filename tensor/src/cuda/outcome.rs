//! What becomes of a training step, decided where its numbers are.

use ferrotron_cuda::arguments;

use super::kernel;
use crate::ops::outcome::{OutcomeConfig, Overflow, StepSums};
use crate::{DType, Result, Tensor};

/// Sets what depends on the sums in `step`, and puts the outcome into one of the rows of `outcomes`.
pub(crate) fn outcome(
    step: &mut Tensor,
    (outcomes, rows): (&mut Tensor, usize),
    config: &OutcomeConfig,
    sums: &StepSums,
) -> Result<()> {
    let OutcomeConfig { tokens, loss_scale, max_norm, overflow } = *config;
    let skips = u64::from(overflow == Overflow::Skips);
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
