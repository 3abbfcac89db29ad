//! Numbers in a GPU's memory, at addresses that stay: the training step, which kernels draw random numbers with, and
//! where kernels say that an index is out of range.
//!
//! A kernel can neither stop nor be waited for, so it puts down the first position whose index is bad, and goes on.
//! Whoever waits for the GPU next looks there and gets an error. As addresses stay, a recorded step can be launched again
//! with another number: while it is recorded, nothing is written.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::arguments::{NO_BAD_INDEX, Step};
use crate::context::Context;
use crate::memory::{Arena, GRANULE};
use crate::stream::Stream;
use crate::{Error, Result};

/// Where the positions of bad indices begin, behind the step.
const POSITIONS: u64 = 256;
/// Operations that may report one.
const MOST: usize = 64;

/// A bad index that a kernel has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadIndex {
    /// The operation.
    pub op: &'static str,
    /// The first bad index' position in row-major order.
    pub position: u64,
}

/// The numbers. All work on them is in one stream.
#[derive(Debug)]
pub(crate) struct Cells {
    memory: Arena,
    step: Mutex<StepNumber>,
    /// Operations that have a position.
    ops: Mutex<Vec<&'static str>>,
}

/// Which step the cell holds.
#[derive(Debug, Default)]
struct StepNumber {
    /// What was written last.
    current: Option<u64>,
    /// While work is recorded: the step that it draws for, once it has drawn.
    recorded: Option<Option<u64>>,
}

impl Cells {
    pub(crate) fn new(context: &Arc<Context>, stream: &Stream) -> Result<Cells> {
        let mut memory = Arena::reserve(context, GRANULE)?;
        memory.map(0, GRANULE)?;
        let cells = Cells { memory, step: Mutex::default(), ops: Mutex::default() };
        cells.forget_positions(stream, MOST)?;
        Ok(cells)
    }

    /// Bytes of the GPU's memory that they take.
    pub(crate) fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// The cell with `number`, which `set` writes to it if it holds another. Recorded work has one step, whatever it is
    /// when it runs.
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

    /// From now on, until the [end](Cells::end_recording), no number is written. Errors if that is so already.
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

    pub(crate) fn take_bad_index(&self, stream: &Stream) -> Result<Option<BadIndex>> {
        let ops = self.ops.lock().unwrap_or_else(PoisonError::into_inner);
        if ops.is_empty() {
            return Ok(None);
        }
        let mut positions = vec![NO_BAD_INDEX; ops.len()];
        // SAFETY: the memory is this one's own, and only work of the stream uses it.
        unsafe { stream.download(bytemuck::cast_slice_mut(&mut positions), self.position(0)) }?;
        let bad = ops.iter().zip(&positions).find(|(_, position)| **position != NO_BAD_INDEX);
        if bad.is_some() {
            self.forget_positions(stream, ops.len())?;
        }
        Ok(bad.map(|(&op, &position)| BadIndex { op, position }))
    }

    /// No bad index at the first `count` positions.
    fn forget_positions(&self, stream: &Stream, count: usize) -> Result<()> {
        let none = vec![NO_BAD_INDEX; count];
        // SAFETY: the memory is this one's own, and only work of the stream uses it.
        unsafe { stream.upload(self.position(0), bytemuck::cast_slice(&none)) }
    }

    /// The address of an operation's position.
    fn position(&self, index: usize) -> u64 {
        self.memory.base() + POSITIONS + (index * size_of::<u64>()) as u64
    }
}

/// The training step in a GPU's memory. It stays what it is for the kernels that are launched while this is held.
#[derive(Debug)]
pub struct StepCell<'a> {
    address: u64,
    _step: MutexGuard<'a, StepNumber>,
}

impl StepCell<'_> {
    /// Where a [`Step`] lies, of which the number is set.
    pub fn address(&self) -> u64 {
        self.address
    }
}
