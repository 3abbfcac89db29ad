//! Multiplication by a factor in the device's memory: y = factor x, computed in [`Element::Acc`](crate::Element::Acc) and rounded once.

use super::pointwise::{into_unique, scale_chunk};
use crate::core::tensor::check_device;
use crate::cuda;
use crate::kernel_span::kernel_span;
use crate::{Error, Result, Tensor, dispatch_float};

/// x times `factor`, of one element in the accumulator dtype of x. It overwrites x if that has no other holder.
///
/// ```
/// use ferrotron_tensor::{DType, Device, Tensor, ops::scale::scale};
/// let device = Device::cpu(1)?;
/// let x = Tensor::from_slice(&device, &[1.0_f32, -2.0], &[2])?.cast(DType::BF16)?;
/// let y = scale(x, &Tensor::full(&device, DType::F32, &[], 0.5)?)?;
/// assert_eq!(y.to_f64()?, [0.5, -1.0]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn scale(x: Tensor, factor: &Tensor) -> Result<Tensor> {
    check_device("scale", &x, factor)?;
    let acc = x.dtype().accumulator();
    if factor.numel() != 1 || factor.dtype() != acc {
        let message = format!("needs a factor of one element in {acc}, got {factor:?}");
        return Err(Error::shape("scale", message));
    }
    let mut y = into_unique(x)?;
    let device = y.device().clone();
    if device.gpu().is_some() {
        cuda::pointwise::scale(&mut y, factor)?;
        return Ok(y);
    }
    let _span = kernel_span!("scale", y.dtype(), 0, [&y] => [&y]);
    let factor = factor.item()?;
    dispatch_float!("scale", y.dtype(), T => {
        device.for_each_rows(y.as_mut_slice::<T>()?, 1, |_, y| scale_chunk::<T>(y, factor));
    });
    Ok(y)
}
