//! What is kept for backward in fewer bytes, and in host memory: hooks that a model sets around its layers.
//!
//! Between the forward and the backward use of an activation lies most of a step. Jain et al., "Gist: Efficient Data
//! Encoding for Deep Neural Network Training", ISCA 2018, encode it for that time: exactly, where many elements are
//! zero (section 4.1 there), or in fewer bits, after forward has used all of them (section 4.2).

mod offloader;
mod stored;

pub use offloader::Offloader;

use ferrotron_tensor::{Category, DType, MemoryKind, Result, Tensor};
use std::sync::{Arc, Weak};

use crate::{KeptTensor, saved_tensors_hooks};
use offloader::Move;
use stored::Stored;

/// In which form activations are kept for backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PackingConfig {
    /// f32 activations are rounded to this type of 16 bits, and widened again in backward. Statistics, such as those
    /// of norms and of attention, stay as they are.
    pub dtype: Option<DType>,
    /// What becomes of zeros in the result of a ReLU.
    pub zeros: Zeros,
}

/// What becomes of the zeros in an activation of which many elements are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Zeros {
    /// They are kept like other numbers.
    #[default]
    Kept,
    /// One bit for each element says whether it is zero, and only the others are kept. This is exact; activations
    /// with too few zeros stay as they are.
    Bitmap,
}

/// Packs what is kept for backward.
#[derive(Debug, Clone)]
pub struct Packing {
    config: PackingConfig,
    /// Moves it to host memory.
    offloader: Option<Arc<Offloader>>,
}

/// What [`Packing::run`] has moved to host memory.
pub struct Offloaded {
    offloader: Arc<Offloader>,
    stored: Vec<Weak<Stored>>,
}

impl Offloaded {
    /// Begins to bring it back near: it will be needed soon.
    pub fn prefetch(self) -> Result<()> {
        self.offloader.fetch(self.stored)
    }
}

impl Packing {
    /// Packs as `config` says; with an `offloader`, into host memory.
    pub fn new(config: PackingConfig, offloader: Option<Arc<Offloader>>) -> Packing {
        Packing { config, offloader }
    }

    /// Runs `f` and packs what its operations keep for backward. What goes to host memory is copied after this has
    /// returned; the device's is free from the next call's end, or [`Offloader::wait`], on.
    ///
    /// ```
    /// use ferrotron_autograd::{Leaf, Offloader, Packing, PackingConfig};
    /// use ferrotron_tensor::{Category, DType, Device, MemoryKind, Tensor};
    /// use std::sync::Arc;
    /// let device = Device::cpu(1)?;
    /// let x = Leaf::new("x", Tensor::full(&device, DType::F32, &[8], 3.0)?);
    /// let y = x.var()?.mul_scalar(2.0)?;
    /// let offloader = Arc::new(Offloader::start(&device)?);
    /// let packing = Packing::new(PackingConfig::default(), Some(offloader.clone()));
    /// let (z, _) = packing.run(move || y.square()?.sum_all())?; // keeps y
    /// offloader.wait()?;
    /// assert_eq!(z.saved_bytes(), 0);
    /// assert_eq!(device.memory_of(MemoryKind::Host).of(Category::Saved), 8 * 4);
    /// z.backward()?;
    /// assert_eq!(x.gradient()?.unwrap().to_f64()?, [24.0; 8]); // 2 (2 x) 2
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    ///
    /// Errors as `f` does, if memory cannot be had, or if the disk behind host memory is full.
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

    fn pack(&self, kept: Vec<KeptTensor>) -> Result<Option<Offloaded>> {
        let mut moves = Vec::new();
        for kept in &kept {
            let Some(tensor) = kept.tensor()? else { continue };
            let stored = Stored::encode(&self.config, tensor, kept.role())?;
            kept.replace(stored.clone());
            if self.offloader.is_some() {
                let like = stored.tensor();
                // From here, so that a full disk is an error of this step.
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
