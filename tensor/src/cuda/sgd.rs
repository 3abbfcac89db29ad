//! Launches SGD with momentum.

use super::kernel;
use super::step::{Types, check_accumulators, types};
use crate::ops::optim::config::{Nesterov, Sgd};
use crate::{Result, Tensor};

/// One pass over all weights; an empty `buffer` means no momentum.
pub(crate) fn sgd(
    config: &Sgd,
    step: &Tensor,
    weights: &mut Tensor,
    grads: &Tensor,
    buffer: &mut Tensor,
) -> Result<()> {
    let (element, found) = types("sgd", weights, grads, None)?;
    check_accumulators("sgd", element, &[buffer])?;
    let name = match found {
        Types::Same => "sgd",
        Types::Wide => "sgd_wide",
        Types::Master | Types::MasterWide => "sgd_master",
    };
    let (device, n) = (weights.device().clone(), weights.numel());
    let launch = kernel(&device, "sgd", element, name)?.input(step).updated(weights).input(grads);
    let launch = match buffer.numel() {
        0 => launch.optional(None),
        _ => launch.updated(buffer),
    };
    launch
        .value(n as u64)
        .value(config.momentum)
        .value(config.weight_decay)
        .value(u64::from(config.nesterov == Nesterov::On))
        .run_elements(n)
}
