//! Compresses saved activations and offloads them, using saved-tensor hooks.
//!
//! Most of a step's time lies between the forward and the backward use of an activation. Gist encodes it for that
//! time: losslessly if many elements are zero (section 4.1), or with reduced precision after the last forward use
//! (section 4.2). Source: Jain et al., "Gist: Efficient Data Encoding for Deep Neural Network Training", ISCA 2018.

mod config;
mod offloader;
mod stored;

pub use config::{ActivationCompressionConfig, ZeroEncoding};
pub use offloader::Offloader;

use ferrotron_tensor::{Category, MemoryKind, Result, Tensor};
use std::sync::{Arc, Weak};

use crate::{SavedTensorHandle, saved_tensors_hooks};
use offloader::Move;
use stored::StoredActivation;

/// Compresses and offloads saved activations.
#[derive(Debug, Clone)]
pub struct ActivationCompression {
    config: ActivationCompressionConfig,
    /// Offloads to host memory if present.
    offloader: Option<Arc<Offloader>>,
}

/// The activations that [`ActivationCompression::run`] offloaded.
pub struct Offloaded {
    offloader: Arc<Offloader>,
    stored: Vec<Weak<StoredActivation>>,
}

impl Offloaded {
    /// Starts prefetching them to device memory.
    pub fn prefetch(self) -> Result<()> {
        self.offloader.fetch(self.stored)
    }
}

impl ActivationCompression {
    /// Creates a packing with this format; with an `offloader`, activations also go to host memory.
    pub fn new(
        config: ActivationCompressionConfig,
        offloader: Option<Arc<Offloader>>,
    ) -> ActivationCompression {
        ActivationCompression { config, offloader }
    }

    /// Runs `f` and packs the tensors that its operations save for backward. Copies to host memory run after this
    /// returns. The device memory is freed at the end of the next call, or by [`Offloader::wait`].
    ///
    /// # Errors
    ///
    /// Errors as `f` does, if memory cannot be allocated, or if the disk behind host memory is full.
    ///
    /// ```
    /// use ferrotron_autograd::{Leaf, Offloader, ActivationCompression, ActivationCompressionConfig};
    /// use ferrotron_tensor::{Category, DType, Device, MemoryKind, Tensor};
    /// use std::sync::Arc;
    /// let device = Device::cpu(1)?;
    /// let x = Leaf::new("x", Tensor::full(&device, DType::F32, &[8], 3.0)?);
    /// let y = x.var()?.mul_scalar(2.0)?;
    /// let offloader = Arc::new(Offloader::start(&device)?);
    /// let packing = ActivationCompression::new(ActivationCompressionConfig::default(), Some(offloader.clone()));
    /// let (z, _) = packing.run(move || y.square()?.sum_all())?; // keeps y
    /// offloader.wait()?;
    /// assert_eq!(z.saved_bytes(), 0);
    /// assert_eq!(device.memory_of(MemoryKind::Host).bytes(Category::Saved), 8 * 4);
    /// z.backward()?;
    /// assert_eq!(x.gradient()?.unwrap().to_f64()?, [24.0; 8]); // 2 (2 x) 2
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn run<R>(&self, f: impl FnOnce() -> Result<R>) -> Result<(R, Option<Offloaded>)> {
        let mut offloaded = None;
        let result = saved_tensors_hooks(
            |kept| {
                offloaded = self.pack(kept)?;
                Ok(())
            },
            f,
        )?;
        Ok((result, offloaded))
    }

    fn pack(&self, kept: Vec<SavedTensorHandle>) -> Result<Option<Offloaded>> {
        // What backward was done with is freed before more is allocated.
        self.offloader.iter().for_each(|offloader| offloader.finish_fetches());
        let mut moves = Vec::new();
        for kept in &kept {
            let Some(tensor) = kept.tensor()? else { continue };
            let stored = StoredActivation::encode(&self.config, tensor, kept.kind())?;
            kept.replace(stored.clone());
            if self.offloader.is_some() {
                let like = stored.tensor();
                // Allocated before the copy starts, so that a full disk is an error of this step.
                let to =
                    Tensor::empty_in(MemoryKind::Host, like.device(), like.dtype(), like.dims())?;
                to.set_category(Category::Saved);
                moves.push(Move { stored, to });
            }
        }
        let Some(offloader) = self.offloader.clone() else { return Ok(None) };
        let stored = moves.iter().map(|one| Arc::downgrade(&one.stored)).collect();
        offloader.begin(moves)?;
        Ok(Some(Offloaded { offloader, stored }))
    }
}
