//! The listening side of a rank: admits connections that prove to know the secret, and keeps them until they are taken.

use std::collections::VecDeque;
use std::fmt;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::{sleep, timeout};

use super::super::runtime::awake::awake_for;
use super::super::runtime::world_health::WorldHealth;
use super::super::transport::connect::GroupId;
use super::auth::Secret;
use super::config::Transport;
use super::connection::Connection;
use super::connections::{Connections, Decision};
use super::control::Control;
use super::frame::{self, Admission, Introduction, Purpose};
use super::network::Listener;
use super::pipes::pipes;
use crate::descriptors::{self, explained};

/// Time within which a connection must authenticate.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Time within which a rank that has authenticated must have made pipes: it may share a core with many others.
const PIPE_TIMEOUT: Duration = Duration::from_secs(60);

/// Connections that may be at it at once at least. One more, and the oldest is dropped: a rank needs a moment only, and
/// tries again. Where the limit of open files allows it, all ranks of a larger job may be.
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
    /// The connection, over which it hears where its parent is.
    pub stream: Connection,
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
    /// The transports that may be used.
    pub transport: Transport,
    /// The connections of groups go here.
    pub connections: Arc<Connections>,
    /// The children of this rank go here.
    pub control: Arc<Control>,
    /// All other ranks go here, on rank 0.
    pub arrivals: Option<UnboundedSender<Arrival>>,
    /// Whether the world has failed.
    pub shared: Arc<WorldHealth>,
}

