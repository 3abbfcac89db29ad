//! Launches Lion.

use super::kernel;
use super::step::{Types, check_accumulators, types};
use crate::ops::optim::config::Lion;
use crate::{Result, Tensor};

/// One pass over all weights.
pub(crate) fn lion(
    config: &Lion,
    step: &Tensor,
    weights: &mut Tensor,
    grads: &Tensor,
    m: &mut Tensor,
) -> Result<()> {
    let (element, found) = types("lion", weights, grads, None)?;
    check_accumulators("lion", element, &[m])?;
    let name = match found {
        Types::Same => "lion",
        Types::Wide => "lion_wide",
        Types::Master | Types::MasterWide => "lion_master",
    };
    let (device, n) = (weights.device().clone(), weights.numel());
    let Lion { beta1, beta2, weight_decay } = *config;
    kernel(&device, "lion", element, name)?
        .input(step)
        .updated(weights)
        .input(grads)
        .updated(m)
        .value(n as u64)
        .value(beta1)
        .value(beta2)
        .value(weight_decay)
        .run_elements(n)
}
