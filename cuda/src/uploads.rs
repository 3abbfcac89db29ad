//! Uploads of host bytes to a GPU, staged in pinned memory. A copy from pageable memory would block until the stream
//! reaches it.

use std::sync::{Arc, Mutex, PoisonError};

use crate::Result;
use crate::context::Context;
use crate::memory::PinnedMemory;
use crate::stream::{Event, Stream};

/// Larger uploads are copied by the driver with synchronization: whole weights, which no training step uploads.
const LARGEST: usize = 4 << 20;
/// Minimum size of a staging buffer: a page.
const SMALLEST: usize = 4096;
/// Maximum number of staging buffers in flight before the oldest is waited for: at most 1 GiB.
const MOST: usize = 256;

/// A staging buffer, and the completion of its last copy.
#[derive(Debug)]
struct PinnedPiece {
    memory: PinnedMemory,
    fetched: Event,
}

/// Staging buffers for uploads into one stream. There are as many of each size, a power of two, as were ever in
/// flight at once.
#[derive(Debug)]
pub(crate) struct PinnedUploadPool {
    context: Arc<Context>,
    /// Least recently used first.
    pieces: Mutex<Vec<PinnedPiece>>,
}

impl PinnedUploadPool {
    pub(crate) fn new(context: &Arc<Context>) -> PinnedUploadPool {
        PinnedUploadPool { context: context.clone(), pieces: Mutex::default() }
    }

    /// Enqueues a copy of bytes to device address `to`, after all earlier work of `stream`. The slice can be reused
    /// when this returns; it does not synchronize.
    ///
    /// # Safety
    /// As for [`Stream::upload`].
    pub(crate) unsafe fn give(&self, stream: &Stream, to: u64, from: &[u8]) -> Result<()> {
        if from.len() > LARGEST {
            // SAFETY: the caller's promise.
            return unsafe { stream.upload(to, from) };
        }
        let mut pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        let piece = self.free(&mut pieces, from.len())?;
        let bytes = piece.memory.base() as *mut u8;
        // SAFETY: the buffer is long enough, has the same address for the host, and its last copy is complete, so it
        // has no user. The caller guarantees the destination; the buffer is unchanged until the event completes or
        // the stream ends.
        unsafe {
            std::ptr::copy_nonoverlapping(from.as_ptr(), bytes, from.len());
            stream.copy(to, piece.memory.base(), from.len())?;
        }
        // Without an event, the GPU must be done before the buffer is dropped.
        piece.fetched.record(stream).inspect_err(|_| drop(stream.synchronize()))?;
        pieces.push(piece);
        Ok(())
    }

    /// A staging buffer of at least `len` bytes that is not in use.
    fn free(&self, pieces: &mut Vec<PinnedPiece>, len: usize) -> Result<PinnedPiece> {
        let wanted = len.next_power_of_two().max(SMALLEST);
        // If the first copy of this size is not complete, no later one is.
        if let Some(index) = pieces.iter().position(|piece| piece.memory.len() == wanted)
            && pieces[index].fetched.has_passed()?
        {
            return Ok(pieces.remove(index));
        }
        if pieces.len() == MOST {
            let oldest = pieces.remove(0);
            oldest.fetched.synchronize()?;
            if oldest.memory.len() == wanted {
                return Ok(oldest);
            }
        }
        let memory = PinnedMemory::new(&self.context, wanted)?;
        Ok(PinnedPiece { memory, fetched: Event::new(&self.context)? })
    }
}
