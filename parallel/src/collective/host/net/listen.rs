//! The listening side of a rank: lets in whoever knows the secret, and keeps connections until somebody
//! asks for them.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::{sleep, timeout};

use super::auth::Secret;
use super::frame::{self, Purpose};

/// How long a connection may take to prove itself.
const PROOF: Duration = Duration::from_secs(5);

/// Connections that may be at it at once. One more, and the oldest is dropped: a rank needs a moment only, and
/// tries again.
const STRANGERS: usize = 128;

/// A rank that has come to rank 0.
pub struct Joined {
    /// Its number.
    pub rank: usize,
    /// How many ranks it believes in.
    pub size: usize,
    /// Where it listens.
    pub address: SocketAddr,
    /// The connection, for control.
    pub stream: TcpStream,
}

/// Connections of other members that wait for this rank to make the group.
#[derive(Default)]
pub struct PendingConnections {
    streams: Mutex<HashMap<(String, usize), TcpStream>>,
    changed: Notify,
}

impl PendingConnections {
    /// Waits for the connection of world rank `rank` for a group.
    pub async fn take(&self, group: &str, rank: usize) -> TcpStream {
        let key = (group.to_string(), rank);
        loop {
            let changed = self.changed.notified(); // from here on nothing is missed
            if let Some(stream) = self.streams().remove(&key) {
                return stream;
            }
            changed.await;
        }
    }

    fn park(&self, group: String, rank: usize, stream: TcpStream) {
        self.streams().insert((group, rank), stream);
        self.changed.notify_waiters();
    }

    fn streams(&self) -> std::sync::MutexGuard<'_, HashMap<(String, usize), TcpStream>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Accepts connections for ever. Strangers are dropped and disturb nobody.
pub async fn listen(
    listener: TcpListener,
    secret: Secret,
    pending: Arc<PendingConnections>,
    joined: Option<UnboundedSender<Joined>>,
) {
    let mut strangers: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let Ok((mut stream, address)) = listener.accept().await else {
            // Out of file descriptors, for example: it may pass.
            sleep(Duration::from_millis(50)).await;
            continue;
        };
        strangers.retain(|stranger| !stranger.is_finished());
        if strangers.len() == STRANGERS
            && let Some(oldest) = strangers.pop_front()
        {
            oldest.abort();
        }
        let (secret, pending, joined) = (secret.clone(), pending.clone(), joined.clone());
        let stranger = spawn_local(async move {
            if let Ok(Ok(())) = timeout(PROOF, secret.accept(&mut stream)).await {
                // No stranger any more.
                spawn_local(timeout(PROOF, admit(stream, address, pending, joined)));
            }
        });
        strangers.push_back(stranger.abort_handle());
    }
}

async fn admit(
    mut stream: TcpStream,
    address: SocketAddr,
    pending: Arc<PendingConnections>,
    joined: Option<UnboundedSender<Joined>>,
) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    match (frame::read(&mut stream).await?, joined) {
        (Purpose::Pipe { group, rank }, _) => pending.park(group, rank, stream),
        (Purpose::Join { rank, size, port }, Some(joined)) => {
            // An IPv6 socket takes IPv4 connections too.
            let address = SocketAddr::new(address.ip().to_canonical(), port);
            let _ = joined.send(Joined { rank, size, address, stream });
        }
        // Only rank 0 is joined.
        (Purpose::Join { .. }, None) => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;
    use tokio::io::AsyncReadExt;
    use tokio::task::LocalSet;

    #[test]
    fn silent_connections_are_dropped_and_keep_nobody_out() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        LocalSet::new().block_on(&runtime, async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let (secret, pending) =
                (Secret::new(Some("sesame")), Arc::new(PendingConnections::default()));
            spawn_local(listen(listener, secret.clone(), pending.clone(), None));
            let start = Instant::now();
            let mut silent = Vec::new();
            for _ in 0..STRANGERS + 10 {
                silent.push(TcpStream::connect(address).await.unwrap());
            }
            let mut rank = TcpStream::connect(address).await.unwrap();
            secret.connect(&mut rank).await.unwrap();
            let purpose = Purpose::Pipe { group: "dp".to_string(), rank: 3 };
            frame::write(&mut rank, &purpose).await.unwrap();
            pending.take("dp", 3).await;
            assert!(start.elapsed() < PROOF, "let in after {:?}", start.elapsed());
            // The oldest were dropped at once, the newest has had its time.
            assert_eq!(silent[0].read(&mut [0]).await.unwrap_or(0), 0);
            assert!(start.elapsed() < PROOF, "dropped after {:?}", start.elapsed());
            let newest = silent.last_mut().unwrap();
            assert_eq!(newest.read(&mut [0]).await.unwrap_or(0), 0);
            let took = start.elapsed();
            assert!((PROOF..PROOF * 3).contains(&took), "dropped after {took:?}");
        });
    }
}
