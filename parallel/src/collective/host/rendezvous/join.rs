//! Connects ranks: rank 0 listens at an address that all know; the others connect to it and tell it where they listen.

use ferrotron_tensor::{Error, Result};
use std::collections::btree_map::{BTreeMap, Entry};
use std::fmt::Write as _;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream, lookup_host};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::{Instant, sleep, timeout_at};

use super::super::runtime::world_health::WorldHealth;
use super::auth::Secret;
use super::config::RankConfig;
use super::frame::{self, Admission, Introduction, Purpose};
use super::listen::{Arrival, Entrance, Joined, PendingConnections, TurnedAway, listen};
use crate::descriptors::explained;

/// Pause before rank 0 is tried again.
const PAUSE: Duration = Duration::from_millis(50);

/// Processes that were turned away and are named at most.
const NAMED: usize = 8;

/// The remedy where a rank may have come to the wrong job.
const ANOTHER_PORT: &str =
    "if this is the port of another job, give one of them another --rendezvous-port";

/// The result of a rendezvous.
pub struct Met {
    /// Addresses at which ranks listen, from rank 0 on.
    pub addresses: Vec<SocketAddr>,
    /// Control connections, by rank.
    pub control: Vec<(usize, TcpStream)>,
    /// Connections for groups.
    pub pending: Arc<PendingConnections>,
}

/// Meets all other ranks.
pub async fn meet(config: &RankConfig, secret: &Secret, shared: &Arc<WorldHealth>) -> Result<Met> {
    let RankConfig { rank, size, master, port, job_id, .. } = config;
    let deadline = self::deadline(config.world.timeout);
    let address = resolve(master, *port).await?;
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
    let listener = TcpListener::bind(here).await.map_err(explained).map_err(|error| {
        let taken = match error.kind() {
            ErrorKind::AddrInUse => {
                "; probably another job uses this port: give one of them another --rendezvous-port"
            }
            _ => "",
        };
        failed(format!("rank {rank} of {size} cannot listen at {here}: {error}{taken}"))
    })?;
    let port = listener.local_addr().map_err(|error| failed(error.to_string()))?.port();

    let pending = Arc::new(PendingConnections::default());
    let (sender, arrivals) = unbounded_channel();
    let entrance = Entrance {
        secret: secret.clone(),
        job_id: job_id.clone(),
        pending: pending.clone(),
        arrivals: (*rank == 0).then_some(sender),
    };
    tokio::task::spawn_local(listen(listener, *rank, entrance, shared.clone()));
    let (mut addresses, control) = if *rank == 0 {
        welcome(*size, address, arrivals, deadline, config.world.timeout, shared).await?
    } else {
        let purpose = Purpose::Join { size: *size, port };
        let introduction = Introduction { job_id: job_id.clone(), rank: *rank, purpose };
        let mut stream = connect(0, address, secret, &introduction, deadline)
            .await
            .map_err(|error| failed(error.to_string()))?;
        let what = format!("rank {rank}: not all of the {size} ranks came");
        let answer = timeout_at(deadline + PAUSE * 20, frame::read(&mut stream)).await;
        match answer.map_err(|_| failed(what.clone()))? {
            Ok(Admission::Addresses(addresses)) => (addresses, vec![(0, stream)]),
            Ok(Admission::Refused(why)) => return Err(failed(why)),
            Ok(Admission::Admitted) => return Err(failed("rank 0 answers twice".to_string())),
            Err(error) => return Err(failed(format!("{what}; rank 0 is gone: {error}"))),
        }
    };
    for (_, stream) in &control {
        keep_alive(stream);
    }
    // A loopback address is that of a rank on rank 0's machine, which is where this rank has found rank 0.
    for place in addresses.iter_mut().filter(|place| place.ip().is_loopback()) {
        place.set_ip(address.ip());
    }
    Ok(Met { addresses, control, pending })
}

