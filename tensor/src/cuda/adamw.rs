//! Launches AdamW.

use super::kernel;
use super::step::{Types, check_accumulators, types};
use crate::ops::optim::config::AdamW;
use crate::{Result, Tensor};

/// Number of values that `adamw_coefficients` writes.
const COEFFICIENTS: usize = 9;

/// One pass over all weights; `copy` receives the rounded weights.
pub(crate) fn adamw(
    config: &AdamW,
    step: &Tensor,
    weights: &mut Tensor,
    grads: &Tensor,
    [m, v]: [&mut Tensor; 2],
    copy: Option<&mut Tensor>,
) -> Result<()> {
    let (element, found) = types("adamw", weights, grads, copy.as_deref())?;
    check_accumulators("adamw", element, &[m, v])?;
    let (device, n) = (weights.device().clone(), weights.numel());
    let mut coefficients = Tensor::empty(&device, element.accumulator(), &[COEFFICIENTS])?;
    kernel(&device, "adamw", element, "adamw_coefficients")?
        .output(&mut coefficients)
        .input(step)
        .value(config.beta1)
        .value(config.beta2)
        .value(config.eps)
        .value(config.weight_decay)
        .run([1, 1, 1], [32, 1, 1])?;
    let name = match found {
        Types::Same => "adamw",
        Types::Wide => "adamw_wide",
        Types::Master => "adamw_master",
        Types::MasterWide => "adamw_master_wide",
    };
    let launch = kernel(&device, "adamw", element, name)?
        .input(&coefficients)
        .input(step)
        .updated(weights)
        .input(grads)
        .updated(m)
        .updated(v);
    let launch = match (found, copy) {
        (Types::Same | Types::Wide, _) => launch,
        (_, Some(copy)) => launch.output(copy),
        (_, None) => launch.optional(None),
    };
    launch.value(n as u64).run_elements(n)
}
