//! Scalars at fixed device addresses, readable by captured graphs: the training step for random numbers, and the
//! positions of bad indices.
//!
//! A kernel cannot report an error to the host, so it records the first position with a bad index and continues. The
//! next download reads the position and returns an error. Since addresses are fixed, a captured step can be replayed
//! with another step number; during a capture the number is not written.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::arguments::{NO_BAD_INDEX, Step};
use crate::context::Context;
use crate::memory::{Arena, GRANULE};
use crate::stream::Stream;
use crate::{Error, Result};

/// Offset of the positions of bad indices, after the step.
const POSITIONS: u64 = 256;
/// Maximum number of operations with a position.
const MOST: usize = 64;

/// A bad index that a kernel has recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadIndex {
    /// The operation.
    pub op: &'static str,
    /// The row-major position of the first bad index.
    pub position: u64,
}

/// The scalars of a GPU. All accesses are enqueued in one stream.
#[derive(Debug)]
pub(crate) struct DeviceScalars {
    memory: Arena,
    step: Mutex<StepNumber>,
    /// Operations with a position, in order.
    ops: Mutex<Vec<&'static str>>,
}

/// The step number in device memory.
#[derive(Debug, Default)]
struct StepNumber {
    /// The value written last.
    current: Option<u64>,
    /// During a capture: the step number of the captured work, once a kernel has used it.
    recorded: Option<Option<u64>>,
}

impl DeviceScalars {
    pub(crate) fn new(context: &Arc<Context>, stream: &Stream) -> Result<DeviceScalars> {
        let mut memory = Arena::reserve(context, GRANULE)?;
        memory.map(0, GRANULE)?;
        let cells = DeviceScalars { memory, step: Mutex::default(), ops: Mutex::default() };
        cells.forget_positions(stream, MOST)?;
        Ok(cells)
    }

    /// Bytes of device memory.
    pub(crate) fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// Locks the step number at `number`; `set` writes it if it differs. Captured work must use a single step number,
    /// which each launch sets.
    pub(crate) fn step(
        &self,
        number: u64,
        set: impl FnOnce(u64, Step) -> Result<()>,
    ) -> Result<StepCell<'_>> {
        let mut step = self.step.lock().unwrap_or_else(PoisonError::into_inner);
        let address = self.memory.base();
        let StepNumber { current, recorded } = &mut *step;
        match recorded {
            Some(recorded) => {
                let first = *recorded.get_or_insert(number);
                if first != number {
                    let message = format!(
                        "draws random numbers of step {number} after some of step {first}: recorded work has one step"
                    );
                    return Err(Error::new("random", message));
                }
            }
            None if *current != Some(number) => {
                set(address, Step { number, ..bytemuck::Zeroable::zeroed() })?;
                *current = Some(number);
            }
            None => {}
        }
        Ok(StepCell { address, _step: step })
    }

    /// Starts a capture: no number is written until its [end](DeviceScalars::end_recording). Errors if a capture is in
    /// progress.
    pub(crate) fn begin_recording(&self) -> Result<()> {
        let mut step = self.step.lock().unwrap_or_else(PoisonError::into_inner);
        if step.recorded.is_some() {
            return Err(Error::new("cuda", "the GPU's work is recorded already"));
        }
        step.recorded = Some(None);
        Ok(())
    }

    pub(crate) fn end_recording(&self) {
        self.step.lock().unwrap_or_else(PoisonError::into_inner).recorded = None;
    }

    pub(crate) fn bad_index(&self, op: &'static str) -> Result<u64> {
        let mut ops = self.ops.lock().unwrap_or_else(PoisonError::into_inner);
        let known = ops.iter().position(|known| *known == op);
        let at = self.position(known.unwrap_or(ops.len()));
        if known.is_none() {
            if ops.len() == MOST {
                return Err(Error::new(op, format!("more than {MOST} operations take indices")));
            }
            ops.push(op);
        }
        Ok(at)
    }

    /// Copies bytes to the host, and returns any bad index recorded since the last call.
    ///
    /// # Safety
    /// As for [`Stream::download`].
    pub(crate) unsafe fn download(
        &self,
        stream: &Stream,
        to: &mut [u8],
        from: u64,
    ) -> Result<Option<BadIndex>> {
        let ops = self.ops.lock().unwrap_or_else(PoisonError::into_inner);
        let mut positions = vec![NO_BAD_INDEX; ops.len()];
        let found = (bytemuck::cast_slice_mut(&mut positions), self.position(0));
        // SAFETY: the caller's promise; the positions belong to `self`, and only work of the stream uses them.
        unsafe { stream.download_all(&mut [(to, from), found]) }?;
        let bad = ops.iter().zip(&positions).find(|(_, position)| **position != NO_BAD_INDEX);
        if bad.is_some() {
            self.forget_positions(stream, ops.len())?;
        }
        Ok(bad.map(|(&op, &position)| BadIndex { op, position }))
    }

    /// Resets the first `count` positions.
    fn forget_positions(&self, stream: &Stream, count: usize) -> Result<()> {
        let none = vec![NO_BAD_INDEX; count];
        // SAFETY: the memory belongs to `self`, and only work of the stream uses it.
        unsafe { stream.upload(self.position(0), bytemuck::cast_slice(&none)) }
    }

    /// The address of an operation's position.
    fn position(&self, index: usize) -> u64 {
        self.memory.base() + POSITIONS + (index * size_of::<u64>()) as u64
    }
}

/// A lock on the training step in device memory. The step does not change for kernels launched while the lock is
/// held.
#[derive(Debug)]
pub struct StepCell<'a> {
    address: u64,
    _step: MutexGuard<'a, StepNumber>,
}

impl StepCell<'_> {
    /// The device address of a [`Step`] with the locked number.
    pub fn address(&self) -> u64 {
        self.address
    }
}
