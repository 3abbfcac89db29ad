//! Root-mean-square normalisation over the last dim (Zhang and Sennrich, 2019).
//!
//! `y = x rstd weight` with `rstd = 1 / sqrt(mean(x^2) + eps)`. A gradient needs x, rstd and weight.
//! Everything is computed in Acc (f32; f64 for f64), and rstd is stored in it. Formulas and kernels: `norm.rs`,
//! shared with LayerNorm.

use super::norm::{self, GradSelection, NormKind};
use crate::{Result, Tensor};

struct RootMeanSquare;

impl NormKind for RootMeanSquare {
    const OP: &'static str = "rms_norm";
    const OP_BACKWARD: &'static str = "rms_norm_backward";
    const CENTRED: bool = false;
}

/// Normalises the rows of x (..., C): returns y (..., C) and the rstd (...) of each row in Acc.
///
/// Errors if weight is not (C) of x's dtype or of Acc.
///
/// ```
/// use ferrotron_tensor::{DType, Device, Tensor, ops::rms_norm::rms_norm};
/// let device = Device::cpu(1)?;
/// let x = Tensor::from_slice(&device, &[2.0_f64, -2.0], &[1, 2])?;
/// let weight = Tensor::full(&device, DType::F64, &[2], 10.0)?;
/// let (y, rstd) = rms_norm(&x, &weight, 0.0)?;
/// assert_eq!(y.to_vec::<f64>()?, [10.0, -10.0]);
/// assert_eq!(rstd.to_f64()?, [0.5]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    let (y, _, rstd) = norm::forward::<RootMeanSquare>(x, weight, None, eps)?;
    Ok((y, rstd))
}

/// The gradients (dx, dweight) of [`rms_norm`]: dx like x, dweight (C) in Acc.
///
/// If x has another gradient, `before`, dx is rounded and then added to it: as in a sum, but in one pass.
pub fn rms_norm_backward(
    dy: &Tensor,
    x: &Tensor,
    rstd: &Tensor,
    weight: &Tensor,
    before: Option<&Tensor>,
) -> Result<(Tensor, Tensor)> {
    match norm::backward::<RootMeanSquare>(dy, x, None, rstd, weight, before, GradSelection::All)? {
        (dx, Some((dweight, _))) => Ok((dx, dweight)),
        _ => unreachable!("all gradients were wanted"),
    }
}

/// Only dx of [`rms_norm_backward`], with the same bits.
pub fn rms_norm_backward_input(
    dy: &Tensor,
    x: &Tensor,
    rstd: &Tensor,
    weight: &Tensor,
    before: Option<&Tensor>,
) -> Result<Tensor> {
    let found =
        norm::backward::<RootMeanSquare>(dy, x, None, rstd, weight, before, GradSelection::Input)?;
    Ok(found.0)
}