/// Rank 0's part: waits for all others and tells them where everybody listens.
async fn welcome(
    size: usize,
    own: SocketAddr,
    mut arrivals: UnboundedReceiver<Arrival>,
    deadline: Instant,
    limit: Duration,
    shared: &WorldHealth,
) -> Result<(Vec<SocketAddr>, Vec<(usize, TcpStream)>)> {
    let mut ranks: BTreeMap<usize, Joined> = BTreeMap::new();
    let mut turned_away: Vec<TurnedAway> = Vec::new();
    while ranks.len() + 1 < size {
        let arrival = tokio::select! {
            arrival = timeout_at(deadline, arrivals.recv()) => arrival,
            () = shared.failed() => Ok(None),
        };
        let mut new = match arrival {
            Ok(Some(Arrival::Joined(new))) => new,
            Ok(Some(Arrival::TurnedAway(process))) => {
                if turned_away.len() < NAMED && !turned_away.contains(&process) {
                    // At once: the process that started it may be waiting for it.
                    let line =
                        format!("rank 0: a process is turned away: {process}; {ANOTHER_PORT}\n");
                    // In vain if standard error is closed.
                    let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
                    turned_away.push(process);
                }
                continue;
            }
            Ok(None) | Err(_) => {
                let missing: Vec<_> = (1..size).filter(|rank| !ranks.contains_key(rank)).collect();
                let mut text = match shared.check() {
                    Ok(()) => format!("ranks {missing:?} of {size} did not come within {limit:?}"),
                    Err(reason) => reason.to_string(),
                };
                for process in &turned_away {
                    let _ = write!(text, "; turned away: {process}");
                }
                for joined in ranks.values_mut() {
                    let _ =
                        frame::write(&mut joined.stream, &Admission::Refused(text.clone())).await;
                }
                return Err(failed(text));
            }
        };
        let rank = new.rank;
        let refusal = if new.size != size {
            format!("rank {rank} believes in {} ranks, rank 0 in {size}", new.size)
        } else if rank == 0 || rank >= size {
            format!("there is no place for rank {rank} of {size}")
        } else if let Entry::Vacant(place) = ranks.entry(rank) {
            place.insert(new);
            continue;
        } else {
            format!("rank {rank} is here already")
        };
        refuse(&mut new.stream, refusal).await;
    }
    arrivals.close();
    while let Ok(arrival) = arrivals.try_recv() {
        if let Arrival::Joined(mut late) = arrival {
            refuse(&mut late.stream, format!("all {size} ranks are here already")).await;
        }
    }
    let mut addresses = vec![own];
    addresses.extend(ranks.values().map(|joined| joined.address));
    let mut control = Vec::new();
    for (rank, mut joined) in ranks {
        // A rank that has gone meanwhile is noticed by its control connection.
        let _ = frame::write(&mut joined.stream, &Admission::Addresses(addresses.clone())).await;
        control.push((rank, joined.stream));
    }
    Ok((addresses, control))
}

/// Tells a rank that there is no place for it.
async fn refuse(stream: &mut TcpStream, why: String) {
    let _ = frame::write(stream, &Admission::Refused(format!("{why}; {ANOTHER_PORT}"))).await;
}

/// Connects to a rank, which may not listen yet, and says what for.
///
/// Errors at once if the rank refuses, or if this process has no descriptor left.
pub async fn connect(
    rank: usize,
    address: SocketAddr,
    secret: &Secret,
    introduction: &Introduction,
    deadline: Instant,
) -> std::io::Result<TcpStream> {
    loop {
        let attempt = async {
            let mut stream = TcpStream::connect(address).await.map_err(explained)?;
            // While nobody listens at a port of connections, the system may connect a socket to itself.
            if stream.local_addr()? == stream.peer_addr()? {
                return Err(ErrorKind::ConnectionRefused.into());
            }
            stream.set_nodelay(true)?;
            secret.connect(&mut stream).await?;
            frame::write(&mut stream, introduction).await?;
            match frame::read(&mut stream).await? {
                Admission::Refused(why) => {
                    Err(std::io::Error::new(ErrorKind::PermissionDenied, why))
                }
                Admission::Admitted | Admission::Addresses(_) => Ok(stream),
            }
        };
        let late = Err(ErrorKind::TimedOut.into());
        match timeout_at(deadline, attempt).await.unwrap_or(late) {
            Ok(stream) => return Ok(stream),
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::PermissionDenied | ErrorKind::QuotaExceeded
                ) || Instant::now() + PAUSE >= deadline =>
            {
                let what = format!("no connection to rank {rank} at {address}: {error}");
                return Err(std::io::Error::new(error.kind(), what));
            }
            Err(_) => sleep(PAUSE).await,
        }
    }
}

/// The end of a time limit that begins now, however long it is.
pub fn deadline(limit: Duration) -> Instant {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
    Instant::now() + limit.min(YEAR)
}

async fn resolve(host: &str, port: u16) -> Result<SocketAddr> {
    let found = lookup_host((host, port)).await.map_err(|error| error.to_string());
    // IPv4 first: names of the machine itself often have both, and not everybody listens at both.
    let mut found: Vec<_> = found.map_err(|e| failed(format!("{host}: {e}")))?.collect();
    found.sort_by_key(SocketAddr::is_ipv6);
    found.first().copied().ok_or_else(|| failed(format!("{host} has no address")))
}

/// Notices within half a minute when a machine dies without closing its connections.
fn keep_alive(stream: &TcpStream) {
    let keep_alive = socket2::TcpKeepalive::new()
        .with_time(Duration::from_secs(10))
        .with_interval(Duration::from_secs(5))
        .with_retries(4);
    // Without it a dead machine is noticed by the next call's timeout.
    let _ = socket2::SockRef::from(stream).set_tcp_keepalive(&keep_alive);
}

fn failed(what: String) -> Error {
    Error::communication("rendezvous", what)
}
