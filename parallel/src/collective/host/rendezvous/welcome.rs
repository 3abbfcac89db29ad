//! Rank 0's part of the meeting: tells all others where their parents in the tree listen.

use ferrotron_tensor::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::{Instant, timeout_at};

use super::super::runtime::world_health::WorldHealth;
use super::connect::{PAUSE, deadline};
use super::connection::Connection;
use super::control::Control;
use super::frame::{self, Admission};
use super::listen::{Arrival, Joined, TurnedAway};
use super::network::Network;
use crate::collective::tree;

/// Ranks, or processes that were turned away, that are named at most.
const NAMED: usize = 8;

/// Connections of ranks that wait for their parents at most: each takes a descriptor. Other ranks come again.
const MOST_WAITING: usize = 64;

/// Longest time after which a rank that was sent away comes again, on average.
pub const COME_AGAIN: Duration = Duration::from_secs(2);

/// The remedy where a rank may have come to the wrong job.
const ANOTHER_PORT: &str =
    "if this is the port of another job, give one of them another --rendezvous-port";

/// The ranks that have come to rank 0.
pub struct Welcome<'a> {
    arrivals: UnboundedReceiver<Arrival>,
    network: &'a Network,
    shared: &'a WorldHealth,
    control: &'a Arc<Control>,
    incarnation: u64,
    /// Ranks that have not come yet.
    missing: BTreeSet<usize>,
    /// Ranks whose parents have not come.
    waiting: BTreeMap<usize, Connection>,
    /// Such ranks that were told to come again.
    later: BTreeSet<usize>,
    turned_away: Vec<TurnedAway>,
}

