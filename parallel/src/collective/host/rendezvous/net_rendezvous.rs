//! Channels between the members of a group: the rank with the higher number connects.

use ferrotron_tensor::{Error, Result};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::super::runtime::progress::ProgressThread;
use super::super::runtime::rendezvous::Rendezvous;
use super::super::runtime::world_health::{Entry, Reply, WorldHealth};
use super::super::silence::{blame, list};
use super::super::transport::channel::{
    RecvChannel, RecvChannelKind, SendChannel, SendChannelKind,
};
use super::super::transport::peer_channels::PeerChannels;
use super::super::transport::{shm, tcp};
use super::auth::Secret;
use super::config::Transport;
use super::control::Control;
use super::frame::{self, Introduction, Purpose};
use super::join::{connect, deadline};
use super::listen::PendingConnections;

/// Everything needed to connect ranks.
#[derive(Clone)]
pub struct NetRendezvous {
    /// This rank.
    pub rank: usize,
    /// Addresses at which ranks listen.
    pub addresses: Arc<[SocketAddr]>,
    /// Proves that this rank belongs to the job.
    pub secret: Secret,
    /// The job's id.
    pub job_id: Option<String>,
    /// The transports that may be used.
    pub transport: Transport,
    /// Longest time that a group may take to form.
    pub timeout: Duration,
    /// Connections that others have made.
    pub pending: Arc<PendingConnections>,
    /// Messages.
    pub control: Arc<Control>,
    /// Whether the world has failed.
    pub shared: Arc<WorldHealth>,
}

type Pipes = (SendChannelKind, RecvChannelKind);

impl Rendezvous for NetRendezvous {
    fn links(
        &self,
        progress: &ProgressThread,
        id: &Arc<str>,
        own: usize,
        ranks: &[usize],
    ) -> Result<PeerChannels> {
        let (sender, receiver) = mpsc::channel();
        let (meeting, id, ranks) = (self.clone(), id.clone(), ranks.to_vec());
        progress.serve(move || async move {
            let links = meeting.make(&id, own, &ranks).await;
            if let Err(error) = &links {
                meeting.shared.fail(&error.to_string());
            }
            let _ = sender.send(links);
        });
        let links = receiver.recv().map_err(|_| failed("the progress thread has ended".into()))?;
        self.shared.check()?; // one error for all ranks
        links
    }

    fn ask<'a>(
        &'a self,
        group: &'a Arc<str>,
        questions: &'a [(usize, Entry)],
    ) -> Pin<Box<dyn Future<Output = Vec<Reply>> + 'a>> {
        Box::pin(self.control.ask(group, questions))
    }

    fn silent(&self) -> Pin<Box<dyn Future<Output = Vec<usize>> + '_>> {
        Box::pin(self.control.silent())
    }
}

impl NetRendezvous {
    async fn make(&self, id: &Arc<str>, own: usize, ranks: &[usize]) -> Result<PeerChannels> {
        let deadline = deadline(self.timeout);
        let mut pairs = JoinSet::new();
        for (member, &rank) in ranks.iter().enumerate().filter(|&(member, _)| member != own) {
            let (meeting, id) = (self.clone(), id.clone());
            pairs.spawn_local(async move {
                (member, timeout_at(deadline, meeting.pair(&id, rank, deadline)).await)
            });
        }
        let mut links = PeerChannels::empty(own, ranks);
        let mut missing = Vec::new();
        loop {
            let next = tokio::select! {
                next = pairs.join_next() => next,
                () = self.shared.failed() => return Err(failed("the world has failed".into())),
            };
            let Some(pair) = next else { break };
            let (member, pipes) = pair.map_err(|panic| failed(panic.to_string()))?;
            let rank = ranks[member];
            match pipes {
                Ok(Ok((outgoing, incoming))) => {
                    links.outgoing[member] = Some(SendChannel::new(rank, outgoing));
                    links.incoming[member] = Some(RecvChannel::new(rank, incoming));
                }
                Ok(Err(error)) => {
                    // Why a rank has gone is better to know than that it has.
                    let silent = match error.kind() {
                        io::ErrorKind::QuotaExceeded => None,
                        _ => self.blame_silent().await,
                    };
                    let why = silent.map_or(String::new(), |silent| format!("{silent}; "));
                    let me = self.rank;
                    return Err(failed(format!(
                        "{why}{id}: rank {me} has no pipe to rank {rank}: {error}"
                    )));
                }
                Err(_) => missing.push(rank),
            }
        }
        if missing.is_empty() {
            return Ok(links);
        }
        missing.sort_unstable();
        let (limit, me) = (self.timeout, self.rank);
        if let Some(silent) = self.blame_silent().await {
            return Err(failed(format!(
                "{id} was not made within {limit:?} of rank {me}, {silent}"
            )));
        }
        let verb = if missing.len() == 1 { "has" } else { "have" };
        let missing = list(missing.into_iter());
        Err(failed(format!("{missing} {verb} not made {id} within {limit:?} of rank {me}")))
    }

    /// Names ranks that do not answer, which is why others wait too, unless the world fails meanwhile for another reason.
    async fn blame_silent(&self) -> Option<String> {
        tokio::select! {
            biased;
            () = self.shared.failed() => None,
            silent = self.control.silent() => blame(&silent),
        }
    }

    /// The pipes to and from one other member.
    async fn pair(&self, id: &str, rank: usize, deadline: Instant) -> io::Result<Pipes> {
        let mut stream = if self.rank > rank {
            let introduction = Introduction {
                job_id: self.job_id.clone(),
                rank: self.rank,
                purpose: Purpose::Pipe { group: id.to_string() },
            };
            let address = self.addresses[rank];
            connect(rank, address, &self.secret, &introduction, deadline).await?
        } else {
            self.pending.take(id, rank).await
        };
        if let Some(pipes) = self.share_memory(&mut stream).await? {
            return Ok(pipes(stream));
        }
        let (writer, reader, task) = tcp::pipes(stream);
        tokio::task::spawn_local(task);
        Ok((SendChannelKind::Tcp(writer), RecvChannelKind::Tcp(reader)))
    }

    /// Finds out, together with the other end, whether memory can be shared.
    async fn share_memory(
        &self,
        stream: &mut TcpStream,
    ) -> io::Result<Option<impl FnOnce(TcpStream) -> Pipes + use<>>> {
        let mine = match self.transport {
            Transport::Auto => shm::offer()?,
            Transport::Tcp => None,
        };
        frame::write(stream, &mine.as_ref().map(|(offer, _)| offer)).await?;
        let theirs: Option<shm::Offer> = frame::read(stream).await?;
        let (Some((offer, offered)), Some(theirs)) = (mine, theirs) else { return Ok(None) };
        let (verdict, ring) = shm::accept(&offer, &theirs)?;
        frame::write(stream, &verdict).await?;
        let other: shm::Verdict = frame::read(stream).await?;
        let Some(ring) = ring.filter(|_| other.maps) else { return Ok(None) };
        Ok(Some(move |stream| {
            let (writer, reader) = shm::pipes(offered, ring, theirs.pid(), other.reads, stream);
            (SendChannelKind::Shared(writer), RecvChannelKind::Shared(reader))
        }))
    }
}

fn failed(what: String) -> Error {
    Error::communication("group", what)
}
