//! The pipe between two threads of a process: two queues of recycled slots, full ones one way and empty ones back.
//!
//! Large pieces are not copied into their slot: it holds their address, and the receiver reads them there.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread::yield_now;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use crate::collective::host::transport::piece::{ChannelResult, Fault, PieceBuffer, SLOTS};

/// Pieces of fewer bytes are copied, so that their sender need not wait until they are read.
const LEND_FROM: usize = 16 << 10;

/// A piece on its way, or an empty slot on its way back.
struct Slot {
    buffer: PieceBuffer,
    /// The bytes if they lie in the sender's memory.
    lent: Option<Lent>,
}

/// Bytes in the memory of the writer, which the [`Gate`] of the pipe lets its reader read.
#[derive(Clone, Copy)]
struct Lent(NonNull<[u8]>);

// SAFETY: an address may be known to any thread; `LocalReader::read` alone reads there, and says why it may.
unsafe impl Send for Lent {}
// SAFETY: as above.
unsafe impl Sync for Lent {}

/// Whether the reader may read what is lent: nobody takes memory back while it does.
struct Gate(AtomicU8);

impl Gate {
    const OPEN: u8 = 0;
    const READING: u8 = 1;
    const CLOSED: u8 = 2;

    /// Begins to read. Returns false if the writer has taken back what it lent.
    fn enter(&self) -> bool {
        let (open, reading) = (Gate::OPEN, Gate::READING);
        self.0.compare_exchange(open, reading, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Ends to read.
    fn leave(&self) {
        self.0.store(Gate::OPEN, Ordering::Release);
    }

    /// Lets nobody read from now on, as soon as the reader has ended to.
    fn close(&self) {
        let (open, closed) = (Gate::OPEN, Gate::CLOSED);
        while self.0.compare_exchange(open, closed, Ordering::Acquire, Ordering::Relaxed)
            == Err(Gate::READING)
        {
            yield_now();
        }
    }
}

/// The end that is written.
pub struct LocalWriter {
    full: Sender<Box<Slot>>,
    empty: Receiver<Box<Slot>>,
    gate: Arc<Gate>,
    /// Slots that came back while this end waited for what it lent.
    spare: Vec<Slot>,
    /// Number of all slots.
    made: usize,
    /// Number of slots of pieces that lie in this side's memory.
    lent: usize,
    current: Option<Box<Slot>>,
}

/// The end that is read.
pub struct LocalReader {
    full: Receiver<Box<Slot>>,
    empty: Sender<Box<Slot>>,
    gate: Arc<Gate>,
    current: Option<Box<Slot>>,
}

fn closed() -> Fault {
    Fault::PeerGone("has left the group".to_string())
}

/// Both ends of a new pipe.
pub fn pipe() -> (LocalWriter, LocalReader) {
    let (full_in, full_out) = channel(SLOTS);
    let (empty_in, empty_out) = channel(SLOTS);
    let gate = Arc::new(Gate(AtomicU8::new(Gate::OPEN)));
    let reader = LocalReader { full: full_out, empty: empty_in, gate: gate.clone(), current: None };
    let (full, empty) = (full_in, empty_out);
    let spare = Vec::new();
    (LocalWriter { full, empty, gate, spare, made: 0, lent: 0, current: None }, reader)
}

impl LocalWriter {
    /// An empty slot.
    async fn slot(&mut self) -> ChannelResult<Box<Slot>> {
        if let Some(slot) = self.spare.pop() {
            return Ok(Box::new(slot));
        }
        match self.empty.try_recv() {
            Ok(slot) => Ok(self.returned(slot)),
            Err(_) if self.made < SLOTS => {
                self.made += 1;
                Ok(Box::new(Slot { buffer: PieceBuffer::new(), lent: None }))
            }
            Err(_) => self.wait_for_slot().await,
        }
    }

    async fn wait_for_slot(&mut self) -> ChannelResult<Box<Slot>> {
        let slot = self.empty.recv().await.ok_or_else(closed)?;
        Ok(self.returned(slot))
    }

    fn returned(&mut self, mut slot: Box<Slot>) -> Box<Slot> {
        self.lent -= usize::from(slot.lent.take().is_some());
        slot
    }

    pub async fn space(&mut self, len: usize) -> ChannelResult<&mut [u8]> {
        let slot = self.slot().await?;
        Ok(self.current.insert(slot).buffer.begin(len))
    }

    /// Sends a piece, from where it lies if that pays.
    ///
    /// # Safety
    ///
    /// The bytes must stay valid and unchanged until [`LocalWriter::wait_sends`] or [`LocalWriter::cancel_sends`] has
    /// returned, or the other end is known to have received them.
    pub async unsafe fn lend(&mut self, bytes: &[u8]) -> ChannelResult<()> {
        if bytes.len() < LEND_FROM {
            self.space(bytes.len()).await?.copy_from_slice(bytes);
            return self.commit().map(drop);
        }
        let mut slot = self.slot().await?;
        slot.lent = Some(Lent(NonNull::from_ref(bytes)));
        self.lent += 1;
        self.put(slot)
    }

    pub fn commit(&mut self) -> ChannelResult<usize> {
        let slot = self.current.take().ok_or_else(closed)?;
        let len = slot.buffer.len;
        self.put(slot).map(|()| len)
    }

    fn put(&mut self, slot: Box<Slot>) -> ChannelResult<()> {
        // There are as many places as slots.
        self.full.try_send(slot).map_err(|_| closed())
    }

    /// Waits until nothing that was lent is still to be read.
    pub async fn wait_sends(&mut self) -> ChannelResult<()> {
        while self.lent > 0 {
            let slot = self.wait_for_slot().await?;
            self.spare.push(*slot);
        }
        Ok(())
    }

    /// Forbids to read what was lent, and waits for a reader that is at it. That ends: a reader holds no piece across an
    /// `await`, be it on this thread or on another.
    pub fn cancel_sends(&mut self) {
        self.gate.close();
    }
}

impl Drop for LocalWriter {
    fn drop(&mut self) {
        if self.lent > 0 {
            self.cancel_sends();
        }
    }
}

impl LocalReader {
    pub async fn piece(&mut self, len: usize) -> ChannelResult<&[u8]> {
        let slot = self.full.recv().await.ok_or_else(closed)?;
        let here = slot.lent.map_or(slot.buffer.len, |lent| lent.0.len());
        if here != len {
            return Err(Fault::Protocol(format!(
                "sent a piece of {here} bytes where {len} were due"
            )));
        }
        self.read(slot)
    }

    fn read(&mut self, slot: Box<Slot>) -> ChannelResult<&[u8]> {
        if slot.lent.is_some() && !self.gate.enter() {
            return Err(Fault::PeerGone("has given the call up".to_string()));
        }
        debug_assert!(self.current.is_none(), "the piece before was not released");
        let slot = self.current.insert(slot);
        match slot.lent {
            None => Ok(slot.buffer.bytes()),
            // SAFETY: the writer promised that the bytes stay as they are until the slot has come back, or its
            // `cancel_sends` has returned, which it does not before `release` has left the gate. The result borrows this
            // reader, so it has ended then.
            Some(lent) => Ok(unsafe { lent.0.as_ref() }),
        }
    }

    /// The next piece, of any length. None when the writer is gone.
    #[cfg(test)]
    pub async fn next_piece(&mut self) -> Option<&[u8]> {
        let slot = self.full.recv().await?;
        self.read(slot).ok()
    }

    pub async fn recv(&mut self, into: &mut [u8]) -> ChannelResult<()> {
        into.copy_from_slice(self.piece(into.len()).await?);
        self.release();
        Ok(())
    }

    pub fn release(&mut self) {
        if let Some(slot) = self.current.take() {
            if slot.lent.is_some() {
                self.gate.leave();
            }
            // The writer may have left.
            let _ = self.empty.try_send(slot);
        }
    }
}

impl Drop for LocalReader {
    /// Lets the writer take back what this end reads.
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;
    use tokio::time::timeout;

    static LARGE: [u8; LEND_FROM] = [7; LEND_FROM];
    const PAUSE: Duration = Duration::from_millis(30);

    fn reason<T>(result: ChannelResult<T>) -> String {
        match result {
            Err(Fault::PeerGone(what) | Fault::Protocol(what)) => what,
            Ok(_) => "none".to_string(),
        }
    }

    #[tokio::test]
    async fn large_pieces_stay_where_they_are_until_they_are_read() {
        let (mut writer, mut reader) = pipe();
        let small = [1; LEND_FROM - 1];
        // SAFETY: both outlive the pipe, and nothing writes them.
        unsafe {
            writer.lend(&small).await.unwrap();
            writer.wait_sends().await.unwrap(); // copied
            writer.lend(&LARGE).await.unwrap();
        }
        assert!(timeout(PAUSE, writer.wait_sends()).await.is_err(), "nobody has read them");
        assert_ne!(reader.piece(small.len()).await.unwrap().as_ptr(), small.as_ptr());
        reader.release();
        assert_eq!(reader.piece(LARGE.len()).await.unwrap().as_ptr(), LARGE.as_ptr());
        reader.release();
        writer.wait_sends().await.unwrap();
        // As many pieces as there are slots can be on their way, again and again.
        for _ in 0..3 {
            for _ in 0..SLOTS {
                // SAFETY: as above.
                unsafe { writer.lend(&LARGE).await.unwrap() };
            }
            for _ in 0..SLOTS {
                reader.recv(&mut [0; LEND_FROM]).await.unwrap();
            }
        }
        writer.wait_sends().await.unwrap();
    }

    #[tokio::test]
    async fn what_is_taken_back_is_not_read() {
        for drops in [false, true] {
            let (mut writer, mut reader) = pipe();
            // SAFETY: `LARGE` lives on and does not change, here and below.
            unsafe { writer.lend(&LARGE).await.unwrap() };
            writer.cancel_sends();
            if drops {
                drop(writer);
            }
            assert_eq!(reason(reader.piece(LARGE.len()).await), "has given the call up");
        }
    }

    #[tokio::test]
    async fn memory_is_taken_back_when_its_reader_has_ended() {
        let (mut writer, mut reader) = pipe();
        // SAFETY: see above.
        unsafe { writer.lend(&LARGE).await.unwrap() };
        reader.piece(LARGE.len()).await.unwrap();
        let (done, is_done) = mpsc::channel();
        let other = std::thread::spawn(move || {
            writer.cancel_sends();
            done.send(()).unwrap();
        });
        assert!(is_done.recv_timeout(PAUSE).is_err(), "the reader still reads");
        reader.release();
        other.join().unwrap();
    }

    #[tokio::test]
    async fn a_reader_that_leaves_is_missed_and_holds_nothing() {
        for reads in [false, true] {
            let (mut writer, mut reader) = pipe();
            // SAFETY: see above.
            unsafe { writer.lend(&LARGE).await.unwrap() };
            if reads {
                reader.piece(LARGE.len()).await.unwrap();
            }
            drop(reader);
            let left = if reads { "none" } else { "has left the group" };
            assert_eq!(reason(writer.wait_sends().await), left);
            writer.cancel_sends();
        }
    }
}
