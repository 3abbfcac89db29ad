//! Dims, dtype and device of a tensor that need not exist.

use ferrotron_tensor::ops::reduce::sum_to_size;
use ferrotron_tensor::{DType, Device, Dims, Result, Tensor};

/// Dims, dtype and device of a leaf, or of the gradient of an operand or output.
#[derive(Clone)]
pub(crate) struct TensorSpec {
    pub(crate) dims: Dims,
    pub(crate) dtype: DType,
    pub(crate) device: Device,
}

impl TensorSpec {
    pub(crate) fn from_tensor(value: &Tensor) -> TensorSpec {
        TensorSpec {
            dims: value.dims().into(),
            dtype: value.dtype(),
            device: value.device().clone(),
        }
    }

    /// A tensor of this kind with unspecified contents.
    pub(crate) fn empty(&self) -> Result<Tensor> {
        Tensor::empty(&self.device, self.dtype, &self.dims)
    }

    /// Sums `gradient` over what was broadcast; one of these dims keeps its number of holders.
    pub(crate) fn sum(&self, gradient: Tensor) -> Result<Tensor> {
        if gradient.dims() == &self.dims[..] {
            return Ok(gradient);
        }
        sum_to_size(&gradient, &self.dims)
    }

    /// Casts `tensor` to the dtype, as [`cast`] does.
    pub(crate) fn cast(&self, tensor: Tensor) -> Result<Tensor> {
        cast(tensor, self.dtype)
    }
}

/// Casts `tensor` to `dtype`; a tensor that has it keeps its number of holders.
pub(crate) fn cast(tensor: Tensor, dtype: DType) -> Result<Tensor> {
    if tensor.dtype() == dtype { Ok(tensor) } else { tensor.cast(dtype) }
}
