//! The listening side of a rank: lets in whoever knows the secret, and keeps connections until somebody
//! asks for them.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{Notify, Semaphore};
use tokio::time::{sleep, timeout};

use super::auth::Secret;
use super::frame::{self, Purpose};

/// How long a connection may take to prove itself.
pub const PROOF: Duration = Duration::from_secs(5);

/// Connections that may be at it at once; more are dropped, and tried again by ranks.
const STRANGERS: usize = 256;

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
pub struct Parked {
    streams: Mutex<HashMap<(String, usize), TcpStream>>,
    changed: Notify,
}

impl Parked {
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
    parked: Arc<Parked>,
    joined: Option<UnboundedSender<Joined>>,
) {
    let strangers = Arc::new(Semaphore::new(STRANGERS));
    loop {
        let Ok((stream, address)) = listener.accept().await else {
            // Out of file descriptors, for example: it may pass.
            sleep(Duration::from_millis(50)).await;
            continue;
        };
        let Ok(permit) = strangers.clone().try_acquire_owned() else { continue };
        let (secret, parked, joined) = (secret.clone(), parked.clone(), joined.clone());
        tokio::task::spawn_local(async move {
            let _ = timeout(PROOF, admit(stream, address, &secret, &parked, joined)).await;
            drop(permit);
        });
    }
}

async fn admit(
    mut stream: TcpStream,
    address: SocketAddr,
    secret: &Secret,
    parked: &Parked,
    joined: Option<UnboundedSender<Joined>>,
) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    secret.accept(&mut stream).await?;
    match (frame::read(&mut stream).await?, joined) {
        (Purpose::Pipe { group, rank }, _) => parked.park(group, rank, stream),
        (Purpose::Join { rank, size, port }, Some(joined)) => {
            let address = SocketAddr::new(address.ip(), port);
            let _ = joined.send(Joined { rank, size, address, stream });
        }
        // Only rank 0 is joined.
        (Purpose::Join { .. }, None) => {}
    }
    Ok(())
}
