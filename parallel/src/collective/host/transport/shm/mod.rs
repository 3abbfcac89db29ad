//! The pipe through memory that two processes of one machine share. It is a ring each way, and the connection between
//! them is the doorbell of a side that sleeps.
//!
//! Where one process may read the other's memory, large pieces are not put into the ring: it holds their
//! address, and the receiver copies them from there.

mod offer;
mod remote;
mod ring;

pub use offer::{Offer, Verdict, accept, offer, pipes};

use socket2::SockRef;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::task::yield_now;

use crate::collective::host::runtime::block_on::may_sleep;
use crate::collective::host::transport::piece::{
    ChannelResult, Fault, PIECE, PieceBuffer, SLOTS, pause,
};
use ring::{AWAKE, Descriptor, Ring, SLEEPS_AT_SOCKET, SLEEPS_AT_WORD, sleep_at, wake_at};

/// Pieces of fewer bytes are put into the ring: copying them costs less than asking the kernel.
const LEND_FROM: usize = 16 << 10;

/// Looks at the ring before a side goes to sleep.
const SPIN_LIMIT: usize = 200;

/// Time for which a thread sleeps at a word before it first looks whether the other side is still there, the call has
/// failed, or its time is over. Then twice as long, and so on: many threads that wait long would keep a core busy.
const SLEEP: Duration = Duration::from_millis(20);

/// Longest time for which it sleeps.
const LONGEST_SLEEP: Duration = Duration::from_millis(500);

/// The end that is written.
pub struct ShmWriter {
    ring: Ring,
    bell: Doorbell,
    /// The other side may read this process's memory.
    lends: bool,
    written: u64,
    /// Pieces up to this number must be read before the memory they lie in is free.
    lent: u64,
    current: Option<usize>,
}

/// The end that is read.
pub struct ShmReader {
    ring: Ring,
    bell: Doorbell,
    /// Process of the writer.
    pid: u32,
    read: u64,
    scratch: Option<PieceBuffer>,
    holds: bool,
}

/// Wakes the other side, and waits for it.
#[derive(Clone)]
struct Doorbell(Arc<TcpStream>);

impl Doorbell {
    /// Wakes the other side if it sleeps.
    fn ring(&self, sleeps: &AtomicU32) {
        fence(Ordering::SeqCst); // what it waits for is visible before it is asked whether it sleeps
        if sleeps.load(Ordering::Relaxed) == AWAKE {
            return;
        }
        match sleeps.swap(AWAKE, Ordering::AcqRel) {
            // A full socket holds enough wake-ups, and who is gone needs none. The runtime is not asked: it
            // would go on taking a socket that was full for full until this thread sleeps.
            SLEEPS_AT_SOCKET => {
                let _ = SockRef::from(&*self.0).send_with_flags(&[1], libc::MSG_NOSIGNAL);
            }
            SLEEPS_AT_WORD => wake_at(sleeps),
            _ => {}
        }
    }

    /// Returns whether the other side is gone. Takes what has rung before: only behind it is the end to be seen.
    fn is_closed(&self) -> bool {
        let mut bytes = [std::mem::MaybeUninit::uninit(); 64];
        loop {
            match SockRef::from(&*self.0).recv_with_flags(&mut bytes, libc::MSG_DONTWAIT) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return error.kind() != ErrorKind::WouldBlock,
            }
        }
    }

    /// Waits until the other side has made `ready` true.
    async fn wait(&self, sleeps: &AtomicU32, ready: impl Fn() -> bool) -> ChannelResult<()> {
        for look in 0..SPIN_LIMIT {
            if ready() {
                return Ok(());
            }
            if !pause(look) {
                break;
            }
        }
        let mut limit = SLEEP;
        loop {
            let place = if may_sleep() { SLEEPS_AT_WORD } else { SLEEPS_AT_SOCKET };
            sleeps.store(place, Ordering::Relaxed);
            fence(Ordering::SeqCst); // see `ring`
            if ready() {
                sleeps.store(AWAKE, Ordering::Relaxed);
                return Ok(());
            }
            if place == SLEEPS_AT_WORD {
                sleep_at(sleeps, limit);
                limit = (limit * 2).min(LONGEST_SLEEP);
                if !ready() {
                    if self.is_closed() && !ready() {
                        return Err(Fault::PeerGone("has left the group".to_string()));
                    }
                    yield_now().await; // the call may have failed, or its time may be over
                }
                continue;
            }
            self.0
                .readable()
                .await
                .map_err(|error| Fault::PeerGone(format!("is gone: {error}")))?;
            let closed = loop {
                match self.0.try_read(&mut [0; 64]) {
                    Ok(0) => break true,
                    Ok(_) => {}
                    Err(error) => break error.kind() != ErrorKind::WouldBlock,
                }
            };
            if closed && !ready() {
                return Err(Fault::PeerGone("has left the group".to_string()));
            }
        }
    }
}

