//! The loss scale in device memory, and step parameters behind steps that the device may have skipped.

use ferrotron_cuda::arguments::{LossScale, NextStep, Step};

use super::kernel;
use crate::ops::optim::config::StepParams;
use crate::{DType, Device, Result, Tensor};

/// Allocates device memory with a loss scale and the learning rates behind it.
pub(crate) fn room(device: &Device, state: &LossScale, lrs: &[f64]) -> Result<Tensor> {
    let bytes = [bytemuck::bytes_of(state), bytemuck::cast_slice(lrs)].concat();
    Tensor::from_slice(device, &bytes, &[bytes.len()])
}

/// Writes the parameters of the next step: see [`DeviceLossScale`](crate::ops::loss_scale::DeviceLossScale::begin_step).
pub(crate) fn next_step(
    step: &mut Tensor,
    loss_scale: &mut Tensor,
    numbers: &StepParams,
    known: Option<LossScale>,
) -> Result<()> {
    let StepParams { update, lr, grad_scale } = *numbers;
    let rows = (loss_scale.numel() - size_of::<LossScale>()) / size_of::<f64>();
    let (is_known, rows) = (u64::from(known.is_some()), rows as u64);
    let step_if_applied = Step { number: update, update, lr, grad_scale, found_inf: 0 };
    let known = known.unwrap_or(bytemuck::Zeroable::zeroed());
    let device = step.device().clone();
    // The parameters would be kernel arguments, which a captured graph freezes.
    device.expect_no_capture("step")?;
    kernel(&device, "loss_scale", DType::F64, "next_step")?
        .output(step)
        .output(loss_scale)
        .value(NextStep { step: step_if_applied, known, is_known, rows })
        .run([1, 1, 1], [32, 1, 1])
}

/// `factor` times the loss scale.
pub(crate) fn gradient(state: &Tensor, factor: f64) -> Result<Tensor> {
    let device = state.device();
    let mut gradient = Tensor::empty(device, DType::F64, &[])?;
    kernel(device, "loss_scale", DType::F64, "loss_gradient")?
        .output(&mut gradient)
        .input(state)
        .value(factor)
        .run([1, 1, 1], [32, 1, 1])?;
    Ok(gradient)
}
