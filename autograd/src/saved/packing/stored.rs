//! A saved tensor in compressed form or in other memory.

use ferrotron_tensor::ops::zero_bitmap;
use ferrotron_tensor::{Category, DType, MemoryKind, Result, StreamGuard, Tensor, copy_async};
use std::sync::{Arc, Mutex};
use tracing::trace_span;

use crate::{Packed, SavedKind, lock};

use super::config::{ActivationCompressionConfig, ZeroEncoding};

/// A stored tensor, and the information to decode it.
pub(super) struct StoredActivation {
    place: Mutex<StoredLocation>,
    /// Dtype of the original.
    original: DType,
    /// Number of elements and their dtype, if the tensor is a result of [`zero_bitmap::compress`].
    bitmap: Option<(usize, DType)>,
}

/// The location of a tensor.
struct StoredLocation {
    tensor: Tensor,
    /// A GPU copy in progress: the tensor, and its copy in the other memory.
    moving: Option<StreamGuard<(Tensor, Tensor)>>,
}

impl StoredLocation {
    /// Makes work enqueued from now on use the copy.
    fn arrive(&mut self) -> Result<()> {
        if let Some(moving) = self.moving.take() {
            self.tensor = moving.into_inner()?.1;
        }
        Ok(())
    }
}

impl StoredActivation {
    /// Encodes a vector; stores the vector itself if encoding does not save memory.
    pub fn encode(
        config: &ActivationCompressionConfig,
        vector: Tensor,
        role: SavedKind,
    ) -> Result<Arc<StoredActivation>> {
        let original = vector.dtype();
        let narrow = match (config.dtype, role) {
            (Some(dtype), SavedKind::Activation | SavedKind::Sparse) if original == DType::F32 => {
                dtype
            }
            _ => original,
        };
        let mut tensor = vector.cast(narrow)?;
        let mut bitmap = None;
        // A fake device does not know the number of zeros and assumes the worst case.
        if config.zeros == ZeroEncoding::Bitmap
            && role == SavedKind::Sparse
            && !tensor.device().is_fake()
            && let Some(compressed) = zero_bitmap::compress(&tensor)?
        {
            bitmap = Some((tensor.numel(), narrow));
            tensor = compressed;
        }
        tensor.set_category(Category::Saved);
        let place = Mutex::new(StoredLocation { tensor, moving: None });
        Ok(Arc::new(StoredActivation { place, original, bitmap }))
    }

    /// The stored bytes, at their current location.
    pub fn tensor(&self) -> Tensor {
        lock(&self.place).tensor.clone()
    }

    /// Replaces the tensor by a copy of the same bytes.
    pub fn put(&self, tensor: Tensor) {
        let old = std::mem::replace(&mut lock(&self.place).tensor, tensor);
        drop(old); // without the lock
    }

    /// Registers a GPU copy of the bytes; [`StoredActivation::arrive`] switches to it.
    pub fn set_moving(&self, moving: StreamGuard<(Tensor, Tensor)>) {
        lock(&self.place).moving = Some(moving);
    }

    /// Makes work enqueued from now on use the copy.
    pub fn arrive(&self) -> Result<()> {
        lock(&self.place).arrive()
    }

    /// Starts prefetching offloaded tensors to GPU memory, last saved first, in the order of backward.
    pub fn fetch(all: &[Arc<StoredActivation>]) -> Result<()> {
        let mut far = Vec::new();
        for stored in all.iter().rev() {
            let place = lock(&stored.place);
            if place.tensor.is_offloaded() && place.moving.is_none() {
                let tensor = place.tensor.clone();
                let near = Tensor::empty(tensor.device(), tensor.dtype(), tensor.dims())?;
                near.set_category(Category::Saved);
                far.push((stored, (tensor, near)));
            }
        }
        let (stored, pairs): (Vec<_>, Vec<_>) = far.into_iter().unzip();
        let lent = copy_async(pairs)?;
        stored.into_iter().zip(lent).for_each(|(stored, lent)| stored.set_moving(lent));
        Ok(())
    }
}

impl Packed for Arc<StoredActivation> {
    fn unpack(&self) -> Result<Tensor> {
        if self.tensor().is_offloaded() {
            let coming = lock(&self.place).moving.is_some();
            if !coming {
                // The tensor was not prefetched.
                let _span = trace_span!("fetch", name = "late").entered();
                StoredActivation::fetch(std::slice::from_ref(self))?;
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

    fn resident_tensor(&self) -> Option<Tensor> {
        Some(self.tensor()).filter(|tensor| tensor.memory_kind() == MemoryKind::Device)
    }
}
