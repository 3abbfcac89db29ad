//! Pieces of messages: their sizes, their memory, and why a transport cannot pass one on.

use bytemuck::{Pod, Zeroable};

use crate::collective::work::yield_briefly;

/// Bytes of the largest piece: a piece that is received, added to and forwarded stays in the second-level
/// cache. A multiple of every element's size.
pub const PIECE: usize = 256 << 10;

/// Pieces that an algorithm sends before it waits for the first to come in.
pub const WINDOW: usize = 3;

/// Pieces that a pipe takes before its reader takes one: the window, a header, and one more. With these, one of the
/// ranks that wait for each other in a ring can always proceed.
pub const SLOTS: usize = WINDOW + 3;

/// A cache line, so that memory of pieces begins at one.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct CacheLine([u8; 64]);

/// Memory of one piece.
pub struct PieceBuffer {
    lines: Vec<CacheLine>,
    /// Bytes in use.
    pub len: usize,
}

impl PieceBuffer {
    /// Creates a buffer that grows to the largest piece that it has held.
    pub fn new() -> PieceBuffer {
        PieceBuffer { lines: Vec::new(), len: 0 }
    }

    /// The bytes in use.
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }

    /// The first `len` bytes, which are those in use from now on. They hold anything.
    pub fn begin(&mut self, len: usize) -> &mut [u8] {
        let lines = len.div_ceil(size_of::<CacheLine>());
        if self.lines.len() < lines {
            self.lines = vec![CacheLine::zeroed(); lines.next_power_of_two()];
        }
        self.len = len;
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..len]
    }
}

/// The reason for which a call cannot be carried out.
#[derive(Debug)]
pub enum Fault {
    /// A rank has closed its end of a pipe, for a reason that it may still tell.
    PeerGone(String),
    /// Anything else.
    Protocol(String),
}

impl From<String> for Fault {
    fn from(what: String) -> Fault {
        Fault::Protocol(what)
    }
}

/// The outcome of a piece, or of a call.
pub type ChannelResult<T> = std::result::Result<T, Fault>;

/// Lets a side that looks again and again for what it waits for pause a little, now and then for longer. Returns whether to
/// go on: not if another thread has run meanwhile.
pub fn pause(look: usize) -> bool {
    if look % 16 == 15 {
        return yield_briefly();
    }
    std::hint::spin_loop();
    true
}
