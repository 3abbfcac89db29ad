//! The listening side of a rank: admits connections that prove to know the secret, and keeps them until they are taken.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::{sleep, timeout};

use super::super::runtime::world_health::WorldHealth;
use super::auth::Secret;
use super::frame::{self, Admission, Introduction, Purpose};
use crate::descriptors::explained;

/// Time within which a connection must authenticate.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Connections that may be at it at once. One more, and the oldest is dropped: a rank needs a moment only, and
/// tries again.
const MAX_UNAUTHENTICATED: usize = 128;

/// Pause after a connection that could not be accepted.
const PAUSE: Duration = Duration::from_millis(10);

/// A rank that has come to rank 0.
pub struct Joined {
    /// Its number.
    pub rank: usize,
    /// Number of ranks that it was told.
    pub size: usize,
    /// Address at which it listens.
    pub address: SocketAddr,
    /// The connection, for control.
    pub stream: TcpStream,
}

/// A process that has come to rank 0 but cannot belong to the job.
#[derive(Debug, PartialEq, Eq)]
pub struct TurnedAway {
    /// The machine that it has come from.
    pub address: IpAddr,
    /// The reason.
    pub why: String,
}

impl fmt::Display for TurnedAway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.address, self.why)
    }
}

/// News for rank 0 while it waits for the others.
pub enum Arrival {
    /// A rank has come.
    Joined(Joined),
    /// A process was turned away.
    TurnedAway(TurnedAway),
}

/// The rules by which connections are accepted and passed on.
#[derive(Clone)]
pub struct Entrance {
    /// The job's secret.
    pub secret: Secret,
    /// The job's id.
    pub job_id: Option<String>,
    /// The connections of groups go here.
    pub pending: Arc<PendingConnections>,
    /// The other ranks go here, on rank 0.
    pub arrivals: Option<UnboundedSender<Arrival>>,
}

/// Connections of other members that wait for this rank to make the group.
#[derive(Default)]
pub struct PendingConnections {
    /// Connections that are waited for now.
    awaited: AtomicUsize,
    streams: Mutex<HashMap<(String, usize), TcpStream>>,
    changed: Notify,
}

/// Counts as long as it lives: a wait may be given up.
struct Counted<'a>(&'a AtomicUsize);

