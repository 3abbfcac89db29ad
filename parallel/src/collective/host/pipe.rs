//! One direction between two ranks of a group: messages go in at one end and come out at the other, in
//! order, in pieces whose lengths both ends know.
//!
//! There are a few kinds of pipe and one interface. A piece can be made in the pipe's own memory
//! ([`Outgoing::space`]) and read there ([`Incoming::piece`]), so that a sum passes through a rank without
//! being stored by it; or go from buffer to buffer ([`Outgoing::lend`], [`Incoming::recv`]).

use bytemuck::Zeroable;

use super::header::Header;
use super::{local, shm, tcp};

/// Bytes of the largest piece: a piece that is received, added to and forwarded stays in the second-level
/// cache. A multiple of every element's size.
pub const PIECE: usize = 256 << 10;

/// Pieces that an algorithm sends before it waits for the first to come in.
pub const WINDOW: usize = 3;

/// Pieces that a pipe takes before its reader takes one: the window, a header, and one more, so that of
/// ranks that wait for each other in a ring one can always go on.
pub const SLOTS: usize = WINDOW + 3;

/// Pieces that go through one end of a pipe before the progress thread looks at its other calls, its timers
/// and its sockets: between processes that keep pace a pipe alone would never make it wait.
const TURN: u32 = 16;

/// Why a call cannot be carried out.
#[derive(Debug)]
pub enum Fault {
    /// A rank has closed its end of a pipe, for a reason that it may still tell.
    Gone(String),
    /// Anything else.
    Wrong(String),
}

impl From<String> for Fault {
    fn from(what: String) -> Fault {
        Fault::Wrong(what)
    }
}

/// What came of a piece, or of a call.
pub type PipeResult<T> = std::result::Result<T, Fault>;

/// Says who it was.
fn by(rank: usize) -> impl FnOnce(Fault) -> Fault {
    move |fault| match fault {
        Fault::Gone(what) => Fault::Gone(format!("rank {rank} {what}")),
        Fault::Wrong(what) => Fault::Wrong(format!("rank {rank} {what}")),
    }
}

/// The end that is written, with the bytes of payload that went in.
pub struct Outgoing {
    rank: usize,
    kind: OutgoingKind,
    payload: u64,
    turn: Turn,
}

/// The end that is read.
pub struct Incoming {
    rank: usize,
    kind: IncomingKind,
    turn: Turn,
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
struct Turn(u32);

/// Lets a side that looks again and again for what it waits for pause a little, now and then for longer.
pub fn pause(look: usize) {
    if look % 16 == 15 { std::thread::yield_now() } else { std::hint::spin_loop() }
}

impl Turn {
    async fn one_more(&mut self) {
        self.0 += 1;
        if self.0 == TURN {
            self.0 = 0;
            tokio::task::yield_now().await;
        }
    }
}

/// Kinds of [`Outgoing`].
pub enum OutgoingKind {
    /// To a thread of this process.
    Local(local::Writer),
    /// Over a connection.
    Tcp(tcp::Writer),
    /// To another process of this machine.
    Shared(shm::Writer),
}

/// Kinds of [`Incoming`].
pub enum IncomingKind {
    /// From a thread of this process.
    Local(local::Reader),
    /// Over a connection.
    Tcp(tcp::Reader),
    /// From another process of this machine.
    Shared(shm::Reader),
}

impl Outgoing {
    /// The writing end of a pipe to `rank`.
    pub fn new(rank: usize, kind: OutgoingKind) -> Outgoing {
        Outgoing { rank, kind, payload: 0, turn: Turn::default() }
    }
    /// Bytes of payload sent so far.
    pub fn payload(&self) -> u64 {
        self.payload
    }

    /// A place for the next piece, of at most [`PIECE`] bytes. Write it, then [`Outgoing::commit`].
    pub async fn space(&mut self, len: usize) -> PipeResult<&mut [u8]> {
        self.turn.one_more().await;
        let rank = self.rank;
        match &mut self.kind {
            OutgoingKind::Local(writer) => writer.space(len).await,
            OutgoingKind::Tcp(writer) => writer.space(len).await,
            OutgoingKind::Shared(writer) => writer.space(len).await,
        }
        .map_err(by(rank))
    }

    /// Sends the piece that [`Outgoing::space`] gave place to.
    pub fn commit(&mut self) -> PipeResult<()> {
        let sent = match &mut self.kind {
            OutgoingKind::Local(writer) => writer.commit(),
            OutgoingKind::Tcp(writer) => writer.commit(),
            OutgoingKind::Shared(writer) => writer.commit(),
        };
        let sent = sent.map_err(by(self.rank))?;
        self.payload += sent as u64;
        Ok(())
    }

