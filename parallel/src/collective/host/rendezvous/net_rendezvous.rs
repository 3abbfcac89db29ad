//! Reaches other ranks over a network: connections of groups, made when they are first needed, and questions.

use std::future::Future;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

use super::super::runtime::census::{Census, Query};
use super::super::runtime::rendezvous::Rendezvous;
use super::super::runtime::world_health::{Entry, Reply};
use super::super::transport::connect::{Connect, GroupId, Pipes};
use super::super::transport::piece::{ChannelResult, Fault};
use super::config::Transport;
use super::connect::{Connector, PAUSE};
use super::connections::{Connections, Step};
use super::control::Control;
use super::frame::{Admission, Introduction, Purpose};
use super::pipes::pipes;
use crate::collective::ControlVolume;

/// Pause of a rank that was told that the other's connection goes before: that one may not get through.
const STEP_ASIDE: Duration = Duration::from_secs(1);

/// Pause of a rank that cannot get through: the other, which may, tries within it.
const TURN: Duration = Duration::from_secs(3);

/// Everything needed to reach other ranks.
pub struct NetRendezvous {
    /// This rank.
    pub rank: usize,
    /// The address at which this rank has found rank 0.
    pub first: IpAddr,
    /// Reaches the others.
    pub connector: Connector,
    /// The job's id.
    pub job_id: Option<String>,
    /// The transports that may be used.
    pub transport: Transport,
    /// Connections that are made or waited for.
    pub connections: Arc<Connections>,
    /// Messages.
    pub control: Arc<Control>,
}

impl Connect for NetRendezvous {
    fn connect(
        &self,
        group: GroupId,
        _own: usize,
        peer: usize,
    ) -> Pin<Box<dyn Future<Output = ChannelResult<Pipes>> + '_>> {
        Box::pin(self.pipes_to(group, peer))
    }

    fn close(&self, group: GroupId, _own: usize) {
        self.connections.close(group);
    }
}

impl Rendezvous for NetRendezvous {
    fn ask<'a>(
        &'a self,
        group: GroupId,
        questions: &'a [(usize, Entry)],
    ) -> Pin<Box<dyn Future<Output = Vec<Reply>> + 'a>> {
        Box::pin(self.control.ask(group, questions))
    }

    fn census(&self, query: Option<Query>) -> Pin<Box<dyn Future<Output = Census> + '_>> {
        Box::pin(self.control.census(query))
    }

    fn unreached(&self, group: GroupId) -> Option<String> {
        self.connections.unreached(group)
    }

    fn traffic(&self) -> ControlVolume {
        ControlVolume { group_connections: self.connections.taken(), ..self.control.traffic() }
    }
}

/// The end of an attempt to connect.
enum Attempt {
    Made(Pipes),
    Crossed,
    Left,
}

impl NetRendezvous {
    async fn pipes_to(&self, group: GroupId, peer: usize) -> ChannelResult<Pipes> {
        let _awaited = self.connections.wait();
        let has_left = || Err(Fault::PeerGone(format!("rank {peer} has left the group")));
        loop {
            let changed = self.connections.changed().notified(); // from here on nothing is missed
            match self.connections.step(group, peer) {
                Step::Take(pipes) => return Ok(pipes),
                Step::Wait => changed.await,
                Step::Connect => match self.attempts(group, peer).await {
                    Some(Ok(Attempt::Made(pipes))) => self.connections.made(group, peer, pipes),
                    Some(Ok(Attempt::Left)) => return has_left(),
                    // The other may have connected meanwhile.
                    Some(Err(error)) if self.connections.failed(group, peer, true) => {
                        match error.kind() {
                            // All listen since they have met, until they leave or are gone.
                            ErrorKind::ConnectionRefused => {
                                let why = self.connections.unreached(group).unwrap_or_default();
                                let what = format!("rank {peer} has left the group, or {why}");
                                return Err(Fault::PeerGone(what));
                            }
                            ErrorKind::PermissionDenied | ErrorKind::QuotaExceeded => {
                                let me = self.rank;
                                let what = format!("rank {me} has no pipe to rank {peer}: {error}");
                                return Err(what.into());
                            }
                            ErrorKind::TimedOut => sleep(TURN).await,
                            _ => sleep(PAUSE).await,
                        }
                    }
                    Some(Ok(Attempt::Crossed) | Err(_)) | None => {}
                },
            }
        }
    }

    /// Tries to connect, until the other has been let in: then there is nothing to return.
    async fn attempts(&self, group: GroupId, peer: usize) -> Option<io::Result<Attempt>> {
        let mut attempt = pin!(async {
            loop {
                match self.attempt(group, peer).await {
                    Ok(Attempt::Crossed) => sleep(STEP_ASIDE).await,
                    end => return end,
                }
            }
        });
        loop {
            let changed = self.connections.changed().notified(); // from here on nothing is missed
            if !self.connections.is_connecting(group, peer) {
                return None;
            }
            tokio::select! {
                biased;
                end = &mut attempt => return Some(end),
                () = changed => {}
            }
        }
    }

    async fn attempt(&self, group: GroupId, peer: usize) -> io::Result<Attempt> {
        let introduction = Introduction {
            job_id: self.job_id.clone(),
            rank: self.rank,
            incarnation: self.control.incarnation().await,
            purpose: Purpose::Pipe { group },
        };
        let address = seen_from_here(self.place(peer).await?, self.first);
        let note = |stands: String| self.connections.note(group, peer, stands);
        note(format!("rank {peer} does not answer at {address}"));
        let connected = self.connector.connect_once(address, &introduction).await;
        let (connection, admission) = connected.inspect_err(|error| {
            note(format!("rank {peer} cannot be reached at {address}: {error}"));
        })?;
        match admission {
            Admission::Admitted => Ok(Attempt::Made(pipes(connection, self.transport).await?)),
            Admission::Crossed => Ok(Attempt::Crossed),
            Admission::Left => Ok(Attempt::Left),
            Admission::Refused(why) => Err(io::Error::new(ErrorKind::PermissionDenied, why)),
            Admission::Parent { .. } | Admission::Later => {
                Err(io::Error::new(ErrorKind::InvalidData, "it answers something else"))
            }
        }
    }

