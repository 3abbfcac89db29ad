//! A process of a simulated network: it connects, listens, and lives or not.

use std::collections::{BTreeMap, VecDeque};
use std::future::{Future, poll_fn};
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep_until};

use super::network::{Life, Wires};
use super::stream::SimulatedStream;

/// Connections that a process has not accepted yet.
#[derive(Default)]
struct Backlog {
    waiting: VecDeque<(SimulatedStream, SocketAddr)>,
    waker: Option<Waker>,
}

/// A process that listens, and its connections until it ends.
type Door = (usize, Option<Arc<Mutex<Backlog>>>);

/// A network as one of its processes sees it.
#[derive(Clone)]
pub struct Host {
    pub wires: Wires,
    /// Those who listen, or have, and the connections that wait for them.
    listeners: Arc<Mutex<BTreeMap<SocketAddr, Door>>>,
    /// The number of the process.
    pub process: usize,
}

/// Takes the connections to a port.
pub struct SimulatedListener {
    host: Host,
    address: SocketAddr,
    backlog: Arc<Mutex<Backlog>>,
}

impl Host {
    /// The first process of a network in which nobody listens.
    pub fn first(wires: Wires) -> Host {
        Host { wires, listeners: Arc::default(), process: 0 }
    }

    /// Another process of this network.
    pub fn other(&self, process: usize) -> Host {
        Host { process, ..self.clone() }
    }

    /// The first address at which a process listens, or has.
    pub fn address_of(&self, process: usize) -> Option<SocketAddr> {
        self.doors().iter().find(|(_, (listener, _))| *listener == process).map(|(at, _)| *at)
    }

    fn doors(&self) -> MutexGuard<'_, BTreeMap<SocketAddr, Door>> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects to an address.
    pub async fn connect(&self, address: SocketAddr) -> io::Result<SimulatedStream> {
        let listener = self.doors().get(&address).map(|(process, _)| *process);
        let to = listener.unwrap_or(self.process); // nobody was ever there: the own system knows
        self.packet(self.process, to).await;
        let backlog = match self.doors().get(&address) {
            Some((_, Some(backlog))) => Some(backlog.clone()),
            _ => None,
        };
        let (hung_up, own) = {
            let state = &mut *self.wires.state();
            state.written(self.process, 0);
            let hung_up = state.weather.hung_up;
            let port = 10_000 + state.dice.below(20_000) as u16;
            (state.dice.happens(hung_up), SocketAddr::new(state.processes[self.process].ip, port))
        };
        let Some(backlog) = backlog else {
            self.packet(to, self.process).await;
            return Err(ErrorKind::ConnectionRefused.into());
        };
        let [near, far] = SimulatedStream::new(&self.wires, [self.process, to]);
        {
            let backlog = &mut *backlog.lock().unwrap();
            backlog.waiting.push_back((far, own));
            backlog.waker.take().into_iter().for_each(Waker::wake);
        }
        self.packet(to, self.process).await;
        if hung_up {
            return Err(ErrorKind::ConnectionReset.into());
        }
        Ok(near)
    }

    /// Waits until a packet between two processes has arrived.
    async fn packet(&self, from: usize, to: usize) {
        let at = self.wires.state().arrival(from, to);
        match at {
            Some(at) => sleep_until(at).await,
            None => std::future::pending().await,
        }
    }

    /// Listens at a port of this process's machine.
    pub fn listen(&self, address: SocketAddr) -> io::Result<SimulatedListener> {
        let state = &mut *self.wires.state();
        let port = match address.port() {
            0 => {
                state.next_port += 1;
                state.next_port
            }
            port => port,
        };
        let address = SocketAddr::new(state.processes[self.process].ip, port);
        let doors = &mut *self.doors();
        if matches!(doors.get(&address), Some((_, Some(_)))) {
            return Err(ErrorKind::AddrInUse.into());
        }
        let backlog = Arc::<Mutex<Backlog>>::default();
        doors.insert(address, (self.process, Some(backlog.clone())));
        Ok(SimulatedListener { host: self.clone(), address, backlog })
    }

    /// Returns random bytes.
    pub fn random<const N: usize>(&self) -> [u8; N] {
        let state = &mut *self.wires.state();
        std::array::from_fn(|_| state.dice.bits() as u8)
    }

    /// Returns whether the process has not been killed.
    pub fn lives(&self) -> bool {
        !matches!(self.wires.state().processes[self.process].life, Life::Killed | Life::Off(_))
    }
}

impl SimulatedListener {
    /// Waits for the next connection.
    pub async fn accept(&self) -> (SimulatedStream, SocketAddr) {
        poll_fn(|context| {
            let backlog = &mut *self.backlog.lock().unwrap();
            match backlog.waiting.pop_front() {
                Some((stream, address)) => Poll::Ready((stream, address)),
                None => {
                    backlog.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.address.port()
    }
}

impl Drop for SimulatedListener {
    fn drop(&mut self) {
        if let Some((_, backlog)) = self.host.doors().get_mut(&self.address) {
            *backlog = None;
        }
    }
}

/// Runs a process as long as it lives, and not while it is stopped or waits for the processor.
pub struct Running<T> {
    host: Host,
    main: Option<Pin<Box<dyn Future<Output = T>>>>,
    sleep: Option<Pin<Box<Sleep>>>,
    /// Longest wait for the processor.
    busy: Duration,
    /// The end of the present wait.
    turn: Instant,
}

impl<T> Running<T> {
    /// The process `host`, which runs `main` and waits for the processor for up to `busy` each time.
    pub fn new(host: Host, busy: Duration, main: impl Future<Output = T> + 'static) -> Running<T> {
        Running { host, main: Some(Box::pin(main)), sleep: None, busy, turn: Instant::now() }
    }

    /// Polls again at a time.
    fn wake_at(&mut self, time: Instant, context: &mut Context<'_>) {
        let sleep = self.sleep.insert(Box::pin(sleep_until(time)));
        let _ = sleep.as_mut().poll(context);
    }
}

impl<T> Future for Running<T> {
    type Output = Option<T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        let running = self.get_mut();
        let life = {
            let process = &mut running.host.wires.state().processes[running.host.process];
            process.waker = Some(context.waker().clone());
            if matches!(process.life, Life::Stopped(Some(until)) if until <= Instant::now()) {
                process.life = Life::Running;
            }
            process.life
        };
        match (life, &mut running.main) {
            (Life::Running, Some(_)) if Instant::now() < running.turn => {
                running.wake_at(running.turn, context);
                Poll::Pending
            }
            (Life::Running, Some(main)) => {
                if !running.busy.is_zero() {
                    let share = running.host.wires.state().dice.share();
                    running.turn = Instant::now() + running.busy.mul_f64(share);
                }
                main.as_mut().poll(context).map(Some)
            }
            (Life::Stopped(until), Some(_)) => {
                if let Some(until) = until {
                    running.wake_at(until, context);
                }
                Poll::Pending
            }
            // Its connections are closed, or nobody hears of it.
            (Life::Killed | Life::Off(_), _) | (_, None) => {
                running.main = None;
                Poll::Ready(None)
            }
        }
    }
}