impl ShmWriter {
    /// Waits until at most `limit` pieces are unread.
    async fn room(&self, limit: u64) -> ChannelResult<()> {
        let ready =
            || self.written.saturating_sub(self.ring.read().load(Ordering::Acquire)) <= limit;
        self.bell.wait(self.ring.writer_sleeps(), ready).await
    }

    pub async fn space(&mut self, len: usize) -> ChannelResult<&mut [u8]> {
        self.room(SLOTS as u64 - 1).await?;
        self.current = Some(len);
        // SAFETY: the slot is free and this is the only writer.
        Ok(unsafe { &mut self.ring.slot(self.written)[..len] })
    }

    pub fn commit(&mut self) -> ChannelResult<usize> {
        let len = self.current.take().ok_or_else(|| "was sent a piece not begun".to_string())?;
        self.publish(Descriptor { len: len as u64, address: 0 });
        Ok(len)
    }

    fn publish(&mut self, descriptor: Descriptor) {
        self.ring.describe(self.written, descriptor);
        self.written += 1;
        self.ring.written().store(self.written, Ordering::Release);
        self.bell.ring(self.ring.reader_sleeps());
    }

    /// Sends a piece from where it lies, if that pays.
    ///
    /// # Safety
    ///
    /// The bytes must stay unchanged until [`ShmWriter::wait_sends`] or [`ShmWriter::cancel_sends`] has returned, or the
    /// other end is known to have received them.
    pub async unsafe fn lend(&mut self, bytes: &[u8]) -> ChannelResult<()> {
        if !self.lends || bytes.len() < LEND_FROM {
            self.space(bytes.len()).await?.copy_from_slice(bytes);
            return self.commit().map(drop);
        }
        self.room(SLOTS as u64 - 1).await?;
        self.publish(Descriptor { len: bytes.len() as u64, address: bytes.as_ptr() as u64 });
        self.lent = self.written;
        Ok(())
    }

    /// Waits until nothing that was lent is still to be read.
    pub async fn wait_sends(&mut self) -> ChannelResult<()> {
        let ready = || self.ring.read().load(Ordering::Acquire) >= self.lent;
        self.bell.wait(self.ring.writer_sleeps(), ready).await
    }

    /// Forbids to read what was lent. A reader that is at it will find out before it uses it.
    pub fn cancel_sends(&mut self) {
        self.ring.revoked().store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst); // before the owner changes what was lent
    }
}

impl Drop for ShmWriter {
    fn drop(&mut self) {
        if self.ring.read().load(Ordering::Acquire) < self.lent {
            self.cancel_sends();
        }
    }
}

impl ShmReader {
    /// Waits for the next piece, which must have `len` bytes.
    async fn next(&mut self, len: usize) -> ChannelResult<Descriptor> {
        let ready = || self.ring.written().load(Ordering::Acquire) > self.read;
        self.bell.wait(self.ring.reader_sleeps(), ready).await?;
        let descriptor = self.ring.descriptor(self.read);
        if descriptor.len != len as u64 || len > PIECE {
            let what = format!("sent a piece of {} bytes where {len} were due", descriptor.len);
            return Err(Fault::Protocol(what));
        }
        Ok(descriptor)
    }

    pub async fn piece(&mut self, len: usize) -> ChannelResult<&[u8]> {
        let Descriptor { address, .. } = self.next(len).await?;
        self.holds = true;
        if address == 0 {
            // SAFETY: the writer has passed the slot on and gets it back in `release`.
            return Ok(unsafe { &self.ring.slot(self.read)[..len] });
        }
        let scratch = self.scratch.get_or_insert_with(PieceBuffer::new).begin(len);
        borrow(&self.ring, self.pid, address, scratch)?;
        Ok(scratch)
    }

    pub fn release(&mut self) {
        if std::mem::take(&mut self.holds) {
            self.read += 1;
            self.ring.read().store(self.read, Ordering::Release);
            self.bell.ring(self.ring.writer_sleeps());
        }
    }

