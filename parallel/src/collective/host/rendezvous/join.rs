//! The meeting of all ranks: rank 0 listens at an address that all know, and the others come to it.

use ferrotron_tensor::{Error, Result};
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::lookup_host;
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::{Instant, sleep, timeout_at};

use super::super::runtime::world_health::WorldHealth;
use super::config::RankConfig;
use super::connect::{Connector, PAUSE, deadline};
use super::connections::Connections;
use super::control::Control;
use super::frame::{self, Admission, Introduction, Purpose};
use super::listen::{Entrance, listen};
use super::net_rendezvous::seen_from_here;
use super::network::Network;
use super::welcome::{COME_AGAIN, Welcome, failed, reason};
use crate::collective::host::silence::blame;
use crate::collective::tree;
use crate::descriptors::explained;

/// Longest time in which all come to their parents, once they have come to rank 0.
pub const CONNECTING: Duration = Duration::from_secs(60);

/// Longest time in which rank 0's machine gets its name.
const NAMED: Duration = Duration::from_secs(30);

/// The result of a rendezvous.
pub struct Met {
    /// The address at which this rank has found rank 0.
    pub first: IpAddr,
    /// Connections for groups.
    pub connections: Arc<Connections>,
}

/// Meets all other ranks.
///
/// All come to rank 0, which tells each where its parent in the tree of all ranks listens. The connection to the parent
/// stays. When all below a rank have come to it, it tells its parent; when this has reached rank 0, a welcome goes down.
///
/// Errors on rank 0, naming them, if ranks that have joined do not come to their parents within `connecting` after the
/// last one.
pub async fn meet(
    config: &RankConfig,
    connecting: Duration,
    connector: &Connector,
    shared: &Arc<WorldHealth>,
    control: &Arc<Control>,
) -> Result<Met> {
    let RankConfig { rank, size, master, port, job_id, .. } = config;
    let deadline = self::deadline(config.world.timeout);
    let address = resolve(master, *port, &connector.network).await?;
    // Anybody can know the empty one.
    let has_secret = config.secret.as_ref().is_some_and(|secret| !secret.is_empty());
    if !has_secret && !address.ip().is_loopback() {
        return Err(Error::config(
            "rendezvous",
            format!(
                "{master} can be reached from other machines: give the job a secret, as FERROTRON_JOB_SECRET on all ranks"
            ),
        ));
    }
    // Other machines can come only where they have to. A machine may know its own name as a loopback address
    // (Debian: 127.0.1.1), where others know it as one of the network.
    let stays_here = !has_secret
        || master == "localhost"
        || master.parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
    let local = match address.ip() {
        ip if stays_here => ip,
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let here = SocketAddr::new(local, if *rank == 0 { *port } else { 0 });
    let listener = connector.network.listen(here).await.map_err(explained).map_err(|error| {
        let taken = match error.kind() {
            ErrorKind::AddrInUse => {
                "; probably another job uses this port: give one of them another --rendezvous-port"
            }
            _ => "",
        };
        failed(format!("rank {rank} of {size} cannot listen at {here}: {error}{taken}"))
    })?;
    let port = listener.port().map_err(|error| failed(error.to_string()))?;

    if *rank == 0 {
        let incarnation = connector.network.random().map_err(|error| failed(error.to_string()))?;
        control.incarnate(u64::from_le_bytes(incarnation));
    }
    let connections = Arc::new(Connections::new(*rank));
    let (sender, arrivals) = unbounded_channel();
    let entrance = Entrance {
        secret: connector.secret.clone(),
        job_id: job_id.clone(),
        transport: config.transport,
        connections: connections.clone(),
        control: control.clone(),
        arrivals: (*rank == 0).then_some(sender),
        shared: shared.clone(),
    };
    tokio::task::spawn_local(listen(listener, *rank, entrance));
    if *rank == 0 {
        let limit = config.world.timeout;
        let welcome = Welcome::new(address, arrivals, &connector.network, shared, control).await;
        welcome.everybody(deadline, limit, connecting).await?;
    } else {
        let introduce = |incarnation, purpose| {
            let job_id = job_id.clone();
            Introduction { job_id, rank: *rank, incarnation, purpose }
        };
        let join = introduce(None, Purpose::Join { size: *size, port });
        let what = format!("rank {rank}: not all of the {size} ranks came");
        let limit = config.world.timeout;
        let (parent, incarnation, deadline) =
            ask_for_parent(address, connector, &join, (deadline, limit), &what).await?;
        control.incarnate(incarnation);
        let above = tree::parent(*rank).unwrap_or(0);
        let child = introduce(Some(incarnation), Purpose::Child);
        let stream = tokio::select! {
            biased;
            stream = connector.connect(above, (parent, true), &child, deadline) => stream,
            () = shared.failed() => return Err(reason(shared)),
        };
        let stream = stream.map_err(|error| failed(error.to_string()))?;
        control.attach(above, stream).map_err(failed)?;
        let met = tokio::select! {
            biased;
            met = timeout_at(deadline + PAUSE * 20, control.meet_all(deadline)) => met,
            () = shared.failed() => return Err(reason(shared)),
        };
        match met {
            Ok(Ok(())) => {}
            Ok(Err(missing)) if !missing.is_empty() => {
                return Err(failed(format!(
                    "ranks {missing:?} of {size} did not come to rank {rank}"
                )));
            }
            Ok(Err(_)) | Err(_) => {
                let silent = blame(&control.census(None).await.silent);
                return Err(failed(
                    silent.map_or(what.clone(), |silent| format!("{what}: {silent}")),
                ));
            }
        }
    }
    Ok(Met { first: address.ip(), connections })
}

/// Asks rank 0 at `master` where this rank's parent listens, again while it does not know. Returns the address, the
/// incarnation of the job, and the time at which rank 0 has said who is missing: it may have begun later than this rank, but
/// not later than this rank has found it.
///
/// Errors with `what` if there is no answer.
async fn ask_for_parent(
    master: SocketAddr,
    connector: &Connector,
    join: &Introduction,
    (deadline, timeout): (Instant, Duration),
    what: &str,
) -> Result<(SocketAddr, u64, Instant)> {
    let gone = |error: std::io::Error| failed(format!("{what}; rank 0 is gone: {error}"));
    let mut is_lost = false;
    let (mut listens, mut pause, mut limit, mut known) = (false, PAUSE, deadline, None);
    loop {
        let mut stream = connector
            .connect(0, (master, listens), join, limit)
            .await
            .map_err(|error| if is_lost { gone(error) } else { failed(error.to_string()) })?;
        let deadline = *known.get_or_insert_with(|| self::deadline(timeout) + PAUSE * 20);
        let answer = timeout_at(deadline, frame::read(&mut stream)).await;
        match answer.map_err(|_| failed(what.to_string()))? {
            Ok(Admission::Parent { address, incarnation }) => {
                return Ok((seen_from_here(address, master.ip()), incarnation, deadline));
            }
            Ok(Admission::Later) => {
                drop(stream);
                // At the deadline it tells those who come again who is missing.
                (listens, pause, limit) =
                    (true, (pause * 2).min(COME_AGAIN), deadline + COME_AGAIN * 2);
                sleep(connector.network.jittered(pause)).await;
            }
            Ok(Admission::Refused(why)) => return Err(failed(why)),
            Ok(_) => return Err(failed("rank 0 answers something else".to_string())),
            // The connection alone may be lost. If nobody listens any more, rank 0 is gone.
            Err(_) if !std::mem::replace(&mut is_lost, true) => {
                drop(stream);
                (listens, limit) = (true, deadline + COME_AGAIN * 2);
                sleep(connector.network.jittered(PAUSE)).await;
            }
            Err(error) => return Err(gone(error)),
        }
    }
}

/// Looks the address of a name up. Where a cluster names machines while they start, the name may come later than this rank.
async fn resolve(host: &str, port: u16, network: &Network) -> Result<SocketAddr> {
    let (until, mut has_warned) = (Instant::now() + NAMED, false);
    loop {
        let why = match lookup_host((host, port)).await {
            Ok(found) => {
                // IPv4 first: names of the machine itself often have both, and not everybody listens at both.
                let mut found: Vec<_> = found.collect();
                found.sort_by_key(SocketAddr::is_ipv6);
                match found.first() {
                    Some(&address) => return Ok(address),
                    None => "it has no address".to_string(),
                }
            }
            Err(error) => error.to_string(),
        };
        if Instant::now() >= until {
            return Err(failed(format!("{host}: {why}")));
        }
        if !std::mem::replace(&mut has_warned, true) {
            network.warn(&format!("{host}: {why}; trying again for {NAMED:?}"));
        }
        sleep(network.jittered(PAUSE * 10)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::super::auth::Secret;
    use super::super::config::{Encryption, Transport};
    use super::super::simulation::in_calm_networks;
    use super::*;
    use crate::collective::WorldConfig;
    use tokio::task::spawn_local;
    use tokio::time::timeout;

    /// A rank that ends when it has heard where its parent listens is named long before the timeout.
    #[test]
    fn a_rank_that_ends_before_it_comes_to_its_parent_is_named() {
        in_calm_networks(async |networks: [Network; 3]| {
            let limit = Duration::from_secs(300);
            let address = SocketAddr::from(([127, 0, 0, 1], 4000));
            let connectors = networks.map(|network| {
                let secret = Secret::new(None, Encryption::BetweenHosts);
                Connector { network, secret }
            });
            let rank = |rank: usize, connector: Connector| async move {
                let config = RankConfig {
                    rank,
                    size: 3,
                    master: "127.0.0.1".into(),
                    port: address.port(),
                    secret: None,
                    job_id: None,
                    transport: Transport::Tcp,
                    encryption: Encryption::BetweenHosts,
                    world: WorldConfig { timeout: limit },
                };
                let shared = WorldHealth::new();
                let control = Control::start(rank, 3, &shared);
                let met = meet(&config, CONNECTING, &connector, &shared, &control).await;
                let error = met.err().expect("rank 1 is not there").to_string();
                shared.fail(&error); // as its process does
                error
            };
            let [first, last] =
                [0, 2].map(|number| spawn_local(rank(number, connectors[number].clone())));
            let purpose = Purpose::Join { size: 3, port: 1 };
            let join = Introduction { job_id: None, rank: 1, incarnation: None, purpose };
            let end = Instant::now() + limit;
            let mut joined = connectors[1].connect(0, (address, false), &join, end).await.unwrap();
            let answer: Admission = frame::read(&mut joined).await.unwrap();
            assert!(matches!(answer, Admission::Parent { .. }));
            drop(joined);
            for rank in [first, last] {
                let error = timeout(limit / 4, rank).await.expect("within the bound").unwrap();
                let want = "all of the 3 ranks joined, but ranks [1] did not come to their parents";
                assert!(error.contains(want), "{error}");
            }
        });
    }
}
