//! A connection of a simulated network: bytes arrive in order, late, or never.

use std::future::Future;
use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf, split};
use tokio::task::spawn_local;
use tokio::time::{Instant, Sleep, sleep_until};

use super::network::{Life, Wires};
use super::wire::{Packet, Wire};
use crate::collective::host::transport::channel::{RecvChannelKind, SendChannelKind};
use crate::collective::host::transport::connect::Pipes;
use crate::collective::host::transport::local::{self, LocalReader, LocalWriter};

/// Bytes under way in one direction, at most.
const CAPACITY: usize = 64 << 10;

/// One end of a connection.
pub struct SimulatedStream {
    network: Wires,
    wire: Arc<Mutex<Wire>>,
    /// 0 at the end that has connected, 1 at the other.
    side: usize,
    is_kept_alive: Mutex<bool>,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl SimulatedStream {
    /// Both ends of a new connection.
    pub fn new(network: &Wires, processes: [usize; 2]) -> [SimulatedStream; 2] {
        let wire = Arc::new(Mutex::new(Wire::new(processes)));
        let mut state = network.state();
        state.wires.push(Arc::downgrade(&wire));
        state.volume.connections += 1;
        [0, 1].map(|side| SimulatedStream {
            network: network.clone(),
            wire: wire.clone(),
            side,
            is_kept_alive: Mutex::new(false),
            sleep: None,
        })
    }

    /// Notices within half a minute when nothing comes any more.
    pub fn keep_alive(&self) {
        *self.is_kept_alive.lock().unwrap() = true;
    }

    /// Pipes of a group over this connection.
    pub fn pipes(self) -> Pipes {
        let ((to, sent), (received, from)) = (local::pipe(), local::pipe());
        spawn_local(relay(self, sent, received));
        (SendChannelKind::Local(to), RecvChannelKind::Local(from))
    }

    fn wire(&self) -> MutexGuard<'_, Wire> {
        self.wire.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This process and the other.
    fn ends(&self) -> (usize, usize) {
        let [first, second] = self.wire().processes;
        if self.side == 0 { (first, second) } else { (second, first) }
    }

    /// Polls the wire again at a moment.
    fn look_again(&mut self, context: &mut Context<'_>, at: Instant) {
        let sleep = self.sleep.insert(Box::pin(sleep_until(at)));
        if sleep.as_mut().poll(context).is_ready() {
            context.waker().wake_by_ref();
        }
    }
}

impl AsyncRead for SimulatedStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let (stream, now) = (self.get_mut(), Instant::now());
        let (own, other) = stream.ends();
        let is_kept_alive = *stream.is_kept_alive.lock().unwrap();
        let given_up = is_kept_alive.then(|| stream.network.state().given_up(own, other)).flatten();
        let next = {
            let wire = &mut *stream.wire();
            if wire.is_reset {
                return Poll::Ready(Err(ErrorKind::ConnectionReset.into()));
            }
            let lane = &mut wire.lanes[1 - stream.side];
            let next = match (lane.packets.front_mut(), lane.ended) {
                (Some(packet), _) if packet.at.is_some_and(|at| at <= now) => {
                    let count = into.remaining().min(packet.bytes.len() - packet.read);
                    into.put_slice(&packet.bytes[packet.read..][..count]);
                    packet.read += count;
                    if packet.read == packet.bytes.len() {
                        lane.held -= packet.bytes.len();
                        lane.packets.pop_front();
                        lane.writer.take().into_iter().for_each(Waker::wake);
                    }
                    return Poll::Ready(Ok(()));
                }
                (Some(packet), _) => packet.at,
                (None, Some(Some(end))) if end <= now => return Poll::Ready(Ok(())),
                (None, ended) => ended.flatten(),
            };
            lane.reader = Some(context.waker().clone());
            next
        };
        match (next, given_up) {
            (_, Some(end)) if end <= now => return Poll::Ready(Err(ErrorKind::TimedOut.into())),
            (None, None) => {}
            (one, other) => {
                let at = one.into_iter().chain(other).min().unwrap_or(now);
                stream.look_again(context, at);
            }
        }
        Poll::Pending
    }
}

impl AsyncWrite for SimulatedStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let (stream, now) = (self.get_mut(), Instant::now());
        let (own, other) = stream.ends();
        let at = {
            let state = &mut *stream.network.state();
            state.written(own, bytes.len());
            if matches!(state.processes[own].life, Life::Killed | Life::Off(_)) {
                return Poll::Ready(Ok(bytes.len())); // it has not been written
            }
            state.arrival(own, other)
        };
        let wire = &mut *stream.wire();
        let lane = &mut wire.lanes[stream.side];
        if wire.is_reset || lane.unread.flatten().is_some_and(|learnt| learnt <= now) {
            return Poll::Ready(Err(ErrorKind::BrokenPipe.into()));
        }
        let count = bytes.len().min(CAPACITY - lane.held);
        if count == 0 {
            lane.writer = Some(context.waker().clone());
            return Poll::Pending;
        }
        let at = lane.after_all(at);
        lane.packets.push_back(Packet { at, bytes: bytes[..count].to_vec(), read: 0 });
        lane.held += count;
        lane.reader.take().into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.end(false);
        Poll::Ready(Ok(()))
    }
}

impl SimulatedStream {
    /// Tells the other end that nothing is written any more and, if it `is_closed`, that nothing is read.
    fn end(&self, is_closed: bool) {
        let (own, other) = self.ends();
        let at = {
            let state = &mut *self.network.state();
            // The system of a machine that is off tells nothing.
            if matches!(state.processes[own].life, Life::Off(_)) {
                None
            } else {
                state.arrival(own, other)
            }
        };
        let wire = &mut *self.wire();
        let outgoing = &mut wire.lanes[self.side];
        if outgoing.ended.is_none() {
            outgoing.ended = Some(outgoing.after_all(at));
        }
        if is_closed {
            wire.lanes[1 - self.side].unread = Some(at);
        }
        wire.wake();
    }
}

impl Drop for SimulatedStream {
    fn drop(&mut self) {
        self.end(true);
    }
}

/// Carries the pieces of a group's pipes over a connection, each behind its length.
async fn relay(stream: SimulatedStream, mut sent: LocalReader, mut received: LocalWriter) {
    let (mut reader, mut writer) = split(stream);
    let outgoing = async {
        while let Some(bytes) = sent.next_piece().await {
            let framed = [&(bytes.len() as u32).to_le_bytes()[..], bytes].concat();
            sent.release();
            writer.write_all(&framed).await?;
        }
        io::Result::Ok(())
    };
    let incoming = async {
        loop {
            let len = reader.read_u32_le().await? as usize;
            let gone = |_| io::Error::from(ErrorKind::BrokenPipe);
            reader.read_exact(received.space(len).await.map_err(gone)?).await?;
            received.commit().map_err(gone)?;
        }
    };
    let _: io::Result<()> = tokio::select! {
        biased;
        ended = outgoing => ended,
        ended = incoming => ended,
    };
}
