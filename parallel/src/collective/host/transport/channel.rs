//! One direction between two ranks of a group. Messages go in at one end and come out at the other, in order, in pieces
//! whose lengths both ends know.
//!
//! There are a few kinds of pipe and one interface. A piece can be made in the pipe's own memory
//! ([`SendChannel::space`]) and read there ([`RecvChannel::piece`]), so that a sum passes through a rank without
//! being stored by it; or go from buffer to buffer ([`SendChannel::lend`], [`RecvChannel::recv`]).

use bytemuck::Zeroable;

use crate::collective::host::transport::header::Header;
use crate::collective::host::transport::piece::{ChannelResult, Fault};
use crate::collective::host::transport::{local, shm, tcp};

/// Pieces that go through one end of a pipe before the progress thread looks at its other calls, its timers and its
/// sockets. A pipe between processes that keep pace would never make it wait.
const PIECES_PER_YIELD: u32 = 16;

/// Says who it was.
fn by(rank: usize) -> impl FnOnce(Fault) -> Fault {
    move |fault| match fault {
        Fault::PeerGone(what) => Fault::PeerGone(format!("rank {rank} {what}")),
        Fault::Protocol(what) => Fault::Protocol(format!("rank {rank} {what}")),
    }
}

/// The end that is written, with the bytes of payload that went in.
pub struct SendChannel {
    rank: usize,
    kind: SendChannelKind,
    payload: u64,
    yields: YieldCounter,
}

/// The end that is read.
pub struct RecvChannel {
    rank: usize,
    kind: RecvChannelKind,
    yields: YieldCounter,
    expected: Option<Expected>,
}

/// A header that must come before any data.
#[derive(Clone, Copy)]
struct Expected {
    header: Header,
    /// The reader's number in the world.
    reader: usize,
}

/// Pieces since the progress thread has last looked elsewhere.
#[derive(Default)]
struct YieldCounter(u32);

impl YieldCounter {
    async fn one_more(&mut self) {
        self.0 += 1;
        if self.0 == PIECES_PER_YIELD {
            self.0 = 0;
            tokio::task::yield_now().await;
        }
    }
}

/// Kinds of [`SendChannel`].
pub enum SendChannelKind {
    /// Writes to a thread of this process.
    Local(local::LocalWriter),
    /// Writes to a connection.
    Tcp(tcp::TcpWriter),
    /// Writes to another process of this machine.
    Shared(shm::ShmWriter),
}

/// Kinds of [`RecvChannel`].
pub enum RecvChannelKind {
    /// Reads from a thread of this process.
    Local(local::LocalReader),
    /// Reads from a connection.
    Tcp(tcp::TcpReader),
    /// Reads from another process of this machine.
    Shared(shm::ShmReader),
}

impl SendChannel {
    /// The writing end of a pipe to `rank`.
    pub fn new(rank: usize, kind: SendChannelKind) -> SendChannel {
        SendChannel { rank, kind, payload: 0, yields: YieldCounter::default() }
    }

    /// Whether the pipe is memory, not a connection.
    pub fn is_near(&self) -> bool {
        !matches!(self.kind, SendChannelKind::Tcp(_))
    }

    /// Bytes of payload sent so far.
    pub fn payload(&self) -> u64 {
        self.payload
    }

    /// A place for the next piece, of at most [`PIECE`](super::piece::PIECE) bytes. Write it, then [`SendChannel::commit`].
    pub async fn space(&mut self, len: usize) -> ChannelResult<&mut [u8]> {
        self.yields.one_more().await;
        let rank = self.rank;
        match &mut self.kind {
            SendChannelKind::Local(writer) => writer.space(len).await,
            SendChannelKind::Tcp(writer) => writer.space(len).await,
            SendChannelKind::Shared(writer) => writer.space(len).await,
        }
        .map_err(by(rank))
    }

    /// Sends the piece that [`SendChannel::space`] gave place to.
    pub fn commit(&mut self) -> ChannelResult<()> {
        let sent = match &mut self.kind {
            SendChannelKind::Local(writer) => writer.commit(),
            SendChannelKind::Tcp(writer) => writer.commit(),
            SendChannelKind::Shared(writer) => writer.commit(),
        };
        let sent = sent.map_err(by(self.rank))?;
        self.payload += sent as u64;
        Ok(())
    }

    /// Sends a piece of at most [`PIECE`](super::piece::PIECE) bytes, from where it lies if the pipe can.
    ///
    /// # Safety
    ///
    /// The bytes must stay valid and unchanged until [`SendChannel::wait_sends`] or [`SendChannel::cancel_sends`] has
    /// returned, or the reader is known to have received them.
    pub async unsafe fn lend(&mut self, bytes: &[u8]) -> ChannelResult<()> {
        self.yields.one_more().await;
        match &mut self.kind {
            // SAFETY: the caller promised what these ask for.
            SendChannelKind::Local(writer) => unsafe { writer.lend(bytes).await },
            // SAFETY: as above.
            SendChannelKind::Tcp(writer) => unsafe { writer.lend(bytes).await },
            // SAFETY: as above.
            SendChannelKind::Shared(writer) => unsafe { writer.lend(bytes).await },
        }
        .map_err(by(self.rank))?;
        self.payload += bytes.len() as u64;
        Ok(())
    }

    /// Waits until no memory is lent any more.
    pub async fn wait_sends(&mut self) -> ChannelResult<()> {
        match &mut self.kind {
            SendChannelKind::Local(writer) => writer.wait_sends().await,
            SendChannelKind::Tcp(writer) => writer.wait_sends().await,
            SendChannelKind::Shared(writer) => writer.wait_sends().await,
        }
        .map_err(by(self.rank))
    }

