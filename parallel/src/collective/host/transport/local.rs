//! The pipe between two threads of a process: two queues of recycled chunks, full ones one way and empty
//! ones back.

use tokio::sync::mpsc::{Receiver, Sender, channel};

use crate::collective::host::transport::piece::{ChannelResult, Fault, PieceBuffer, SLOTS};

/// The end that is written.
pub struct LocalWriter {
    full: Sender<PieceBuffer>,
    empty: Receiver<PieceBuffer>,
    made: usize,
    current: Option<PieceBuffer>,
}

/// The end that is read.
pub struct LocalReader {
    full: Receiver<PieceBuffer>,
    empty: Sender<PieceBuffer>,
    current: Option<PieceBuffer>,
}

fn closed() -> Fault {
    Fault::PeerGone("has left the group".to_string())
}

/// Both ends of a new pipe.
pub fn pipe() -> (LocalWriter, LocalReader) {
    let (full_in, full_out) = channel(SLOTS);
    let (empty_in, empty_out) = channel(SLOTS);
    (
        LocalWriter { full: full_in, empty: empty_out, made: 0, current: None },
        LocalReader { full: full_out, empty: empty_in, current: None },
    )
}

impl LocalWriter {
    pub async fn space(&mut self, len: usize) -> ChannelResult<&mut [u8]> {
        let chunk = match self.empty.try_recv() {
            Ok(chunk) => chunk,
            Err(_) if self.made < SLOTS => {
                self.made += 1;
                PieceBuffer::new()
            }
            Err(_) => self.empty.recv().await.ok_or_else(closed)?,
        };
        Ok(self.current.insert(chunk).begin(len))
    }

    pub async fn send(&mut self, bytes: &[u8]) -> ChannelResult<()> {
        self.space(bytes.len()).await?.copy_from_slice(bytes);
        self.commit().map(drop)
    }

    pub fn commit(&mut self) -> ChannelResult<usize> {
        let chunk = self.current.take().ok_or_else(closed)?;
        let len = chunk.len;
        // There are as many places as chunks.
        self.full.try_send(chunk).map_err(|_| closed())?;
        Ok(len)
    }
}

impl LocalReader {
    pub async fn piece(&mut self, len: usize) -> ChannelResult<&[u8]> {
        let chunk = self.full.recv().await.ok_or_else(closed)?;
        if chunk.len != len {
            let what = format!("sent a piece of {} bytes where {len} were due", chunk.len);
            return Err(Fault::Protocol(what));
        }
        Ok(self.current.insert(chunk).bytes())
    }

    /// The next piece, of any length. None when the writer is gone.
    #[cfg(test)]
    pub async fn next_piece(&mut self) -> Option<&[u8]> {
        let chunk = self.full.recv().await?;
        Some(self.current.insert(chunk).bytes())
    }

    pub async fn recv(&mut self, into: &mut [u8]) -> ChannelResult<()> {
        into.copy_from_slice(self.piece(into.len()).await?);
        self.release();
        Ok(())
    }

    pub fn release(&mut self) {
        if let Some(chunk) = self.current.take() {
            // The writer may have left.
            let _ = self.empty.try_send(chunk);
        }
    }
}
