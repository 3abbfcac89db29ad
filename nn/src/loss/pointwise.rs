//! Losses of single elements.

use ferrotron_autograd::{InputGrads, Var};
use ferrotron_tensor::{Error, Result, Tensor};

use super::Reduction;

/// (x - y)^2 of each element: `torch.nn.functional.mse_loss`. Both get gradients.
///
/// ```
/// use ferrotron_autograd::Var;
/// use ferrotron_nn::loss::{Reduction, mean_squared_error};
/// use ferrotron_tensor::{Device, Tensor};
/// let device = Device::cpu(1)?;
/// let var = |values: [f64; 2]| Tensor::from_slice(&device, &values, &[2]).map(Var::constant);
/// let loss = mean_squared_error(&var([1.0, 2.0])?, &var([1.0, 4.0])?, Reduction::Mean)?;
/// assert_eq!(loss.value().item()?, 2.0);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// Errors unless both have the same dims.
pub fn mean_squared_error(x: &Var, y: &Var, reduction: Reduction) -> Result<Var> {
    check("mean_squared_error", x.dims(), y.dims())?;
    reduction.apply(x.sub(y)?.square()?)
}

/// -w y ln s - (1 - y) ln(1 - s) with s = sigmoid(x), for `targets` y in \[0, 1\] and w = `positive_weight`. It is
/// `torch.nn.functional.binary_cross_entropy_with_logits` with `pos_weight`. Large |x| do not overflow.
///
/// Computed as (1 - y) x + (1 + (w - 1) y) (ln(1 + e^-|x|) + max(-x, 0)); the gradient is
/// s (1 + (w - 1) y) - w y.
///
/// ```
/// use ferrotron_autograd::Var;
/// use ferrotron_nn::loss::{Reduction, binary_cross_entropy_with_logits};
/// use ferrotron_tensor::{Device, Tensor};
/// let device = Device::cpu(1)?;
/// let tensor = |values: [f64; 2]| Tensor::from_slice(&device, &values, &[2]);
/// let x = Var::constant(tensor([0.0, 1000.0])?);
/// let losses = binary_cross_entropy_with_logits(&x, &tensor([1.0, 0.0])?, 1.0, Reduction::None)?;
/// assert_eq!(losses.value().to_f64()?, [2.0_f64.ln(), 1000.0]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// Errors unless both have the same dims.
pub fn binary_cross_entropy_with_logits(
    x: &Var,
    targets: &Tensor,
    positive_weight: f64,
    reduction: Reduction,
) -> Result<Var> {
    check("binary_cross_entropy_with_logits", x.dims(), targets.dims())?;
    let y = targets.cast(x.dtype())?;
    // 1 + (w - 1) y
    let weights = y.mul_scalar(positive_weight - 1.0)?.add_scalar(1.0)?;
    let logits = x.value();
    let opposite = logits.neg()?;
    let softplus = logits.abs()?.neg()?.exp()?.log1p()?; // ln(1 + e^-|x|)
    let value = weights.mul(&softplus.add(&opposite.relu()?)?)?;
    let value = value.add(&y.mul(&opposite)?.add(logits)?)?;
    let saved = x.save();
    let losses = Var::record(&[x], value, || {
        move |dy: Tensor, dx: &mut InputGrads| {
            let slope = saved.value()?.sigmoid()?.mul(&weights)?;
            let slope = slope.sub(&y.mul_scalar(positive_weight)?)?;
            dx.accumulate(0, dy.mul(&slope)?)
        }
    })?;
    reduction.apply(losses)
}

/// q (ln q - x) for probabilities q = `targets` and log-probabilities x, 0 where q is 0: `torch.nn.functional.kl_div`.
/// Summed over a distribution it is the Kullback-Leibler divergence from exp(x) to q. [`Reduction::Mean`] divides by the
/// number of elements; for the mean over B samples (PyTorch's `batchmean`) divide the sum by B.
///
/// ```
/// use ferrotron_autograd::Var;
/// use ferrotron_nn::loss::{Reduction, kl_divergence};
/// use ferrotron_tensor::{Device, Tensor};
/// let device = Device::cpu(1)?;
/// let tensor = |values: [f64; 2]| Tensor::from_slice(&device, &values, &[1, 2]);
/// let logits = Var::constant(tensor([0.0, 0.0])?);
/// let loss = kl_divergence(&logits.log_softmax(-1)?, &tensor([1.0, 0.0])?, Reduction::Sum)?;
/// assert_eq!(loss.value().item()?, 2.0_f64.ln());
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// Errors unless both have the same dims.
pub fn kl_divergence(log_probs: &Var, targets: &Tensor, reduction: Reduction) -> Result<Var> {
    check("kl_divergence", log_probs.dims(), targets.dims())?;
    let q = targets.cast(log_probs.dtype())?;
    // The logarithm of the smallest normal f32 is finite in every dtype, and q = 0 cancels it.
    let least = Tensor::full(q.device(), q.dtype(), &[], f64::from(f32::MIN_POSITIVE))?;
    let entropy = Var::constant(q.maximum(&least)?.log()?.mul(&q)?);
    reduction.apply(entropy.sub(&log_probs.mul(&Var::constant(q))?)?)
}

fn check(op: &'static str, x: &[usize], y: &[usize]) -> Result<()> {
    if x == y {
        return Ok(());
    }
    Err(Error::shape(op, format!("predictions are {x:?}, targets {y:?}: they need the same dims")))
}
