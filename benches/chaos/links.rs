//! A proxy for all connections between the ranks of a job on one machine, which can cut and delay them.
//!
//! ```text
//! rank i --> (host i, port of rank j), where the proxy listens --> (host j, port of rank j)
//! ```
//!
//! Each rank has a loopback address of its own, 127.0.0.(i + 1). Its `MASTER_ADDR` is that address, where the proxy
//! listens at the rendezvous port, so it finds rank 0 there. A rank that is told a loopback address takes it for one of the
//! machine on which it has found rank 0 (`seen_from_here` in `parallel`), which is its own address again: it looks for rank
//! j at its own address and the port of rank j. That port is known from `/proc/net/tcp` as soon as rank j comes to the
//! rendezvous, which is before anybody can look for it.

use ferrotron::tensor::RandomKey;
use std::io::{ErrorKind, Read, Result, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

/// Pause between two looks at the entrances.
const LOOK: Duration = Duration::from_millis(2);
/// Longest that a rank waits here for rank 0 to listen.
const RANK_0_LISTENS: Duration = Duration::from_secs(20);
/// LISTEN of `/proc/net/tcp`.
const LISTENING: &str = "0A";

/// The links of a job.
pub struct Links {
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    port: u16,
    ranks: usize,
    ended: AtomicBool,
    connections: Mutex<Vec<Arc<Connection>>>,
    delays: Mutex<Delays>,
    /// Pieces that were passed on.
    pieces: AtomicU64,
}

/// The time that pieces wait.
#[derive(Default)]
struct Delays {
    /// A link on which nothing passes until then.
    held: Option<([usize; 2], Instant)>,
    /// The most that every piece waits.
    each: Duration,
}

/// A connection of two ranks.
struct Connection {
    ranks: [usize; 2],
    ends: [TcpStream; 2],
    is_open: AtomicBool,
}

/// A place at which rank `from` looks for rank `to`.
struct Entrance {
    listener: TcpListener,
    from: usize,
    to: usize,
    target: SocketAddr,
}

impl Links {
    /// Opens the way to rank 0, which listens at `port`, for the others of `ranks`. The rest follows as they come.
    pub fn open(ranks: usize, port: u16) -> Result<Links> {
        let entrances = (1..ranks).map(|from| Entrance::new(from, 0, port));
        let mut entrances = entrances.collect::<Result<Vec<_>>>()?;
        let shared = Arc::new(Shared {
            port,
            ranks,
            ended: AtomicBool::new(false),
            connections: Mutex::default(),
            delays: Mutex::default(),
            pieces: AtomicU64::new(0),
        });
        let accepting = shared.clone();
        let acceptor = spawn(move || {
            while !accepting.has_ended() {
                if let Err(error) = accepting.accept(&mut entrances) {
                    println!("the proxy cannot go on, and cuts all links: {error}");
                    accepting.end();
                }
                sleep(LOOK);
            }
        });
        Ok(Links { shared, acceptor: Some(acceptor) })
    }

    /// The address of a rank.
    pub fn host(rank: usize) -> Ipv4Addr {
        Ipv4Addr::new(127, 0, 0, rank as u8 + 1)
    }

    /// Cuts one of the open connections, chosen by a number from 0 to 1; returns its ranks.
    pub fn cut(&self, choice: f64) -> Option<[usize; 2]> {
        let connections = lock(&self.shared.connections);
        let open: Vec<_> = connections.iter().filter(|one| one.is_open.load(Relaxed)).collect();
        let chosen = open.get((choice * open.len() as f64) as usize)?;
        chosen.close();
        Some(chosen.ranks)
    }

    /// Holds back everything on the link of two ranks, chosen by a number from 0 to 1, for `hold`, and lets every later
    /// piece on any link wait up to `each`.
    pub fn delay(&self, choice: f64, hold: Duration, each: Duration) -> [usize; 2] {
        let ranks = self.shared.ranks;
        let pairs: Vec<[usize; 2]> =
            (0..ranks).flat_map(|a| (a + 1..ranks).map(move |b| [a, b])).collect();
        let pair = pairs[(choice * pairs.len() as f64) as usize % pairs.len()];
        *lock(&self.shared.delays) = Delays { held: Some((pair, Instant::now() + hold)), each };
        pair
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        self.shared.end();
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

impl Entrance {
    fn new(from: usize, to: usize, port: u16) -> Result<Entrance> {
        let listener = TcpListener::bind((Links::host(from), port))?;
        listener.set_nonblocking(true)?;
        Ok(Entrance { listener, from, to, target: (Links::host(to), port).into() })
    }
}

impl Connection {
    fn close(&self) {
        self.is_open.store(false, Relaxed);
        // In vain if the other side has closed it.
        self.ends.iter().for_each(|end| drop(end.shutdown(Shutdown::Both)));
    }
}

impl Shared {
    fn has_ended(&self) -> bool {
        self.ended.load(Relaxed)
    }

    fn end(&self) {
        self.ended.store(true, Relaxed);
        lock(&self.connections).iter().for_each(|connection| connection.close());
    }

    /// Lets all in that have come.
    fn accept(self: &Arc<Shared>, entrances: &mut Vec<Entrance>) -> Result<()> {
        for at in 0..entrances.len() {
            let Entrance { from, to, target, .. } = entrances[at];
            let stream = match entrances[at].listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
                Err(error) => return Err(error),
            };
            stream.set_nonblocking(false)?;
            let is_new = to == 0 && !entrances.iter().any(|entrance| entrance.to == from);
            if is_new {
                let port = self.port_of(from, entrances)?;
                for other in (0..self.ranks).filter(|&other| other != from) {
                    entrances.push(Entrance::new(other, from, port)?);
                }
            }
            let shared = self.clone();
            spawn(move || {
                // Without a way to the target both see the end of their connection, and say so.
                let _ = shared.carry(stream, [from, to], target);
            });
        }
        Ok(())
    }

    /// The port at which a rank listens at its own address, where the proxy has `entrances`.
    fn port_of(&self, rank: usize, entrances: &[Entrance]) -> Result<u16> {
        let address = u32::from_ne_bytes(Links::host(rank).octets());
        let own = |port: u16| {
            let is_own =
                |entrance: &Entrance| entrance.from == rank && entrance.target.port() == port;
            port == self.port || entrances.iter().any(is_own)
        };
        let table = std::fs::read_to_string("/proc/net/tcp")?;
        let port = table.lines().skip(1).find_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (host, port) = fields.get(1)?.split_once(':')?;
            let port = u16::from_str_radix(port, 16).ok()?;
            let is_there = u32::from_str_radix(host, 16).ok()? == address;
            (is_there && fields.get(3) == Some(&LISTENING) && !own(port)).then_some(port)
        });
        port.ok_or_else(|| std::io::Error::other(format!("rank {rank} listens nowhere")))
    }

    /// Passes on what comes from either side, until both have ended.
    fn carry(
        self: Arc<Shared>,
        stream: TcpStream,
        ranks: [usize; 2],
        to: SocketAddr,
    ) -> Result<()> {
        let begun = Instant::now();
        let other = loop {
            match TcpStream::connect(to) {
                Ok(other) => break other,
                Err(_)
                    if begun.elapsed() < RANK_0_LISTENS && ranks[1] == 0 && !self.has_ended() =>
                {
                    sleep(Duration::from_millis(20));
                }
                Err(error) => return Err(error),
            }
        };
        let ends = [stream, other];
        ends.iter().try_for_each(|end| end.set_nodelay(true))?;
        let connection = Arc::new(Connection { ranks, ends, is_open: AtomicBool::new(true) });
        lock(&self.connections).push(connection.clone());
        if self.has_ended() {
            connection.close();
        }
        let (shared, both) = (self.clone(), connection.clone());
        let back = spawn(move || shared.pump(&both, [1, 0]));
        self.pump(&connection, [0, 1]);
        let _ = back.join();
        connection.close();
        Ok(())
    }

    /// Passes on what comes from one side.
    fn pump(&self, connection: &Connection, [from, to]: [usize; 2]) {
        let (mut from, mut to) = (&connection.ends[from], &connection.ends[to]);
        let mut piece = vec![0; 1 << 16];
        loop {
            let length = match from.read(&mut piece) {
                Ok(0) => {
                    // The other direction may have more.
                    let _ = to.shutdown(Shutdown::Write);
                    return;
                }
                Ok(length) => length,
                Err(_) => return connection.close(),
            };
            self.wait(connection.ranks);
            if to.write_all(&piece[..length]).is_err() {
                return connection.close();
            }
        }
    }

    /// Waits as long as a piece between two ranks has to.
    fn wait(&self, mut ranks: [usize; 2]) {
        ranks.sort_unstable();
        let number = self.pieces.fetch_add(1, Relaxed);
        let each = lock(&self.delays).each;
        if !each.is_zero() {
            sleep(each.mul_f64(RandomKey::new(0, 0, "pieces").uniform(number)));
        }
        while !self.has_ended() {
            let held = lock(&self.delays).held;
            match held {
                Some((pair, until)) if pair == ranks && Instant::now() < until => {
                    sleep(Duration::from_millis(5));
                }
                _ => return,
            }
        }
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}
