//! A connection between two ranks that know each other's secret: plain within a machine, sealed between machines.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::super::transport::seal::Seal;
use super::network::Stream;

/// A connection behind its handshake.
pub struct Connection {
    stream: Stream,
    seal: Option<Seal>,
    /// Sealed bytes that the socket has not taken yet, from `written` on.
    sealed: Vec<u8>,
    written: usize,
}

impl Connection {
    /// A connection whose bytes are sealed, if there is a seal.
    pub fn new(stream: impl Into<Stream>, seal: Option<Seal>) -> Connection {
        Connection { stream: stream.into(), seal, sealed: Vec::new(), written: 0 }
    }

    /// The connection without its seal.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Gives the connection up, with the seal for all further bytes. All that was written must have been flushed, and all
    /// messages that have come must have been read.
    pub fn into_parts(self) -> (Stream, Option<Seal>) {
        (self.stream, self.seal)
    }

    /// Writes what is sealed to the socket.
    fn poll_sealed(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.written < self.sealed.len() {
            let rest = &self.sealed[self.written..];
            match ready!(Pin::new(&mut self.stream).poll_write(context, rest))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                count => self.written += count,
            }
        }
        self.sealed.clear();
        self.written = 0;
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let connection = self.get_mut();
        let Some(Seal { opener, .. }) = &mut connection.seal else {
            return Pin::new(&mut connection.stream).poll_read(context, into);
        };
        loop {
            match opener.open(into.initialize_unfilled())? {
                0 if into.remaining() == 0 => return Poll::Ready(Ok(())),
                0 => {}
                count => {
                    into.advance(count);
                    return Poll::Ready(Ok(()));
                }
            }
            // Bytes behind the record may be another's: those of a pipe.
            let mut room = ReadBuf::new(opener.room_of_record());
            ready!(Pin::new(&mut connection.stream).poll_read(context, &mut room))?;
            match room.filled().len() {
                0 => return Poll::Ready(Ok(())), // the end
                count => opener.received(count),
            }
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let connection = self.get_mut();
        if connection.seal.is_none() {
            return Pin::new(&mut connection.stream).poll_write(context, bytes);
        }
        ready!(connection.poll_sealed(context))?;
        if let Some(seal) = &mut connection.seal {
            seal.sealer.seal(bytes, &mut connection.sealed)?;
        }
        // What does not fit into the socket is written by the next call, or by a flush.
        if let Poll::Ready(Err(error)) = connection.poll_sealed(context) {
            return Poll::Ready(Err(error));
        }
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let connection = self.get_mut();
        ready!(connection.poll_sealed(context))?;
        Pin::new(&mut connection.stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let connection = self.get_mut();
        ready!(connection.poll_sealed(context))?;
        Pin::new(&mut connection.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::super::transport::seal::tests::both_ends;
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    /// The connecting and the accepting end of a TCP connection.
    pub async fn sockets() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let connect = TcpStream::connect(listener.local_addr().unwrap());
        let (connector, acceptor) = tokio::join!(connect, listener.accept());
        (connector.unwrap(), acceptor.unwrap().0)
    }

    #[test]
    fn bytes_come_back_in_both_directions_and_none_behind_them_is_taken() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            for is_sealed in [false, true] {
                let (one, other) = sockets().await;
                let seals = both_ends().map(|seal| is_sealed.then_some(seal));
                let [mut one, mut other] = {
                    let [first, second] = seals;
                    [Connection::new(one, first), Connection::new(other, second)]
                };
                // More than a socket takes at once.
                let bytes: Vec<u8> = (0..9_000_000_u32).map(|i| (i % 253) as u8).collect();
                let write = async {
                    one.write_all(&bytes).await?;
                    one.flush().await?;
                    let mut answer = [0; 5];
                    one.read_exact(&mut answer).await?;
                    io::Result::Ok(answer)
                };
                let read = async {
                    let mut read = vec![0; bytes.len()];
                    other.read_exact(&mut read).await?;
                    other.write_all(b"right").await?;
                    other.flush().await?;
                    io::Result::Ok(read == bytes)
                };
                let (answer, right) = tokio::join!(write, read);
                assert_eq!((answer.unwrap(), right.unwrap()), (*b"right", true), "{is_sealed}");

                // A message of a connection, and plain bytes of a pipe right behind it.
                one.write_all(b"over").await.unwrap();
                one.flush().await.unwrap();
                let (mut socket, _) = one.into_parts();
                socket.write_all(b"bell").await.unwrap();
                let mut message = [0; 4];
                other.read_exact(&mut message).await.unwrap();
                let (mut socket, _) = other.into_parts();
                let mut bell = [0; 4];
                socket.read_exact(&mut bell).await.unwrap();
                assert_eq!((&message, &bell), (b"over", b"bell"), "{is_sealed}");
            }
        });
    }
}
