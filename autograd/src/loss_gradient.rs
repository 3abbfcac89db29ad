//! The gradient of a loss, with which backward starts: a number of the host, or one that only the device knows.

use ferrotron_tensor::{DType, Device, Result, Tensor};

/// The gradient of a loss.
///
/// ```
/// use ferrotron_autograd::{GradientEdge, Leaf, LossGradient};
/// use ferrotron_tensor::{DType, Device, Tensor};
/// let device = Device::cpu(1)?;
/// let x = Leaf::new("x", Tensor::from_slice(&device, &[3.0_f32, 4.0], &[2])?);
/// let loss = GradientEdge::from_var(&x.var()?.sum_all()?);
/// let half = Tensor::full(&device, DType::F64, &[], 0.5)?;
/// let gradients = [LossGradient::from(0.5), LossGradient::OnDevice(half)];
/// let cotangents = gradients.map(|gradient| loss.cotangent(&gradient)?.item());
/// assert_eq!(cotangents.map(Result::unwrap), [0.5, 0.5]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub enum LossGradient {
    /// A number of the host. A captured step keeps it.
    Number(f64),
    /// A number in memory of the device, an f64 tensor of one element, which the host need not know.
    OnDevice(Tensor),
}

impl From<f64> for LossGradient {
    fn from(number: f64) -> LossGradient {
        LossGradient::Number(number)
    }
}

impl LossGradient {
    /// The gradient as a tensor, of dims that have one element.
    pub(crate) fn tensor(&self, device: &Device, dtype: DType, dims: &[usize]) -> Result<Tensor> {
        match self {
            LossGradient::Number(number) => Tensor::full(device, dtype, dims, *number),
            LossGradient::OnDevice(number) => number.cast(dtype)?.reshape(dims),
        }
    }
}