/// Accepts connections for ever. Strangers are dropped and disturb no rank.
///
/// A rank that waits for others and has no descriptor for their connections ends the world.
pub async fn listen(listener: Listener, rank: usize, entrance: Entrance) {
    let mut strangers: VecDeque<AbortHandle> = VecDeque::new();
    let size = entrance.control.size();
    let most = MAX_UNAUTHENTICATED.max(size.min(descriptors::spare(size)));
    loop {
        let (stream, address) = match listener.accept().await.map_err(explained) {
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
                        entrance.no_descriptors(rank, &error);
                    }
                    None => {} // nobody is kept waiting
                }
                continue;
            }
        };
        strangers.retain(|stranger| !stranger.is_finished());
        if strangers.len() >= most
            && let Some(oldest) = strangers.pop_front()
        {
            oldest.abort();
        }
        let entrance = entrance.clone();
        let stranger = spawn_local(async move {
            match timeout(HANDSHAKE_TIMEOUT, entrance.secret.accept(stream)).await {
                // No stranger any more.
                Ok(Ok(connection)) => {
                    drop(spawn_local(entrance.admit(connection, address, rank)));
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
    async fn admit(
        self,
        mut stream: Connection,
        address: SocketAddr,
        own: usize,
    ) -> std::io::Result<()> {
        let introduction = timeout(HANDSHAKE_TIMEOUT, frame::read(&mut stream));
        let Introduction { job_id, rank, incarnation, purpose } = introduction.await??;
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
                (Purpose::Join { .. }, Some(_)) => None,
                // A rank may come to its parent before that one has heard from rank 0, if it ever does.
                _ => tokio::select! {
                    biased;
                    ours = self.control.incarnation() => (incarnation != ours).then(|| format!(
                        "rank {rank} belongs to another start of the job than rank {own} here: end what is left of \
                         the earlier one"
                    )),
                    () = self.shared.failed() => self.shared.check().err().map(|reason| reason.to_string()),
                },
            }
        };
        if let Some(refusal) = refusal {
            return frame::write(&mut stream, &Admission::Refused(refusal)).await.map(drop);
        }
        match purpose {
            Purpose::Pipe { group } => self.admit_pipe(group, rank, own, stream).await,
            Purpose::Child => {
                frame::write(&mut stream, &Admission::Admitted).await?;
                self.control.attach(rank, stream).map_err(std::io::Error::other)
            }
            Purpose::Join { size, port } => {
                frame::write(&mut stream, &Admission::Admitted).await?;
                // An IPv6 socket takes IPv4 connections too.
                let address = SocketAddr::new(address.ip().to_canonical(), port);
                self.tell(Arrival::Joined(Joined { rank, size, address, stream }));
                Ok(())
            }
        }
    }

    /// Makes pipes with a member of a group, whether or not this rank has made the group.
    async fn admit_pipe(
        self,
        group: GroupId,
        rank: usize,
        own: usize,
        mut stream: Connection,
    ) -> std::io::Result<()> {
        let answer = match self.connections.admit(group, rank) {
            Decision::Admitted => Admission::Admitted,
            Decision::Crossed => {
                return frame::write(&mut stream, &Admission::Crossed).await.map(drop);
            }
            Decision::Left => return frame::write(&mut stream, &Admission::Left).await.map(drop),
            Decision::Twice => return Ok(()), // it tries again if it has lost the first
        };
        // The other side may have made its pipes, and does not notice a pause of this process.
        let made = awake_for(PIPE_TIMEOUT, async {
            frame::write(&mut stream, &answer).await?;
            pipes(stream, self.transport).await
        });
        match made.await.unwrap_or(Err(ErrorKind::TimedOut.into())) {
            Ok(pipes) => self.connections.made(group, rank, pipes),
            Err(error) => {
                self.connections.failed(group, rank, false);
                if error.kind() == ErrorKind::QuotaExceeded {
                    self.no_descriptors(own, &error);
                }
            }
        }
        Ok(())
    }

    fn no_descriptors(&self, own: usize, error: &std::io::Error) {
        self.shared.fail(&format!("rank {own} cannot let others in: {error}"));
    }

    fn awaits_others(&self) -> bool {
        self.connections.is_awaited()
            || self.control.awaits_children()
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
    use super::super::config::Encryption;
    use super::super::simulation::in_calm_networks;
    use super::*;
    use tokio::io::AsyncReadExt;
    use tokio::net::{TcpListener, TcpStream};
    use tokio::task::LocalSet;
    use tokio::time::Instant;

    fn entrance(secret: &Secret, control: Arc<Control>, shared: Arc<WorldHealth>) -> Entrance {
        Entrance {
            secret: secret.clone(),
            job_id: None,
            transport: Transport::Tcp,
            connections: Arc::new(Connections::new(0)),
            control,
            arrivals: None,
            shared,
        }
    }

    /// A rank without descriptors for its children's connections says so.
    #[test]
    fn a_parent_awaits_its_children() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        LocalSet::new().block_on(&runtime, async {
            let (secret, shared) = (Secret::new(None, Encryption::Never), WorldHealth::new());
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let control = Control::start(1, 7, &shared);
            let parent = entrance(&secret, control.clone(), shared.clone());
            for (child, awaits) in [(5, true), (6, false)] {
                assert!(parent.awaits_others(), "rank {child} has not come");
                let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
                control.attach(child, Connection::new(stream, None)).unwrap();
                assert_eq!(parent.awaits_others(), awaits, "rank {child} has come");
            }
            let leaf = Control::start(5, 7, &shared);
            assert!(!entrance(&secret, leaf, shared).awaits_others());
        });
    }

    #[test]
    fn silent_connections_are_dropped_and_keep_nobody_out() {
        in_calm_networks(async |[own, others]| {
            let address = SocketAddr::from(([127, 0, 0, 1], 4000));
            let listener = own.listen(address).await.unwrap();
            let (secret, shared) =
                (Secret::new(Some("sesame"), Encryption::Always), WorldHealth::new());
            let control = Control::start(0, 4, &shared);
            control.incarnate(5);
            let entrance = entrance(&secret, control, shared);
            spawn_local(listen(listener, 0, entrance));
            let start = Instant::now();
            let mut silent = Vec::new();
            for _ in 0..MAX_UNAUTHENTICATED + 10 {
                silent.push(others.connect(address).await.unwrap());
            }
            let rank = others.connect(address).await.unwrap();
            let mut rank = secret.connect(rank).await.unwrap();
            let purpose = Purpose::Pipe { group: 7 };
            let introduction =
                Introduction { job_id: None, rank: 3, incarnation: Some(5), purpose };
            frame::write(&mut rank, &introduction).await.unwrap();
            let answer: Admission = frame::read(&mut rank).await.unwrap();
            assert!(matches!(answer, Admission::Admitted));
            // A member of another job's group is told so, and one of an earlier start of the same job.
            let earlier = Introduction { incarnation: Some(4), ..introduction.clone() };
            let child = Introduction { purpose: Purpose::Child, ..earlier.clone() };
            let other_job = Introduction { job_id: Some("B".to_string()), ..introduction };
            let other_start = "rank 3 belongs to another start of the job";
            for (other, want) in
                [(other_job, "job 'B'"), (earlier, other_start), (child, other_start)]
            {
                let stream = others.connect(address).await.unwrap();
                let mut stream = secret.connect(stream).await.unwrap();
                frame::write(&mut stream, &other).await.unwrap();
                let answer: Admission = frame::read(&mut stream).await.unwrap();
                assert!(matches!(answer, Admission::Refused(why) if why.contains(want)), "{want}");
            }
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
