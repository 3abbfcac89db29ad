//! Layer normalisation over the last dim (Ba, Kiros and Hinton, 2016).
//!
//! `y = (x - mean) rstd weight + bias` with `rstd = 1 / sqrt(variance + eps)` (the biased variance).
//! A gradient needs x, mean, rstd and weight. Everything is computed in Acc (f32; f64 for f64), and mean and rstd are
//! stored in it. Formulas and kernels: `norm.rs`, shared with RMSNorm.

use super::norm::{self, GradSelection, NormKind};
use crate::{Result, Tensor};

struct Layer;

impl NormKind for Layer {
    const OP: &'static str = "layer_norm";
    const OP_BACKWARD: &'static str = "layer_norm_backward";
    const CENTRED: bool = true;
}

/// Normalises the rows of x (..., C): returns y (..., C), and the mean and rstd (...) of each row in Acc.
///
/// Errors if weight or bias is not (C) of x's dtype or of Acc.
///
/// ```
/// use ferrotron_tensor::{DType, Device, Tensor, ops::layer_norm::layer_norm};
/// let device = Device::cpu(1)?;
/// let x = Tensor::from_slice(&device, &[1.0_f64, 3.0], &[1, 2])?;
/// let weight = Tensor::full(&device, DType::F64, &[2], 10.0)?;
/// let (y, mean, rstd) = layer_norm(&x, &weight, None, 0.0)?;
/// assert_eq!(y.to_vec::<f64>()?, [-10.0, 10.0]);
/// assert_eq!((mean.to_f64()?, rstd.to_f64()?), (vec![2.0], vec![1.0]));
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn layer_norm(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Tensor, Tensor)> {
    norm::forward::<Layer>(x, weight, bias, eps)
}

/// The gradients (dx, dweight, dbias) of [`layer_norm`]: dx like x, dweight and dbias (C) in Acc.
///
/// If x has another gradient, `before`, dx is rounded and then added to it: as in a sum, but in one pass.
pub fn layer_norm_backward(
    dy: &Tensor,
    x: &Tensor,
    mean: &Tensor,
    rstd: &Tensor,
    weight: &Tensor,
    before: Option<&Tensor>,
) -> Result<(Tensor, Tensor, Tensor)> {
    match norm::backward::<Layer>(dy, x, Some(mean), rstd, weight, before, GradSelection::All)? {
        (dx, Some((dweight, dbias))) => Ok((dx, dweight, dbias)),
        _ => unreachable!("all gradients were wanted"),
    }
}

/// Only dx of [`layer_norm_backward`], with the same bits.
pub fn layer_norm_backward_input(
    dy: &Tensor,
    x: &Tensor,
    mean: &Tensor,
    rstd: &Tensor,
    weight: &Tensor,
    before: Option<&Tensor>,
) -> Result<Tensor> {
    norm::backward::<Layer>(dy, x, Some(mean), rstd, weight, before, GradSelection::Input)
        .map(|(dx, _)| dx)
}