    async fn place(&self, rank: usize) -> io::Result<SocketAddr> {
        if let Some(place) = self.control.place(rank) {
            return Ok(place);
        }
        let place = self.control.ask_place(rank).await?;
        self.control.know(rank, place);
        Ok(place)
    }
}

/// An address that rank 0 knows. A loopback address is that of a rank on rank 0's machine, which is where this rank has
/// found rank 0.
pub fn seen_from_here(mut address: SocketAddr, first: IpAddr) -> SocketAddr {
    if address.ip().is_loopback() {
        address.set_ip(first);
    }
    address
}

#[cfg(test)]
mod tests {
    use super::super::super::runtime::world_health::WorldHealth;
    use super::super::auth::Secret;
    use super::super::config::Encryption;
    use super::super::connection::Connection;
    use super::super::connections::Decision;
    use super::super::frame;
    use super::super::network::Network;
    use super::super::simulation::in_calm_networks;
    use super::*;
    use tokio::time::timeout;

    /// An address of simulated networks.
    fn address() -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], 4000))
    }

    fn rendezvous(rank: usize, control: Arc<Control>, network: Network) -> NetRendezvous {
        control.incarnate(5);
        let secret = Secret::new(None, Encryption::BetweenHosts);
        NetRendezvous {
            rank,
            first: address().ip(),
            connector: Connector { network, secret },
            job_id: None,
            transport: Transport::Tcp,
            connections: Arc::new(Connections::new(rank)),
            control,
        }
    }

    #[test]
    fn a_rank_that_cannot_be_reached_is_known_with_its_address() {
        in_calm_networks(async |[own, other]| {
            // Takes connections, and says nothing.
            let (address, silent) = (address(), other.listen(address()).await.unwrap());
            let control = Control::start(0, 2, &WorldHealth::new());
            control.know(1, address);
            let rendezvous = rendezvous(0, control, own);
            let attempt = timeout(Duration::from_millis(100), rendezvous.pipes_to(7, 1)).await;
            assert!(attempt.is_err(), "it waits");
            let want = format!("rank 1 does not answer at {address}");
            assert_eq!(rendezvous.unreached(7), Some(want));
            assert_eq!(rendezvous.unreached(8), None);

            drop(silent);
            match rendezvous.pipes_to(8, 1).await {
                Err(Fault::PeerGone(what)) => {
                    assert!(
                        what.contains("has left the group") && what.contains(&address.to_string())
                    );
                }
                _ => panic!("nobody listens there"),
            }
        });
    }

    /// The other is silent at its address, and its own connection comes.
    #[test]
    fn the_connection_that_comes_first_is_taken() {
        in_calm_networks(async |[own, other]| {
            let (address, _silent) = (address(), other.listen(address()).await.unwrap());
            let control = Control::start(1, 5, &WorldHealth::new());
            control.know(4, address);
            let rendezvous = rendezvous(1, control, own);
            let comes = async {
                sleep(PAUSE).await;
                assert!(rendezvous.connections.is_connecting(7, 4));
                assert_eq!(rendezvous.connections.admit(7, 4), Decision::Admitted);
                let near = other.listen(SocketAddr::from(([127, 0, 0, 1], 4001))).await.unwrap();
                let far = other.connect(SocketAddr::from(([127, 0, 0, 1], 4001))).await.unwrap();
                let near = near.accept().await.unwrap().0;
                let [one, other] = [near, far].map(|end| Connection::new(end, None));
                let both = tokio::join!(pipes(one, Transport::Tcp), pipes(other, Transport::Tcp));
                rendezvous.connections.made(7, 4, both.0.unwrap());
                both.1.unwrap()
            };
            let taken = timeout(Duration::from_secs(20), rendezvous.pipes_to(7, 4));
            let (taken, _other) = tokio::join!(taken, comes);
            assert!(taken.expect("it does not wait for the attempt").is_ok());
            assert_eq!(rendezvous.connections.taken(), 1);
        });
    }

    /// The other's connection goes before, and never comes.
    #[test]
    fn a_rank_that_has_stepped_aside_tries_again() {
        in_calm_networks(async |[own, other]| {
            let (address, listener) = (address(), other.listen(address()).await.unwrap());
            let control = Control::start(1, 5, &WorldHealth::new());
            control.know(4, address);
            let rendezvous = rendezvous(1, control, own);
            let answers = async |answer: Admission| {
                let (stream, _) = listener.accept().await.unwrap();
                let mut stream = rendezvous.connector.secret.accept(stream).await.unwrap();
                let introduction: Introduction = frame::read(&mut stream).await.unwrap();
                assert_eq!(introduction.incarnation, Some(5));
                frame::write(&mut stream, &answer).await.unwrap();
                stream
            };
            let other = async {
                answers(Admission::Crossed).await;
                pipes(answers(Admission::Admitted).await, Transport::Tcp).await.unwrap()
            };
            let taken = timeout(Duration::from_secs(20), rendezvous.pipes_to(7, 4));
            let (taken, _other) = tokio::join!(taken, other);
            assert!(taken.expect("it tries again").is_ok());
        });
    }
}
