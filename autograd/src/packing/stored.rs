//! A kept tensor in other bytes, or in other memory.

use ferrotron_tensor::ops::zero_bitmap;
use ferrotron_tensor::{Category, DType, MemoryKind, Result, Tensor};

use crate::{Packed, Role};

use super::{PackingConfig, Zeros};

/// A tensor as it is stored, and what makes the original of it.
#[derive(Clone)]
pub(super) struct Stored {
    pub tensor: Tensor,
    /// Type of the original.
    original: DType,
    /// Number of elements and their type, where `tensor` is what [`zero_bitmap::compress`] made of them.
    bitmap: Option<(usize, DType)>,
}

impl Stored {
    /// What is stored of a vector; itself, if nothing is to be gained.
    pub fn encode(config: &PackingConfig, vector: Tensor, role: Role) -> Result<Stored> {
        let original = vector.dtype();
        let narrow = match (config.dtype, role) {
            (Some(dtype), Role::Activation | Role::Sparse) if original == DType::F32 => dtype,
            _ => original,
        };
        let mut tensor = vector.cast(narrow)?;
        let mut bitmap = None;
        // How many elements are zero, a dry device does not know: that they take what they take at most.
        if config.zeros == Zeros::Bitmap
            && role == Role::Sparse
            && !tensor.device().is_dry()
            && let Some(compressed) = zero_bitmap::compress(&tensor)?
        {
            bitmap = Some((tensor.numel(), narrow));
            tensor = compressed;
        }
        tensor.set_category(Category::Saved);
        Ok(Stored { tensor, original, bitmap })
    }

    /// The same with the bytes elsewhere.
    pub fn moved(self, tensor: Tensor) -> Stored {
        Stored { tensor, ..self }
    }
}

impl Packed for Stored {
    fn unpack(&self) -> Result<Tensor> {
        let near = self.tensor.near()?;
        let dense = match self.bitmap {
            Some((numel, dtype)) => zero_bitmap::expand(&near, dtype, numel)?,
            None => near,
        };
        dense.cast(self.original)
    }

    fn held(&self) -> Option<Tensor> {
        Some(self.tensor.clone()).filter(|tensor| tensor.memory_kind() == MemoryKind::Device)
    }

    fn prefetch(&self) {
        self.tensor.prefetch();
    }
}
