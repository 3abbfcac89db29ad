//! Numbers in a GPU's memory, at addresses that stay: the training step, which kernels draw random numbers with, and
//! where kernels say that an index is out of range.
//!
//! A kernel can neither stop nor be waited for, so it puts down the first position whose index is bad, and goes on.
//! Whoever waits for the GPU next looks there and gets an error. As addresses stay, a recorded step can be replayed.

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
    step: Mutex<Option<u64>>,
    /// Operations that have a position.
    ops: Mutex<Vec<&'static str>>,
}

impl Cells {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Cells> {
        let mut memory = Arena::reserve(context, GRANULE)?;
        memory.map(0, GRANULE)?;
        Ok(Cells { memory, step: Mutex::default(), ops: Mutex::default() })
    }

    /// Bytes of the GPU's memory that they take.
    pub(crate) fn bytes(&self) -> usize {
        self.memory.len()
    }

    pub(crate) fn step(&self, stream: &Stream, number: u64) -> Result<StepCell<'_>> {
        let mut current = self.step.lock().unwrap_or_else(PoisonError::into_inner);
        let address = self.memory.base();
        if *current != Some(number) {
            let step = Step { number, ..bytemuck::Zeroable::zeroed() };
            // SAFETY: the memory is this one's own, and only kernels of the stream use it.
            unsafe { stream.upload(address, bytemuck::bytes_of(&step)) }?;
            *current = Some(number);
        }
        Ok(StepCell { address, _current: current })
    }

    pub(crate) fn bad_index(&self, stream: &Stream, op: &'static str) -> Result<u64> {
        let mut ops = self.ops.lock().unwrap_or_else(PoisonError::into_inner);
        let known = ops.iter().position(|known| *known == op);
        let at = self.position(known.unwrap_or(ops.len()));
        if known.is_none() {
            if ops.len() == MOST {
                return Err(Error::new(op, format!("more than {MOST} operations take indices")));
            }
            // SAFETY: as above.
            unsafe { stream.upload(at, &NO_BAD_INDEX.to_ne_bytes()) }?;
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
        // SAFETY: as above.
        unsafe { stream.download(bytemuck::cast_slice_mut(&mut positions), self.position(0)) }?;
        let bad = ops.iter().zip(&positions).find(|(_, position)| **position != NO_BAD_INDEX);
        if bad.is_some() {
            let none = vec![NO_BAD_INDEX; ops.len()];
            // SAFETY: as above.
            unsafe { stream.upload(self.position(0), bytemuck::cast_slice(&none)) }?;
        }
        Ok(bad.map(|(&op, &position)| BadIndex { op, position }))
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
    _current: MutexGuard<'a, Option<u64>>,
}

impl StepCell<'_> {
    /// Where a [`Step`] lies, of which the number is set.
    pub fn address(&self) -> u64 {
        self.address
    }
}