    pub async fn recv(&mut self, into: &mut [u8]) -> ChannelResult<()> {
        let Descriptor { address, .. } = self.next(into.len()).await?;
        self.holds = true;
        if address == 0 {
            // SAFETY: as in `piece`.
            into.copy_from_slice(unsafe { &self.ring.slot(self.read)[..into.len()] });
        } else {
            borrow(&self.ring, self.pid, address, into)?;
        }
        self.release();
        Ok(())
    }
}

/// Copies what the writer has lent.
fn borrow(ring: &Ring, pid: u32, address: u64, into: &mut [u8]) -> ChannelResult<()> {
    remote::read(pid, address, into)
        .map_err(|error| Fault::PeerGone(format!("is gone: {error}")))?;
    // Revoked before the memory went to other uses, so what was read before this is what was lent.
    fence(Ordering::SeqCst);
    if ring.revoked().load(Ordering::SeqCst) == 1 {
        return Err(Fault::PeerGone("has given the call up".to_string()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::host::runtime::block_on::block_on;
    use std::io::Read;
    use tokio::net::TcpListener;
    use tokio::runtime::{Builder, Runtime};

    /// Both ends of a pipe through memory.
    fn pipe(runtime: &Runtime) -> (ShmWriter, ShmReader) {
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let far = listener.accept().await.unwrap().0;
            let ((mine, my_ring), (theirs, their_ring)) =
                (offer().unwrap().unwrap(), offer().unwrap().unwrap());
            let (mine, theirs) =
                (accept(&theirs, &mine).unwrap().1, accept(&mine, &theirs).unwrap().1);
            let pid = std::process::id();
            let (writer, _) = pipes(my_ring, theirs.unwrap(), pid, false, near);
            (writer, pipes(their_ring, mine.unwrap(), pid, false, far).1)
        })
    }

    /// The other side has rung a bell that this side, which was awake, has not looked at.
    #[test]
    fn a_bell_that_rang_before_hides_nobody_who_has_left() {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let (writer, mut reader) = pipe(&runtime);
        let _runtime = runtime.enter();
        for _ in 0..100 {
            SockRef::from(&*writer.bell.0).send(&[1]).unwrap();
        }
        assert!(!reader.bell.is_closed());
        SockRef::from(&*writer.bell.0).send(&[1]).unwrap();
        drop(writer);
        let begun = std::time::Instant::now();
        let error = block_on(reader.recv(&mut [0])).unwrap_err();
        assert!(matches!(error, Fault::PeerGone(why) if why == "has left the group"));
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    }

    #[test]
    fn a_thread_that_carries_out_one_call_sleeps_at_the_word() {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let (mut writer, mut reader) = pipe(&runtime);
        let (runtime, sleeps) = (&runtime, |writer: &ShmWriter| {
            while writer.ring.reader_sleeps().load(Ordering::Relaxed) != SLEEPS_AT_WORD {
                std::thread::yield_now();
            }
        });
        std::thread::scope(|scope| {
            let receiver = scope.spawn(move || {
                let _runtime = runtime.enter();
                let mut byte = [0];
                block_on(reader.recv(&mut byte)).unwrap();
                (byte, block_on(reader.recv(&mut [0])).unwrap_err())
            });
            sleeps(&writer);
            block_on(writer.space(1)).unwrap()[0] = 9;
            writer.commit().unwrap();
            sleeps(&writer); // for the second piece, which does not come
            drop(writer);
            let (byte, error) = receiver.join().unwrap();
            assert_eq!(byte, [9]);
            assert!(matches!(error, Fault::PeerGone(why) if why == "has left the group"));
        });
    }

    #[tokio::test]
    async fn a_bell_that_was_full_rings_again_at_once() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let mut far = listener.accept().await.unwrap().0.into_std().unwrap();
        let bell = Doorbell(Arc::new(near));
        // The other side sleeps on, and wakes when the bell's socket takes no more.
        let mut rung = 0;
        bell.0.writable().await.unwrap();
        while let Ok(count) = bell.0.try_write(&[1; 1 << 16]) {
            rung += count;
        }
        far.set_nonblocking(false).unwrap();
        far.read_exact(&mut vec![0; rung]).unwrap();
        // The runtime has had no chance to see that there is room.
        bell.ring(&AtomicU32::new(1));
        far.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
        let mut byte = [0];
        far.read_exact(&mut byte).expect("it has been woken");
        assert_eq!(byte, [1]);
    }
}
