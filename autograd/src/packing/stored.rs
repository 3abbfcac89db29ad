//! A kept tensor in other bytes, or in other memory.

use ferrotron_tensor::ops::zero_bitmap;
use ferrotron_tensor::{Category, DType, Lent, MemoryKind, Result, Tensor, copy_aside};
use std::sync::{Arc, Mutex};
use tracing::trace_span;

use crate::{Packed, Role, lock};

use super::{PackingConfig, Zeros};

/// A tensor as it is stored, and what makes the original of it.
pub(super) struct Stored {
    place: Mutex<Place>,
    /// Type of the original.
    original: DType,
    /// Number of elements and their type, where the tensor is what [`zero_bitmap::compress`] made of them.
    bitmap: Option<(usize, DType)>,
}

/// Where a tensor is.
struct Place {
    tensor: Tensor,
    /// A copy of it by a GPU, to where it is going to be: the tensor, and the copy.
    moving: Option<Lent<(Tensor, Tensor)>>,
}

impl Place {
    /// It is where it was going, for whatever the GPU is given from now on.
    fn arrive(&mut self) -> Result<()> {
        if let Some(moving) = self.moving.take() {
            self.tensor = moving.take_back()?.1;
        }
        Ok(())
    }
}

impl Stored {
    /// What is stored of a vector; itself, if nothing is to be gained.
    pub fn encode(config: &PackingConfig, vector: Tensor, role: Role) -> Result<Arc<Stored>> {
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
        let place = Mutex::new(Place { tensor, moving: None });
        Ok(Arc::new(Stored { place, original, bitmap }))
    }

    /// The bytes, where they are now.
    pub fn tensor(&self) -> Tensor {
        lock(&self.place).tensor.clone()
    }

    /// The same bytes are there from now on.
    pub fn put(&self, tensor: Tensor) {
        let old = std::mem::replace(&mut lock(&self.place).tensor, tensor);
        drop(old); // without the lock
    }

    /// Takes up that a GPU copies the bytes to another place, where they are from [`Stored::arrive`] on.
    pub fn set_moving(&self, moving: Lent<(Tensor, Tensor)>) {
        lock(&self.place).moving = Some(moving);
    }

    /// Whatever the GPU is given from now on finds the bytes where they were going.
    pub fn arrive(&self) -> Result<()> {
        lock(&self.place).arrive()
    }

    /// Begins to bring near what a GPU has in host memory. What was kept last is needed first.
    pub fn fetch(all: &[Arc<Stored>]) -> Result<()> {
        let mut far = Vec::new();
        for stored in all.iter().rev() {
            let place = lock(&stored.place);
            if place.tensor.is_far() && place.moving.is_none() {
                let tensor = place.tensor.clone();
                let near = Tensor::empty(tensor.device(), tensor.dtype(), tensor.dims())?;
                near.set_category(Category::Saved);
                far.push((stored, (tensor, near)));
            }
        }
        let (stored, pairs): (Vec<_>, Vec<_>) = far.into_iter().unzip();
        let lent = copy_aside(pairs)?;
        stored.into_iter().zip(lent).for_each(|(stored, lent)| stored.set_moving(lent));
        Ok(())
    }
}

impl Packed for Arc<Stored> {
    fn unpack(&self) -> Result<Tensor> {
        if self.tensor().is_far() {
            let coming = lock(&self.place).moving.is_some();
            if !coming {
                // Nobody has seen it coming.
                let _span = trace_span!("fetch", name = "late").entered();
                Stored::fetch(std::slice::from_ref(self))?;
            }
            self.arrive()?;
        }
        let near = self.tensor();
        let dense = match self.bitmap {
            Some((numel, dtype)) => zero_bitmap::expand(&near, dtype, numel)?,
            None => near,
        };
        dense.cast(self.original)
    }

    fn held(&self) -> Option<Tensor> {
        Some(self.tensor()).filter(|tensor| tensor.memory_kind() == MemoryKind::Device)
    }
}
