//! The pipe over a TCP connection.
//!
//! Pieces are written from a queue: at once as far as the socket takes them, the rest by a task of its own. So a rank
//! keeps receiving while its neighbour is slow to receive. Pieces in the user's memory are not copied into the queue
//! but lent to it. Between machines pieces are [sealed](super::seal), which copies them.

use socket2::SockRef;
use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, Read, Result};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::yield_now;

use crate::collective::host::transport::piece::{ChannelResult, Fault, PieceBuffer, SLOTS, pause};
use crate::collective::host::transport::seal::{Opener, Seal, Sealer};

/// Looks at the socket before a reader goes to sleep.
const SPIN_LIMIT: usize = 500;

/// Looks at the socket between two at everything else.
const POLLS_PER_YIELD: usize = 16;

/// The end that is written.
pub struct TcpWriter {
    state: Arc<ConnectionState>,
    current: Option<PieceBuffer>,
    sealer: Option<Sealer>,
}

/// The end that is read.
pub struct TcpReader {
    stream: Arc<TcpStream>,
    scratch: Option<PieceBuffer>,
    opener: Option<Opener>,
}

enum Item {
    Chunk(PieceBuffer),
    Lent(LentPiece),
    Sealed(Vec<u8>),
}

struct LentPiece {
    pointer: *const u8,
    len: usize,
}

// SAFETY: the caller of `TcpWriter::lend` promised that the memory stays as it is, for any thread.
unsafe impl Send for LentPiece {}

impl Item {
    fn bytes(&self) -> &[u8] {
        match self {
            Item::Chunk(chunk) => chunk.bytes(),
            Item::Sealed(records) => records,
            // SAFETY: `TcpWriter::lend` was promised that these bytes stay valid and unchanged while the item
            // is in the queue.
            Item::Lent(LentPiece { pointer, len }) => unsafe {
                std::slice::from_raw_parts(*pointer, *len)
            },
        }
    }
}

#[derive(Default)]
struct Queue {
    items: VecDeque<Item>,
    /// Bytes of the first item that are written already.
    written: usize,
    free: Vec<PieceBuffer>,
    free_sealed: Vec<Vec<u8>>,
    broken: Option<String>,
}

struct ConnectionState {
    stream: Arc<TcpStream>,
    queue: Mutex<Queue>,
    /// There is something to write, or the writer has gone.
    work: Notify,
    /// There is room, or all is broken.
    room: Notify,
}

/// The pipes of both directions over a connection, whose further bytes are sealed if there is a seal, and the task that
/// writes. Must be called where a runtime is entered.
pub fn pipes(
    stream: TcpStream,
    seal: Option<Seal>,
) -> (TcpWriter, TcpReader, impl Future<Output = ()> + Send) {
    let stream = Arc::new(stream);
    let (queue, work, room) = (Mutex::default(), Notify::new(), Notify::new());
    let state = Arc::new(ConnectionState { stream: stream.clone(), queue, work, room });
    let task = write_rest(state.clone());
    let (sealer, opener) = seal.map(|Seal { sealer, opener }| (sealer, opener)).unzip();
    let writer = TcpWriter { state, current: None, sealer };
    (writer, TcpReader { stream, scratch: None, opener }, task)
}

fn gone(error: &std::io::Error) -> Fault {
    Fault::PeerGone(ended(error))
}

/// Describes the end of a connection. A rank that has left closes or resets its connections.
fn ended(error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => "has left the group".to_string(),
        _ => format!("is gone: {error}"),
    }
}

