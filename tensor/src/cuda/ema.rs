//! Launches the moving average of weights.

use super::kernel;
use crate::{Result, Tensor};

/// One pass over all weights.
pub(crate) fn ema(decay: f64, step: &Tensor, average: &mut Tensor, weights: &Tensor) -> Result<()> {
    let (device, n) = (weights.device().clone(), weights.numel());
    kernel(&device, "ema", weights.dtype(), "ema")?
        .input(step)
        .updated(average)
        .input(weights)
        .value(n as u64)
        .value(decay)
        .run_elements(n)
}