    /// Sends a piece of at most [`PIECE`] bytes, from where it lies if the pipe can.
    ///
    /// # Safety
    ///
    /// The bytes must stay valid and unchanged until [`Outgoing::settle`] or [`Outgoing::revoke`] has
    /// returned, or the reader is known to have received them.
    pub async unsafe fn lend(&mut self, bytes: &[u8]) -> PipeResult<()> {
        self.turn.one_more().await;
        match &mut self.kind {
            OutgoingKind::Local(writer) => writer.send(bytes).await,
            // SAFETY: the caller promised what these ask for.
            OutgoingKind::Tcp(writer) => unsafe { writer.lend(bytes).await },
            // SAFETY: as above.
            OutgoingKind::Shared(writer) => unsafe { writer.lend(bytes).await },
        }
        .map_err(by(self.rank))?;
        self.payload += bytes.len() as u64;
        Ok(())
    }

    /// Waits until no memory is lent any more.
    pub async fn settle(&mut self) -> PipeResult<()> {
        match &mut self.kind {
            OutgoingKind::Local(_) => Ok(()),
            OutgoingKind::Tcp(writer) => writer.settle().await,
            OutgoingKind::Shared(writer) => writer.settle().await,
        }
        .map_err(by(self.rank))
    }

    /// Takes back what is lent. The pipe can be used no more.
    pub fn revoke(&mut self) {
        match &mut self.kind {
            OutgoingKind::Local(_) => {}
            OutgoingKind::Tcp(writer) => writer.revoke(),
            OutgoingKind::Shared(writer) => writer.revoke(),
        }
    }

    /// Sends a header, which is no payload. It may go out with the piece that follows, or at
    /// [`Outgoing::flush`].
    pub async fn send_header(&mut self, header: &Header) -> PipeResult<()> {
        let bytes = bytemuck::bytes_of(header);
        self.space(bytes.len()).await?.copy_from_slice(bytes);
        match &mut self.kind {
            OutgoingKind::Local(writer) => writer.commit(),
            OutgoingKind::Tcp(writer) => writer.hold(),
            OutgoingKind::Shared(writer) => writer.commit(),
        }
        .map(drop)
        .map_err(by(self.rank))
    }

    /// Sends a header that has waited for a piece to go with.
    pub fn flush(&self) {
        if let OutgoingKind::Tcp(writer) = &self.kind {
            writer.flush();
        }
    }
}

impl Incoming {
    /// The reading end of a pipe from `rank`.
    pub fn new(rank: usize, kind: IncomingKind) -> Incoming {
        Incoming { rank, kind, turn: Turn::default(), expected: None }
    }

    /// Expects `header`, of rank `reader` in the world, to come before the next piece.
    pub fn expect(&mut self, header: Header, reader: usize) {
        self.expected = Some(Expected { header, reader });
    }

    /// Waits for the header that is expected, if it has not come yet.
    ///
    /// Errors if it is that of another call.
    pub async fn hear(&mut self) -> PipeResult<()> {
        let Some(Expected { header: mine, reader }) = self.expected else { return Ok(()) };
        let mut theirs = Header::zeroed();
        self.copy(bytemuck::bytes_of_mut(&mut theirs)).await?;
        if !mine.agrees(&theirs) {
            let (writer, mine, theirs) = (self.rank, mine.describe(), theirs.describe());
            let what = format!("rank {writer} calls {theirs}, rank {reader} calls {mine}");
            return Err(Fault::Wrong(what));
        }
        self.expected = None;
        Ok(())
    }

    /// The next piece, which must have `len` bytes. Read it, then [`Incoming::release`].
    pub async fn piece(&mut self, len: usize) -> PipeResult<&[u8]> {
        self.hear().await?;
        self.turn.one_more().await;
        let rank = self.rank;
        match &mut self.kind {
            IncomingKind::Local(reader) => reader.piece(len).await,
            IncomingKind::Tcp(reader) => reader.piece(len).await,
            IncomingKind::Shared(reader) => reader.piece(len).await,
        }
        .map_err(by(rank))
    }

    /// Gives the memory of the piece back.
    pub fn release(&mut self) {
        match &mut self.kind {
            IncomingKind::Local(reader) => reader.release(),
            IncomingKind::Tcp(_) => {}
            IncomingKind::Shared(reader) => reader.release(),
        }
    }

    /// Copies the next piece, which must have the length of `into`.
    pub async fn recv(&mut self, into: &mut [u8]) -> PipeResult<()> {
        self.hear().await?;
        self.turn.one_more().await;
        self.copy(into).await
    }

    /// Copies what comes next, be it a header or a piece.
    async fn copy(&mut self, into: &mut [u8]) -> PipeResult<()> {
        match &mut self.kind {
            IncomingKind::Local(reader) => reader.recv(into).await,
            IncomingKind::Tcp(reader) => reader.recv(into).await,
            IncomingKind::Shared(reader) => reader.recv(into).await,
        }
        .map_err(by(self.rank))
    }
}

#[cfg(test)]
mod tests {
    use super::super::shm;
    use super::*;
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
        let mut outgoing = Outgoing::new(1, OutgoingKind::Shared(writer));
        let mut incoming = Incoming::new(0, IncomingKind::Shared(reader));
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