impl<'a> Welcome<'a> {
    /// Nobody but rank 0 at address `own` has come yet.
    pub async fn new(
        own: SocketAddr,
        arrivals: UnboundedReceiver<Arrival>,
        network: &'a Network,
        shared: &'a WorldHealth,
        control: &'a Arc<Control>,
    ) -> Welcome<'a> {
        control.know(0, own);
        Welcome {
            arrivals,
            network,
            shared,
            control,
            incarnation: control.incarnation().await.unwrap_or_default(),
            missing: (1..control.size()).collect(),
            waiting: BTreeMap::new(),
            later: BTreeSet::new(),
            turned_away: Vec::new(),
        }
    }

    /// Waits until all have come, until `deadline`, which is `limit` after the start; and then, at most for `connecting`,
    /// until all have come to their parents.
    ///
    /// Errors, naming them, if some do not.
    pub async fn everybody(
        mut self,
        deadline: Instant,
        limit: Duration,
        connecting: Duration,
    ) -> Result<()> {
        while !self.missing.is_empty() {
            let arrival = tokio::select! {
                biased;
                arrival = timeout_at(deadline, self.arrivals.recv()) => arrival,
                () = self.shared.failed() => Ok(None),
            };
            match arrival {
                Ok(Some(arrival)) => self.take(arrival).await,
                Ok(None) | Err(_) => {
                    let why = self.failure(limit);
                    self.send_away(&why).await;
                    return Err(failed(why));
                }
            }
        }
        let (shared, control) = (self.shared, self.control);
        // Ranks that were sent away come again.
        tokio::select! {
            biased;
            met = all_connected(deadline, connecting, shared, control) => met?,
            () = self.serve() => {}
        }
        self.arrivals.close();
        while let Ok(arrival) = self.arrivals.try_recv() {
            if let Arrival::Joined(mut late) = arrival {
                let size = self.control.size();
                refuse(&mut late.stream, format!("all {size} ranks are here already")).await;
            }
        }
        Ok(())
    }

    /// Takes arrivals for ever.
    async fn serve(&mut self) {
        while let Some(arrival) = self.arrivals.recv().await {
            self.take(arrival).await;
        }
        std::future::pending::<()>().await; // nobody can come any more
    }

    async fn take(&mut self, arrival: Arrival) {
        match arrival {
            Arrival::Joined(new) => self.join(new).await,
            Arrival::TurnedAway(process) => {
                if self.turned_away.len() < NAMED && !self.turned_away.contains(&process) {
                    // At once: the process that started it may be waiting for it.
                    self.network.warn(&format!(
                        "rank 0: a process is turned away: {process}; {ANOTHER_PORT}"
                    ));
                    self.turned_away.push(process);
                }
            }
        }
    }

    async fn join(&mut self, new: Joined) {
        let Joined { rank, address, mut stream, .. } = new;
        let size = self.control.size();
        let comes_again = || self.control.place(rank) == Some(address);
        let refusal = if new.size != size {
            Some(format!("rank {rank} believes in {} ranks, rank 0 in {size}", new.size))
        } else if rank == 0 || rank >= size {
            Some(format!("there is no place for rank {rank} of {size}"))
        } else if self.missing.remove(&rank) || comes_again() {
            self.later.remove(&rank);
            None
        } else {
            Some(format!("rank {rank} is here already"))
        };
        if let Some(refusal) = refusal {
            return refuse(&mut stream, refusal).await;
        }
        self.control.know(rank, address);
        match tree::parent(rank).and_then(|parent| self.control.place(parent)) {
            Some(parent) => self.tell(&mut stream, parent).await,
            None if self.waiting.len() < MOST_WAITING => drop(self.waiting.insert(rank, stream)),
            None => {
                self.later.insert(rank);
                let _ = frame::write(&mut stream, &Admission::Later).await;
            }
        }
        for child in tree::children(rank, size) {
            if let Some(mut stream) = self.waiting.remove(&child) {
                self.tell(&mut stream, address).await;
            }
        }
    }

    /// Tells a rank where its parent listens. One that has gone meanwhile is missed by its parent.
    async fn tell(&self, stream: &mut Connection, address: SocketAddr) {
        let answer = Admission::Parent { address, incarnation: self.incarnation };
        let _ = frame::write(stream, &answer).await;
    }

    /// The reason why not all have come.
    fn failure(&self, limit: Duration) -> String {
        let (missing, size) = (&self.missing, self.control.size());
        let mut text = match self.shared.check() {
            Ok(()) => {
                let named: Vec<_> = missing.iter().take(NAMED).collect();
                let more = match missing.len() - named.len() {
                    0 => String::new(),
                    more => format!(" and {more} more"),
                };
                format!("ranks {named:?}{more} of {size} did not come within {limit:?}")
            }
            Err(reason) => reason.to_string(),
        };
        for process in &self.turned_away {
            let _ = write!(text, "; turned away: {process}");
        }
        text
    }

    /// Tells those who wait, and for a while those who come again, why there is no job.
    async fn send_away(&mut self, why: &str) {
        let refused = || Admission::Refused(frame::shortened(why.to_string()));
        for stream in self.waiting.values_mut() {
            let _ = frame::write(stream, &refused()).await;
        }
        let until = Instant::now() + COME_AGAIN * 2;
        while !self.later.is_empty() {
            let Ok(Some(arrival)) = timeout_at(until, self.arrivals.recv()).await else { return };
            if let Arrival::Joined(mut new) = arrival {
                self.later.remove(&new.rank);
                let _ = frame::write(&mut new.stream, &refused()).await;
            }
        }
    }
}

/// Waits on rank 0 until all ranks, which have joined, have come to their parents in the tree.
async fn all_connected(
    joined: Instant,
    limit: Duration,
    shared: &WorldHealth,
    control: &Arc<Control>,
) -> Result<()> {
    // At the deadline others know better which of their children have not come.
    let deadline = deadline(limit).min(joined + PAUSE * 40);
    let met = tokio::select! {
        biased;
        met = control.meet_all(deadline) => met,
        () = shared.failed() => return Err(reason(shared)),
    };
    if met.is_ok() {
        return Ok(());
    }
    let (missing, size) = (control.census(None).await.silent, control.size());
    Err(failed(format!(
        "all of the {size} ranks joined, but ranks {missing:?} did not come to their parents in the tree in time: look \
         for their errors, and let ranks connect to one another on all ports"
    )))
}

