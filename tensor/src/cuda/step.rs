//! What changes from one step to the next, in device memory, and which kernel updates which weights.

use ferrotron_cuda::arguments;

use super::kernel;
use crate::ops::step::StepNumbers;
use crate::{DType, Device, Error, Result, Tensor};

/// Memory for the numbers of an optimizer step.
pub(crate) fn room(device: &Device) -> Result<Tensor> {
    Tensor::empty(device, DType::U8, &[size_of::<arguments::Step>()])
}

/// Puts the numbers where kernels read them.
pub(crate) fn set(step: &mut Tensor, numbers: &StepNumbers) -> Result<()> {
    let StepNumbers { update, lr, grad_scale } = *numbers;
    let value = arguments::Step { number: update, update, lr, grad_scale, found_inf: 0 };
    let device = step.device().clone();
    // They would be the arguments of a kernel, which captured work keeps.
    device.expect_no_capture("step")?;
    kernel(&device, "step", DType::F64, "set_step")?
        .output(step)
        .value(value)
        .run([1, 1, 1], [32, 1, 1])
}

/// The types of weights and of their gradients, as kernels of an optimizer tell them apart by their names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Types {
    /// Both of the element type.
    Same,
    /// Gradients in the type that is computed in.
    Wide,
    /// Weights in the type that is computed in.
    Master,
    /// Both in that, and copies of the element type.
    MasterWide,
}

/// Which kernel updates `weights` from `grads`, and the element type that it is compiled for.
///
/// Errors if the types do not fit.
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

/// Errors unless these are of the type in which numbers of `element` are computed.
pub(crate) fn check_accumulators(op: &'static str, element: DType, x: &[&Tensor]) -> Result<()> {
    let accumulator = element.accumulator();
    match x.iter().find(|x| x.dtype() != accumulator && x.numel() > 0) {
        None => Ok(()),
        Some(x) => Err(Error::dtype(op, format!("needs {accumulator} for {element}, got {x:?}"))),
    }
}