    /// Takes back what is lent. The pipe can be used no more.
    pub fn cancel_sends(&mut self) {
        match &mut self.kind {
            SendChannelKind::Local(writer) => writer.cancel_sends(),
            SendChannelKind::Tcp(writer) => writer.cancel_sends(),
            SendChannelKind::Shared(writer) => writer.cancel_sends(),
        }
    }

    /// Sends a header, which is no payload. It may go out with the piece that follows, or at
    /// [`SendChannel::flush`].
    pub async fn send_header(&mut self, header: &Header) -> ChannelResult<()> {
        let bytes = bytemuck::bytes_of(header);
        self.space(bytes.len()).await?.copy_from_slice(bytes);
        match &mut self.kind {
            SendChannelKind::Local(writer) => writer.commit(),
            SendChannelKind::Tcp(writer) => writer.hold(),
            SendChannelKind::Shared(writer) => writer.commit(),
        }
        .map(drop)
        .map_err(by(self.rank))
    }

    /// Sends a header that has waited for a piece to go with.
    pub fn flush(&self) {
        if let SendChannelKind::Tcp(writer) = &self.kind {
            writer.flush();
        }
    }
}

impl RecvChannel {
    /// The reading end of a pipe from `rank`.
    pub fn new(rank: usize, kind: RecvChannelKind) -> RecvChannel {
        RecvChannel { rank, kind, yields: YieldCounter::default(), expected: None }
    }

    /// Expects `header`, of rank `reader` in the world, to come before the next piece.
    pub fn expect(&mut self, header: Header, reader: usize) {
        self.expected = Some(Expected { header, reader });
    }

    /// Waits for the header that is expected, if it has not come yet.
    ///
    /// Errors if it is that of another call.
    pub async fn recv_header(&mut self) -> ChannelResult<()> {
        let Some(Expected { header: mine, reader }) = self.expected else { return Ok(()) };
        let mut theirs = Header::zeroed();
        self.copy(bytemuck::bytes_of_mut(&mut theirs)).await?;
        if !mine.agrees(&theirs) {
            let (writer, mine, theirs) = (self.rank, mine.describe(), theirs.describe());
            let what = format!("rank {writer} calls {theirs}, rank {reader} calls {mine}");
            return Err(Fault::Protocol(what));
        }
        self.expected = None;
        Ok(())
    }

    /// The next piece, which must have `len` bytes. Read it, then [`RecvChannel::release`], before anything else is awaited:
    /// its writer may wait for that.
    pub async fn piece(&mut self, len: usize) -> ChannelResult<&[u8]> {
        self.recv_header().await?;
        self.yields.one_more().await;
        let rank = self.rank;
        match &mut self.kind {
            RecvChannelKind::Local(reader) => reader.piece(len).await,
            RecvChannelKind::Tcp(reader) => reader.piece(len).await,
            RecvChannelKind::Shared(reader) => reader.piece(len).await,
        }
        .map_err(by(rank))
    }

    /// Gives the memory of the piece back.
    pub fn release(&mut self) {
        match &mut self.kind {
            RecvChannelKind::Local(reader) => reader.release(),
            RecvChannelKind::Tcp(_) => {}
            RecvChannelKind::Shared(reader) => reader.release(),
        }
    }

    /// Copies the next piece, which must have the length of `into`.
    pub async fn recv(&mut self, into: &mut [u8]) -> ChannelResult<()> {
        self.recv_header().await?;
        self.yields.one_more().await;
        self.copy(into).await
    }

    /// Copies what comes next, be it a header or a piece.
    async fn copy(&mut self, into: &mut [u8]) -> ChannelResult<()> {
        match &mut self.kind {
            RecvChannelKind::Local(reader) => reader.recv(into).await,
            RecvChannelKind::Tcp(reader) => reader.recv(into).await,
            RecvChannelKind::Shared(reader) => reader.recv(into).await,
        }
        .map_err(by(self.rank))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::host::transport::shm;
    use std::time::Duration;
    use tokio::net::{TcpListener, TcpStream};
    use tokio::time::timeout;

    #[tokio::test]
    async fn a_pipe_that_is_always_ready_does_not_keep_a_timer_waiting() {
        const PIECES: usize = 1_000_000;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (far, _) = listener.accept().await.unwrap();
        let ((near_offer, near_ring), (far_offer, far_ring)) =
            (shm::offer().unwrap().unwrap(), shm::offer().unwrap().unwrap());
        let (_, from_far) = shm::accept(&near_offer, &far_offer).unwrap();
        let (_, from_near) = shm::accept(&far_offer, &near_offer).unwrap();
        let pid = std::process::id();
        let (writer, _reader) = shm::pipes(near_ring, from_far.unwrap(), pid, false, near);
        let (_writer, reader) = shm::pipes(far_ring, from_near.unwrap(), pid, false, far);
        let mut outgoing = SendChannel::new(1, SendChannelKind::Shared(writer));
        let mut incoming = RecvChannel::new(0, RecvChannelKind::Shared(reader));
        let all = async {
            for _ in 0..PIECES {
                outgoing.space(1).await.unwrap();
                outgoing.commit().unwrap();
                incoming.recv(&mut [0]).await.unwrap();
            }
        };
        let took = timeout(Duration::from_millis(1), all).await;
        assert!(took.is_err(), "{PIECES} pieces went through before the timer was seen");
    }
}
