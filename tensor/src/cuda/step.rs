//! Optimizer step parameters in device memory, and the choice of update kernels by dtype.

use ferrotron_cuda::arguments;

use super::kernel;
use crate::ops::optim::config::StepParams;
use crate::{DType, Device, Error, Result, Tensor};

/// Allocates device memory for the step parameters.
pub(crate) fn room(device: &Device) -> Result<Tensor> {
    Tensor::empty(device, DType::U8, &[size_of::<arguments::Step>()])
}

/// Writes the step parameters to device memory.
pub(crate) fn set(step: &mut Tensor, numbers: &StepParams) -> Result<()> {
    let StepParams { update, lr, grad_scale } = *numbers;
    let value = arguments::Step { number: update, update, lr, grad_scale, found_inf: 0 };
    let device = step.device().clone();
    // The parameters would be kernel arguments, which a captured graph freezes.
    device.expect_no_capture("step")?;
    kernel(&device, "step", DType::F64, "set_step")?
        .output(step)
        .value(value)
        .run([1, 1, 1], [32, 1, 1])
}

/// Reads the step parameters, which waits for the device; `None` if the step is skipped.
pub(crate) fn read(step: &Tensor) -> Result<Option<StepParams>> {
    step.device().expect_no_capture("step")?;
    let value: arguments::Step = bytemuck::pod_read_unaligned(&step.to_vec::<u8>()?);
    let arguments::Step { update, lr, grad_scale, found_inf, .. } = value;
    Ok((found_inf == 0).then_some(StepParams { update, lr, grad_scale }))
}

/// Writes the step parameters `from`, with the learning rate times `factor`, to `to`.
pub(crate) fn scale_lr(to: &mut Tensor, from: &Tensor, factor: f64) -> Result<()> {
    let device = to.device().clone();
    kernel(&device, "step", DType::F64, "scale_lr")?
        .output(to)
        .input(from)
        .value(factor)
        .run([1, 1, 1], [32, 1, 1])
}

/// Dtype combinations of weights and gradients, as encoded in the names of optimizer kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Types {
    /// Weights and gradients in the element type.
    Same,
    /// Gradients in the accumulator type.
    Wide,
    /// Weights in the accumulator type.
    Master,
    /// Both in the accumulator type, with copies in the element type.
    MasterWide,
}

/// The kernel variant that updates `weights` from `grads`, and the element type that it is compiled for.
///
/// Errors if there is no kernel for these types.
pub(crate) fn types(
    op: &'static str,
    weights: &Tensor,
    grads: &Tensor,
    copy: Option<&Tensor>,
) -> Result<(DType, Types)> {
    let (w, g) = (weights.dtype(), grads.dtype());
    let half = |dtype| matches!(dtype, DType::BF16 | DType::F16);
    let element =
        [Some(w), Some(g), copy.map(Tensor::dtype)].into_iter().flatten().find(|&t| half(t));
    let element = element.unwrap_or(w);
    let accumulator = element.accumulator();
    let found = match copy.map(Tensor::dtype) {
        None if (w, g) == (element, element) => Some(Types::Same),
        None if (w, g) == (element, accumulator) => Some(Types::Wide),
        _ if copy.is_some_and(|copy| copy.dtype() != element || !half(element)) => None,
        _ if (w, g) == (accumulator, element) => Some(Types::Master),
        Some(_) if (w, g) == (accumulator, accumulator) => Some(Types::MasterWide),
        _ => None,
    };
    let copies = copy.map_or(String::new(), |copy| format!(" with copies in {}", copy.dtype()));
    let message = || format!("{w} weights{copies} cannot be updated from {g} gradients");
    found.map(|found| (element, found)).ok_or_else(|| Error::dtype(op, message()))
}

/// Errors unless the non-empty tensors are of the accumulator type of `element`.
pub(crate) fn check_accumulators(op: &'static str, element: DType, x: &[&Tensor]) -> Result<()> {
    let accumulator = element.accumulator();
    match x.iter().find(|x| x.dtype() != accumulator && x.numel() > 0) {
        None => Ok(()),
        Some(x) => Err(Error::dtype(op, format!("needs {accumulator} for {element}, got {x:?}"))),
    }
}
