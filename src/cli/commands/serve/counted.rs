//! A connection that counts what its client takes.

use std::io::{IoSlice, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// The bytes that were written to a client.
#[derive(Default)]
pub struct Written {
    bytes: AtomicU64,
    waits: AtomicBool,
}

impl Written {
    /// Their number.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Whether more are there, which the client does not take yet.
    pub fn waits(&self) -> bool {
        self.waits.load(Relaxed)
    }

    fn note(&self, written: &Poll<Result<usize>>) {
        self.waits.store(written.is_pending(), Relaxed);
        if let Poll::Ready(Ok(bytes)) = written {
            self.bytes.fetch_add(*bytes as u64, Relaxed);
        }
    }
}

/// A connection whose written bytes are counted.
pub struct CountedStream {
    pub stream: TcpStream,
    pub written: Arc<Written>,
}

impl AsyncRead for CountedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context,
        buffer: &mut ReadBuf,
    ) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for CountedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context,
        data: &[u8],
    ) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, data);
        self.written.note(&written);
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context,
        data: &[IoSlice],
    ) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, data);
        self.written.note(&written);
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
