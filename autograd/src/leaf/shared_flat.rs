//! A flat buffer shared by leaves, an optimizer and collectives, whose contents may still be on their way.

use ferrotron_tensor::{DType, Device, Error, FlatBuffer, Result};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::lock;

/// A flat buffer with several holders: the leaves whose values or gradients are its ranges, an optimizer, and a
/// collective while it works on it. Cloning gives another handle.
///
/// Its contents may be on their way, from other ranks, say. [`SharedFlatBuffer::lock`] waits for them, and so does each use
/// of a leaf: a caller cannot see the contents of before.
///
/// ```
/// use ferrotron_autograd::{Leaf, SharedFlatBuffer};
/// use ferrotron_tensor::{Category, DType, Device, FlatBuffer, Tensor};
/// let device = Device::cpu(1)?;
/// let parts = [("w".to_string(), vec![2])];
/// let flat = SharedFlatBuffer::new(FlatBuffer::new(&device, DType::F32, Category::Weights, &parts)?);
/// let w = Leaf::new("w", Tensor::full(&device, DType::F32, &[2], 1.0)?);
/// w.bind_value(&flat, 0)?;
///
/// let filled = flat.to_fill().clone();
/// let filling = std::thread::spawn(move || {
///     let sevens = Tensor::full(&device, DType::F32, &[2], 7.0)?;
///     filled.lock().expect("no panic").with_mut(0, |w| w.copy_from(&sevens))
/// });
/// flat.expect(move || filling.join().expect("no panic"))?;
/// assert_eq!(w.value()?.to_vec::<f32>()?, [7.0, 7.0]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Clone)]
pub struct SharedFlatBuffer {
    dtype: DType,
    device: Device,
    flat: Arc<Mutex<FlatBuffer>>,
    /// Apart from the buffer, which code that is to fill it holds: a buffer must not own what holds it.
    contents: Arc<Mutex<Contents>>,
}

/// Whereabouts of the contents.
enum Contents {
    Here,
    /// On their way; waits for them.
    Expected(Box<dyn FnOnce() -> Result<()> + Send>),
    /// They did not come.
    Lost(Error),
}

impl SharedFlatBuffer {
    /// The first handle of `flat`.
    pub fn new(flat: FlatBuffer) -> SharedFlatBuffer {
        SharedFlatBuffer {
            dtype: flat.dtype(),
            device: flat.device().clone(),
            flat: Arc::new(Mutex::new(flat)),
            contents: Arc::new(Mutex::new(Contents::Here)),
        }
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The device of the elements.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Locks the buffer as soon as its contents have come.
    ///
    /// Errors if they did not come, and so does every later call.
    pub fn lock(&self) -> Result<MutexGuard<'_, FlatBuffer>> {
        self.wait()?;
        Ok(lock(&self.flat))
    }

    /// Waits for the contents, as [`SharedFlatBuffer::lock`] does.
    pub fn wait(&self) -> Result<()> {
        // Locked meanwhile, so that others wait, too.
        let mut contents = lock(&self.contents);
        let come = match std::mem::replace(&mut *contents, Contents::Here) {
            Contents::Here => return Ok(()),
            Contents::Expected(wait) => wait(),
            Contents::Lost(error) => Err(error),
        };
        come.inspect_err(|error| *contents = Contents::Lost(error.clone()))
    }

    /// Notes that other code fills the buffer, after it has waited for what was expected before. The next use of the buffer
    /// calls `wait`, which returns when the contents are there.
    ///
    /// Errors if the contents that were expected before did not come.
    pub fn expect(&self, wait: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        self.wait()?;
        *lock(&self.contents) = Contents::Expected(Box::new(wait));
        Ok(())
    }

    /// The buffer for the code that fills it: whoever locks it sees it before its contents have come.
    pub fn to_fill(&self) -> &Arc<Mutex<FlatBuffer>> {
        &self.flat
    }

    /// Whether both are handles of one buffer.
    pub fn is(&self, other: &SharedFlatBuffer) -> bool {
        Arc::ptr_eq(&self.flat, &other.flat)
    }
}
