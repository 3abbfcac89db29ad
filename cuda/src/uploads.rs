//! Bytes of the host on their way to a GPU. They are copied into pinned memory first, from which the GPU fetches them when
//! it comes to it: of other memory the driver would copy no more than a little before the stream has come so far.

use std::sync::{Arc, Mutex, PoisonError};

use crate::Result;
use crate::context::Context;
use crate::memory::PinnedMemory;
use crate::stream::{Event, Stream};

/// More bytes than this are copied by the driver, and waited for: whole weights, which no step uploads.
const LARGEST: usize = 4 << 20;
/// The least that is pinned: a page.
const SMALLEST: usize = 4096;
/// Pieces under way before the oldest is waited for: no more than 1 GiB, which no counter has.
const MOST: usize = 256;

/// A piece of pinned memory, and when the GPU has fetched what was last in it.
#[derive(Debug)]
struct Piece {
    memory: PinnedMemory,
    fetched: Event,
}

/// Pinned memory for uploads into one stream: of each size, a power of two, as much as was ever under way at once.
#[derive(Debug)]
pub(crate) struct Uploads {
    context: Arc<Context>,
    /// The one that was used longest ago first.
    pieces: Mutex<Vec<Piece>>,
}

impl Uploads {
    pub(crate) fn new(context: &Arc<Context>) -> Uploads {
        Uploads { context: context.clone(), pieces: Mutex::default() }
    }

    /// Copies bytes to the GPU's address `to`, after everything that `stream` was given so far. The slice is free when
    /// this returns, which it does without waiting for the stream.
    ///
    /// # Safety
    /// As for [`Stream::upload`].
    pub(crate) unsafe fn give(&self, stream: &Stream, to: u64, from: &[u8]) -> Result<()> {
        if from.len() > LARGEST {
            // SAFETY: the caller's promise, passed on.
            return unsafe { stream.upload(to, from) };
        }
        let mut pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        let piece = self.free(&mut pieces, from.len())?;
        let bytes = piece.memory.base() as *mut u8;
        // SAFETY: the piece is as long, has the same address for the host, and was fetched from: nobody uses it. The
        // caller answers for the target; the memory stays as it is until the event has passed, or the stream has ended.
        unsafe {
            std::ptr::copy_nonoverlapping(from.as_ptr(), bytes, from.len());
            stream.copy(to, piece.memory.base(), from.len())?;
        }
        // Without a moment to wait for, the GPU must be done before the piece goes.
        piece.fetched.record(stream).inspect_err(|_| drop(stream.synchronize()))?;
        pieces.push(piece);
        Ok(())
    }

    /// A piece of at least `len` bytes that nobody uses.
    fn free(&self, pieces: &mut Vec<Piece>, len: usize) -> Result<Piece> {
        let wanted = len.next_power_of_two().max(SMALLEST);
        // If the GPU has not fetched from the first of this size, it has not from any.
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
        Ok(Piece { memory, fetched: Event::new(&self.context)? })
    }
}
