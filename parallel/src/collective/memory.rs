//! The memory that a collective reads and writes: it owns it until it is waited for.

use ferrotron_tensor::ops::pointwise::into_unique;
use ferrotron_tensor::{Error, FlatBuffer, Result, Staging, Tensor, dispatch_any};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Duration;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

/// Pause between two attempts to lock a buffer that another thread has locked: timers are not finer.
const LOCK_PAUSE: Duration = Duration::from_millis(1);

/// A buffer that a collective has while it runs.
pub enum Buffer {
    /// A dense tensor that no other handle shares.
    Tensor(Tensor),
    /// All ranges of a flat, which is locked while the call runs. No other code may hold one of them meanwhile.
    Flat(Arc<Mutex<FlatBuffer>>),
}

impl Buffer {
    /// Takes a tensor; one that others hold too, or that is not dense, is copied first.
    pub fn from_tensor(tensor: Tensor) -> Result<Buffer> {
        into_unique(tensor).map(Buffer::Tensor)
    }

    /// The bytes, for as long as the result lives; a flat stays locked until then. If other code has locked it, waits
    /// without blocking the thread, on which that code may run. Must be awaited where a Tokio runtime with timers is
    /// entered.
    ///
    /// The bytes of a GPU are a copy, made after all work that was enqueued on it.
    ///
    /// Errors if another handle shares the tensor, or a range of the flat.
    pub async fn bytes(&mut self) -> Result<Bytes<'_>> {
        let (owner, staging) = match self {
            Buffer::Tensor(tensor) => {
                let staging = tensor.stage()?;
                (Owner::Tensor(tensor), staging)
            }
            Buffer::Flat(flat) => {
                let mut guard = loop {
                    match flat.try_lock() {
                        Ok(guard) => break guard,
                        Err(TryLockError::Poisoned(poisoned)) => break poisoned.into_inner(),
                        Err(TryLockError::WouldBlock) => sleep(LOCK_PAUSE).await,
                    }
                };
                let staging = guard.stage()?;
                (Owner::Flat(guard), staging)
            }
        };
        let mut bytes = Bytes { owner, staging: None };
        match staging {
            Some(staging) => bytes.staging = Some(arrived(staging).await?),
            None => bytes.as_mut_slice().map(drop)?, // are they ours alone?
        }
        Ok(bytes)
    }

    /// The tensor.
    pub fn into_tensor(self) -> Option<Tensor> {
        match self {
            Buffer::Tensor(tensor) => Some(tensor),
            Buffer::Flat(_) => None,
        }
    }
}

/// Waits for a copy. Others wait on this thread for what is not a GPU, so it must not sleep here.
async fn arrived(mut staging: Staging) -> Result<Staging> {
    let arrive = spawn_blocking(move || staging.wait().map(|()| staging));
    arrive.await.map_err(|error| Error::communication("staging", error.to_string()))?
}

/// The bytes of a [`Buffer`], borrowed. No other code can reach them meanwhile.
pub struct Bytes<'a> {
    owner: Owner<'a>,
    /// The copy of them that the host works on, if they are a GPU's.
    staging: Option<Staging>,
}

enum Owner<'a> {
    Tensor(&'a mut Tensor),
    /// Locked.
    Flat(MutexGuard<'a, FlatBuffer>),
}

impl Bytes<'_> {
    /// The bytes, for reading and writing.
    pub fn as_mut_slice(&mut self) -> Result<&mut [u8]> {
        match (&mut self.staging, &mut self.owner) {
            (Some(staging), _) => staging.bytes(),
            (None, Owner::Flat(flat)) => flat.host_bytes_mut(),
            (None, Owner::Tensor(tensor)) => dispatch_any!(tensor.dtype(), T => {
                Ok(bytemuck::cast_slice_mut(tensor.as_mut_slice::<T>()?))
            }),
        }
    }

    /// Hands what was written over to the owner: what a GPU is given from now on finds it.
    pub fn commit(&mut self) -> Result<()> {
        match (self.staging.take(), &mut self.owner) {
            (None, _) => Ok(()),
            (Some(staging), Owner::Tensor(tensor)) => tensor.take_back(staging),
            (Some(staging), Owner::Flat(flat)) => flat.take_back(staging),
        }
    }
}

/// The memory of a call. Its operation decides which of the two buffers exist:
///
/// | operation | input | output |
/// |---|---|---|
/// | all-reduce, reduce, broadcast, all-gather, reduce-scatter | - | the whole buffer, in place |
/// | gather | own part | the whole, on the root only |
/// | scatter | the whole, on the root only | own part |
/// | all-to-all | the whole | part i of everybody, in rank order |
/// | send | the whole | - |
/// | receive | - | the whole |
/// | exchange | the whole to send | the whole to receive |
/// | barrier | - | - |
#[derive(Default)]
pub struct Memory {
    /// Read.
    pub input: Option<Buffer>,
    /// Written, or read and written in place.
    pub output: Option<Buffer>,
}

impl Memory {
    /// One buffer that is changed in place.
    pub fn in_place(buffer: Buffer) -> Memory {
        Memory { input: None, output: Some(buffer) }
    }
}