/// The reason for which the world has failed, as the error of the rendezvous.
pub fn reason(shared: &WorldHealth) -> Error {
    match shared.check() {
        Ok(()) => failed("the world has failed".to_string()),
        Err(reason) => Error::communication("", reason.to_string()),
    }
}

/// Tells a rank that there is no place for it.
async fn refuse(stream: &mut Connection, why: String) {
    let _ = frame::write(stream, &Admission::Refused(format!("{why}; {ANOTHER_PORT}"))).await;
}

/// An error of the rendezvous.
pub fn failed(what: String) -> Error {
    Error::communication("rendezvous", what)
}

#[cfg(test)]
mod tests {
    use super::super::auth::Secret;
    use super::super::config::{Encryption, Transport};
    use super::super::connect::Connector;
    use super::super::connections::Connections;
    use super::super::frame::{Introduction, Purpose};
    use super::super::listen::{Entrance, listen};
    use super::super::network::Network;
    use super::*;
    use tokio::net::TcpListener;
    use tokio::sync::mpsc::unbounded_channel;
    use tokio::task::{LocalSet, spawn_local};

    /// Leaves come first: rank 0 keeps connections of a few, and lets the others come again.
    #[test]
    fn ranks_that_come_before_their_parents_do_not_take_all_descriptors() {
        const SIZE: usize = 301;
        /// The rank with the lowest number that has no children.
        const LEAF: usize = 75;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        LocalSet::new().block_on(&runtime, async {
            let limit = Duration::from_secs(300);
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let (secret, shared) =
                (Secret::new(None, Encryption::BetweenHosts), WorldHealth::new());
            let control = Control::start(0, SIZE, &shared);
            control.incarnate(5);
            let (sender, arrivals) = unbounded_channel();
            let entrance = Entrance {
                secret: secret.clone(),
                job_id: None,
                transport: Transport::Tcp,
                connections: Arc::new(Connections::new(0)),
                control: control.clone(),
                arrivals: Some(sender),
                shared: shared.clone(),
            };
            spawn_local(listen(listener.into(), 0, entrance));
            spawn_local(async move {
                let network = Network::System;
                let welcome = Welcome::new(address, arrivals, &network, &shared, &control).await;
                welcome.everybody(deadline(limit), limit, limit).await
            });
            let connector = Connector { network: Network::System, secret };
            let join = async |rank: usize, port: usize| {
                let purpose = Purpose::Join { size: SIZE, port: port as u16 };
                let join = Introduction { job_id: None, rank, incarnation: None, purpose };
                connector.connect(0, (address, true), &join, deadline(limit)).await.unwrap()
            };
            let is_told = async |rank: usize, stream: &mut Connection| {
                let answer: Admission = frame::read(stream).await.unwrap();
                let Admission::Parent { address: told, incarnation: 5 } = answer else {
                    panic!("rank {rank} is told {answer:?}");
                };
                let parent = tree::parent(rank).unwrap();
                let port = if parent == 0 { address.port() } else { 1000 + parent as u16 };
                assert_eq!(told.port(), port, "rank {rank}");
            };
            let mut waiting = Vec::new();
            for rank in (LEAF..SIZE).rev() {
                let mut stream = join(rank, 1000 + rank).await;
                if waiting.len() < MOST_WAITING {
                    waiting.push((rank, stream));
                    continue;
                }
                let answer: Admission = frame::read(&mut stream).await.unwrap();
                assert!(matches!(answer, Admission::Later), "rank {rank} is told {answer:?}");
            }
            let again = LEAF..SIZE - waiting.len();
            for rank in 1..LEAF {
                is_told(rank, &mut join(rank, 1000 + rank).await).await;
            }
            for (rank, stream) in &mut waiting {
                is_told(*rank, stream).await;
            }
            let answer: Admission = frame::read(&mut join(LEAF, 9).await).await.unwrap();
            let want = format!("rank {LEAF} is here already");
            assert!(matches!(answer, Admission::Refused(why) if why.contains(&want)));
            for rank in again {
                is_told(rank, &mut join(rank, 1000 + rank).await).await;
            }
        });
    }
}