impl ConnectionState {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes what the socket takes now.
    fn flush(&self) {
        let queue = &mut *self.queue();
        while !queue.items.is_empty() {
            let mut slices = [IoSlice::new(&[]); SLOTS];
            let mut bytes = 0;
            let written = std::iter::once(queue.written).chain(std::iter::repeat(0));
            for ((slice, item), written) in slices.iter_mut().zip(&queue.items).zip(written) {
                *slice = IoSlice::new(&item.bytes()[written..]);
                bytes += slice.len();
            }
            let count = queue.items.len().min(SLOTS);
            match self.stream.try_write_vectored(&slices[..count]) {
                Ok(count) => {
                    queue.advance(count);
                    self.room.notify_one();
                    if count < bytes {
                        return; // it takes no more now
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => {
                    queue.items.clear();
                    queue.broken = Some(ended(&error));
                    self.room.notify_one();
                }
            }
        }
    }

    /// Writes what the socket takes now, and leaves the rest to the task.
    fn send(&self) {
        if !self.queue().items.is_empty() {
            self.flush();
            if !self.queue().items.is_empty() {
                self.work.notify_one();
            }
        }
    }
}

impl Queue {
    /// Puts the records of `bytes` behind the items.
    fn seal(&mut self, sealer: &mut Sealer, bytes: &[u8]) -> ChannelResult<()> {
        let mut records = self.free_sealed.pop().unwrap_or_default();
        records.clear();
        sealer.seal(bytes, &mut records).map_err(|error| error.to_string())?;
        self.items.push_back(Item::Sealed(records));
        Ok(())
    }

    /// Takes `count` bytes that are written from the items.
    fn advance(&mut self, count: usize) {
        self.written += count;
        while let Some(len) = self.items.front().map(|item| item.bytes().len())
            && len <= self.written
        {
            self.written -= len;
            match self.items.pop_front() {
                Some(Item::Chunk(chunk)) => self.free.push(chunk),
                Some(Item::Sealed(records)) => self.free_sealed.push(records),
                Some(Item::Lent(_)) | None => {}
            }
        }
    }
}

/// Writes what did not fit into the socket, until the writer is dropped.
async fn write_rest(state: Arc<ConnectionState>) {
    while state.queue().broken.is_none() {
        state.work.notified().await;
        while !state.queue().items.is_empty() {
            if state.stream.writable().await.is_err() {
                return;
            }
            state.flush();
        }
    }
}

impl TcpWriter {
    /// Waits until fewer than `limit` pieces are in the queue.
    async fn room(&self, limit: usize) -> ChannelResult<()> {
        loop {
            {
                let queue = self.state.queue();
                if let Some(error) = &queue.broken {
                    return Err(Fault::PeerGone(error.clone()));
                }
                if queue.items.len() < limit {
                    return Ok(());
                }
            }
            self.state.room.notified().await;
        }
    }

    pub async fn space(&mut self, len: usize) -> ChannelResult<&mut [u8]> {
        self.room(SLOTS).await?;
        let chunk = self.state.queue().free.pop().unwrap_or_else(PieceBuffer::new);
        Ok(self.current.insert(chunk).begin(len))
    }

    pub fn commit(&mut self) -> ChannelResult<usize> {
        let len = self.hold()?;
        self.flush();
        Ok(len)
    }

    /// Commits a piece like [`TcpWriter::commit`], but may hold it until the next is sent, or until
    /// [`TcpWriter::flush`].
    pub fn hold(&mut self) -> ChannelResult<usize> {
        let chunk = self.current.take().ok_or_else(|| "was sent a piece not begun".to_string())?;
        let (len, queue) = (chunk.len, &mut *self.state.queue());
        match &mut self.sealer {
            Some(sealer) => {
                queue.seal(sealer, chunk.bytes())?;
                queue.free.push(chunk);
            }
            None => queue.items.push_back(Item::Chunk(chunk)),
        }
        Ok(len)
    }

    /// Sends what was held back.
    pub fn flush(&self) {
        self.state.send();
    }

    /// Sends a piece from where it lies.
    ///
    /// # Safety
    ///
    /// The bytes must stay valid and unchanged until [`TcpWriter::wait_sends`] or [`TcpWriter::cancel_sends`] has returned,
    /// or the other end is known to have received them.
    pub async unsafe fn lend(&mut self, bytes: &[u8]) -> ChannelResult<()> {
        self.room(SLOTS).await?;
        {
            let queue = &mut *self.state.queue();
            match &mut self.sealer {
                Some(sealer) => queue.seal(sealer, bytes)?,
                None => {
                    let lent = LentPiece { pointer: bytes.as_ptr(), len: bytes.len() };
                    queue.items.push_back(Item::Lent(lent));
                }
            }
        }
        self.flush();
        Ok(())
    }

    /// Waits until all pieces are with the kernel.
    pub async fn wait_sends(&mut self) -> ChannelResult<()> {
        self.flush();
        self.room(1).await
    }

    /// Gives up what has not been sent.
    pub fn cancel_sends(&mut self) {
        let mut queue = self.state.queue();
        queue.items.clear();
        queue.broken = Some("is not written to any more".to_string());
    }
}

impl Drop for TcpWriter {
    fn drop(&mut self) {
        self.cancel_sends();
        self.state.work.notify_one();
    }
}

impl TcpReader {
    pub async fn piece(&mut self, len: usize) -> ChannelResult<&[u8]> {
        let scratch = self.scratch.get_or_insert_with(PieceBuffer::new).begin(len);
        fill(&self.stream, &mut self.opener, scratch).await?;
        Ok(scratch)
    }

    pub async fn recv(&mut self, into: &mut [u8]) -> ChannelResult<()> {
        fill(&self.stream, &mut self.opener, into).await
    }
}

async fn fill(
    stream: &TcpStream,
    opener: &mut Option<Opener>,
    mut into: &mut [u8],
) -> ChannelResult<()> {
    while !into.is_empty() {
        let count = match opener {
            None => some(read(stream, into).await)?,
            Some(opener) => match opener.open(into).map_err(|error| error.to_string())? {
                0 => {
                    let count = some(read(stream, opener.room()).await)?;
                    opener.received(count);
                    0
                }
                count => count,
            },
        };
        into = &mut into[count..];
    }
    Ok(())
}

/// The bytes that were read, or the end of the connection.
fn some(read: Result<usize>) -> ChannelResult<usize> {
    match read {
        Ok(0) => Err(gone(&ErrorKind::ConnectionReset.into())),
        Ok(count) => Ok(count),
        Err(error) => Err(gone(&error)),
    }
}

/// Reads what has come, or comes next.
async fn read(stream: &TcpStream, into: &mut [u8]) -> Result<usize> {
    // What is about to come is waited for awake: to be woken takes longer. The runtime is not asked, as it
    // takes a socket that was empty for empty until it looks at all of them.
    for look in 0..SPIN_LIMIT {
        if has_come(stream) {
            match (&*SockRef::from(stream)).read(into) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                done => return done,
            }
        }
        if !pause(look) {
            break;
        }
        if look % POLLS_PER_YIELD == POLLS_PER_YIELD - 1 {
            yield_now().await; // the task that writes has its turn
        }
    }
    loop {
        stream.readable().await?;
        match stream.try_read(into) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            done => return done,
        }
    }
}

/// Whether a read would not have to wait. Asking does not keep the kernel from putting more into the socket,
/// as reading in vain does.
fn has_come(stream: &TcpStream) -> bool {
    let mut socket = libc::pollfd { fd: stream.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: `socket` is one such record, borrowed for the call.
    unsafe { libc::poll(&mut socket, 1, 0) > 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::net::TcpListener;
    use tokio::runtime::Builder;
    use tokio::task::{LocalSet, spawn_local};
    use tokio::time::timeout;

    /// A writer may be dropped by any thread, at any moment of its task: the task ends, and the socket with it.
    #[test]
    fn the_task_of_a_dropped_writer_ends() {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        LocalSet::new().block_on(&runtime, async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            for _ in 0..500 {
                let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
                let (writer, reader, task) = pipes(stream, None);
                let _other = listener.accept().await.unwrap();
                let task = spawn_local(task);
                let dropping = std::thread::spawn(move || drop((writer, reader)));
                timeout(Duration::from_secs(20), task).await.expect("it ends").unwrap();
                dropping.join().unwrap();
            }
        });
    }
}