impl Counted<'_> {
    fn new(count: &AtomicUsize) -> Counted<'_> {
        count.fetch_add(1, Ordering::Relaxed);
        Counted(count)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl PendingConnections {
    /// Waits for the connection of world rank `rank` for a group.
    pub async fn take(&self, group: &str, rank: usize) -> TcpStream {
        let key = (group.to_string(), rank);
        let _counted = Counted::new(&self.awaited);
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

/// Accepts connections for ever. Strangers are dropped and disturb no rank.
///
/// A rank that waits for others and has no descriptor for their connections ends the world.
pub async fn listen(
    listener: TcpListener,
    rank: usize,
    entrance: Entrance,
    shared: Arc<WorldHealth>,
) {
    let mut strangers: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let (mut stream, address) = match listener.accept().await.map_err(explained) {
            Ok(accepted) => accepted,
            Err(error) => {
                sleep(PAUSE).await;
                strangers.retain(|stranger| !stranger.is_finished());
                if error.kind() != ErrorKind::QuotaExceeded {
                    continue;
                }
                // No stranger may keep a rank out by taking what it needs.
                match strangers.pop_front() {
                    Some(oldest) => oldest.abort(),
                    None if entrance.awaits_others() => {
                        shared.fail(&format!("rank {rank} cannot let others in: {error}"));
                    }
                    None => {} // nobody is kept waiting
                }
                continue;
            }
        };
        strangers.retain(|stranger| !stranger.is_finished());
        if strangers.len() == MAX_UNAUTHENTICATED
            && let Some(oldest) = strangers.pop_front()
        {
            oldest.abort();
        }
        let entrance = entrance.clone();
        let stranger = spawn_local(async move {
            match timeout(HANDSHAKE_TIMEOUT, entrance.secret.accept(&mut stream)).await {
                // No stranger any more.
                Ok(Ok(())) => {
                    drop(spawn_local(timeout(HANDSHAKE_TIMEOUT, entrance.admit(stream, address))))
                }
                Ok(Err(error)) if error.kind() == ErrorKind::PermissionDenied => {
                    entrance.turned_away(address, error.to_string());
                }
                Ok(Err(_)) | Err(_) => {}
            }
        });
        strangers.push_back(stranger.abort_handle());
    }
}

impl Entrance {
    async fn admit(self, mut stream: TcpStream, address: SocketAddr) -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        let Introduction { job_id, rank, purpose } = frame::read(&mut stream).await?;
        let named = |id: &Option<String>| match id {
            Some(id) => format!("job '{id}'"),
            None => "a job without an id".to_string(),
        };
        let refusal = if job_id != self.job_id {
            let theirs = named(&job_id);
            self.turned_away(address, format!("it belongs to {theirs}"));
            Some(format!(
                "the port is that of {}, this rank belongs to {theirs}: give one of them another \
                 --rendezvous-port",
                named(&self.job_id)
            ))
        } else {
            match (&purpose, &self.arrivals) {
                (Purpose::Join { .. }, Some(arrivals)) if arrivals.is_closed() => Some(
                    "a job has all its ranks there already: give another --rendezvous-port".into(),
                ),
                (Purpose::Join { .. }, None) => Some("rank 0 listens elsewhere".into()),
                _ => None,
            }
        };
        if let Some(refusal) = refusal {
            return frame::write(&mut stream, &Admission::Refused(refusal)).await;
        }
        frame::write(&mut stream, &Admission::Admitted).await?;
        match purpose {
            Purpose::Pipe { group } => self.pending.park(group, rank, stream),
            Purpose::Join { size, port } => {
                // An IPv6 socket takes IPv4 connections too.
                let address = SocketAddr::new(address.ip().to_canonical(), port);
                self.tell(Arrival::Joined(Joined { rank, size, address, stream }));
            }
        }
        Ok(())
    }

    fn awaits_others(&self) -> bool {
        self.pending.awaited.load(Ordering::Relaxed) > 0
            || self.arrivals.as_ref().is_some_and(|arrivals| !arrivals.is_closed())
    }

    fn turned_away(&self, address: SocketAddr, why: String) {
        let address = address.ip().to_canonical();
        self.tell(Arrival::TurnedAway(TurnedAway { address, why }));
    }

    /// Tells rank 0, if it still waits for others.
    fn tell(&self, arrival: Arrival) {
        if let Some(arrivals) = &self.arrivals {
            let _ = arrivals.send(arrival);
        }
    }
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
            let entrance = Entrance {
                secret: secret.clone(),
                job_id: None,
                pending: pending.clone(),
                arrivals: None,
            };
            spawn_local(listen(listener, 0, entrance, WorldHealth::new()));
            let start = Instant::now();
            let mut silent = Vec::new();
            for _ in 0..MAX_UNAUTHENTICATED + 10 {
                silent.push(TcpStream::connect(address).await.unwrap());
            }
            let mut rank = TcpStream::connect(address).await.unwrap();
            secret.connect(&mut rank).await.unwrap();
            let purpose = Purpose::Pipe { group: "dp".to_string() };
            let introduction = Introduction { job_id: None, rank: 3, purpose };
            frame::write(&mut rank, &introduction).await.unwrap();
            pending.take("dp", 3).await;
            // A member of another job's group is told so.
            let mut other = TcpStream::connect(address).await.unwrap();
            secret.connect(&mut other).await.unwrap();
            let other_job = Introduction { job_id: Some("B".to_string()), ..introduction };
            frame::write(&mut other, &other_job).await.unwrap();
            let answer: Admission = frame::read(&mut other).await.unwrap();
            assert!(matches!(answer, Admission::Refused(why) if why.contains("job 'B'")));
            assert!(start.elapsed() < HANDSHAKE_TIMEOUT, "let in after {:?}", start.elapsed());
            // The oldest were dropped at once, the newest has had its time.
            assert_eq!(silent[0].read(&mut [0]).await.unwrap_or(0), 0);
            assert!(start.elapsed() < HANDSHAKE_TIMEOUT, "dropped after {:?}", start.elapsed());
            let newest = silent.last_mut().unwrap();
            assert_eq!(newest.read(&mut [0]).await.unwrap_or(0), 0);
            let took = start.elapsed();
            assert!(
                (HANDSHAKE_TIMEOUT..HANDSHAKE_TIMEOUT * 3).contains(&took),
                "dropped after {took:?}"
            );
        });
    }
}
