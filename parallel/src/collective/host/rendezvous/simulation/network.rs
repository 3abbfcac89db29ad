//! The state of a simulated network: its processes, its connections, and all that goes wrong.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;
use std::time::Duration;
use tokio::time::Instant;

use super::dice::Dice;
use super::faults::{Fault, Weather, When};
use super::wire::Wire;

/// Time after which the system gives up a connection that is kept alive and over which nothing comes.
pub const KEPT_ALIVE: Duration = Duration::from_secs(30);

/// The state of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Life {
    /// It runs.
    Running,
    /// It is stopped until then, or for ever.
    Stopped(Option<Instant>),
    /// It was killed: the system closes its connections.
    Killed,
    /// Its machine is off: nothing comes from there any more.
    Off(Instant),
}

/// One process.
pub struct Process {
    pub ip: IpAddr,
    pub life: Life,
    /// Wakes what runs the process.
    pub waker: Option<Waker>,
    /// Packets that it has written.
    pub packets: u64,
}

/// The connections and writes of all processes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Volume {
    /// Connections that were made.
    pub connections: u64,
    /// Writes of a process.
    pub packets: u64,
    /// Bytes of them.
    pub bytes: u64,
}

/// Processes that do not reach the others, nor these them.
struct Cut {
    side: BTreeSet<usize>,
    from: Instant,
    until: Option<Instant>,
}

/// A network of processes.
pub struct State {
    pub dice: Dice,
    pub weather: Weather,
    pub processes: Vec<Process>,
    pub faults: Vec<(When, Fault)>,
    cuts: Vec<Cut>,
    pub next_port: u16,
    /// All connections.
    pub wires: Vec<Weak<Mutex<Wire>>>,
    /// All that was sent.
    pub volume: Volume,
    /// Faults that have happened.
    pub happened: Vec<(Fault, Instant)>,
    /// The moments at which ranks have met all others.
    pub met: Vec<Instant>,
    begun: Instant,
    /// A digest of all packets and their times: equal for two runs that are the same.
    pub digest: u64,
}

/// A network that its processes share.
#[derive(Clone)]
pub struct Wires(Arc<Mutex<State>>);

impl Wires {
    /// A network of processes with these addresses.
    pub fn new(
        dice: Dice,
        weather: Weather,
        ips: impl Iterator<Item = IpAddr>,
        faults: Vec<(When, Fault)>,
    ) -> Wires {
        let process = |ip| Process { ip, life: Life::Running, waker: None, packets: 0 };
        Wires(Arc::new(Mutex::new(State {
            dice,
            weather,
            processes: ips.map(process).collect(),
            faults,
            cuts: Vec::new(),
            next_port: 40_000,
            wires: Vec::new(),
            volume: Volume::default(),
            happened: Vec::new(),
            met: Vec::new(),
            begun: Instant::now(),
            digest: 0,
        })))
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The moment at which a packet that is sent now arrives, if it ever does.
    pub fn arrival(&mut self, from: usize, to: usize) -> Option<Instant> {
        let now = Instant::now();
        let Weather { latency: [least, most], lost, resent, .. } = self.weather;
        let mut at = now + self.dice.between(least, most);
        if self.dice.happens(lost) {
            at += self.dice.between(resent / 20, resent);
        }
        if [from, to].iter().any(|&end| matches!(self.processes[end].life, Life::Off(_))) {
            return None;
        }
        for cut in self.cuts.iter().filter(|cut| cut.separates(from, to)) {
            match cut.until {
                None => return None,
                Some(until) if until > now => at = at.max(until + self.dice.between(least, resent)),
                Some(_) => {}
            }
        }
        Some(at)
    }

    /// The moment at which the system gives up a connection between two that is kept alive.
    pub fn given_up(&self, one: usize, other: usize) -> Option<Instant> {
        let off = [one, other].into_iter().filter_map(|end| match self.processes[end].life {
            Life::Off(since) => Some(since + KEPT_ALIVE),
            _ => None,
        });
        let cuts = self.cuts.iter().filter(|cut| cut.separates(one, other));
        let cut = cuts.map(|cut| (cut.from + KEPT_ALIVE, cut.until));
        let cut = cut.filter(|(end, until)| until.is_none_or(|until| until > *end));
        off.chain(cut.map(|(end, _)| end)).min()
    }

    /// Counts a packet that a process writes, and lets the faults happen that wait for it.
    pub fn written(&mut self, process: usize, len: usize) {
        self.processes[process].packets += 1;
        self.volume.packets += u64::from(len > 0);
        self.volume.bytes += len as u64;
        self.note([process as u64, len as u64]);
        let packets = self.processes[process].packets;
        let is_due = |when: &When| matches!(*when, When::Packet(who, count) if (who, count) == (process, packets));
        while let Some(index) = self.faults.iter().position(|(when, _)| is_due(when)) {
            let (_, fault) = self.faults.remove(index);
            self.happen(&fault);
        }
    }

    /// Adds to the digest.
    pub fn note(&mut self, facts: [u64; 2]) {
        let time = Instant::now().duration_since(self.begun).as_nanos() as u64;
        for fact in [time, facts[0], facts[1]] {
            self.digest = (self.digest ^ fact).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29);
        }
    }

    /// Lets a fault happen now.
    pub fn happen(&mut self, fault: &Fault) {
        let now = Instant::now();
        self.happened.push((fault.clone(), now));
        match *fault {
            Fault::Kill(rank) => self.become_(rank, Life::Killed),
            Fault::Off(rank) => {
                let ip = self.processes[rank].ip;
                let there = |process: &usize| self.processes[*process].ip == ip;
                let off: Vec<_> = (0..self.processes.len()).filter(there).collect();
                off.into_iter().for_each(|process| self.become_(process, Life::Off(now)));
            }
            Fault::Stop(rank, pause) => {
                self.become_(rank, Life::Stopped(pause.map(|pause| now + pause)));
            }
            Fault::StopAll(pause) => {
                for rank in 0..self.processes.len() {
                    if self.processes[rank].life == Life::Running {
                        self.become_(rank, Life::Stopped(Some(now + pause)));
                    }
                }
            }
            Fault::Cut(ref side, pause) => {
                let until = pause.map(|pause| now + pause);
                // Machines are cut off, not processes.
                let ips: BTreeSet<_> = side.iter().map(|&rank| self.processes[rank].ip).collect();
                let is_inside = |process: &usize| ips.contains(&self.processes[*process].ip);
                let side = (0..self.processes.len()).filter(is_inside).collect();
                self.cuts.push(Cut { side, from: now, until });
            }
            Fault::Reset(rank) => self.reset_one(rank),
            _ => {} // what ranks do
        }
        // Readers find out what it means for them.
        for wire in self.wires() {
            wire.lock().unwrap().wake();
        }
    }

    /// The connections that there are.
    fn wires(&mut self) -> Vec<Arc<Mutex<Wire>>> {
        self.wires.retain(|wire| wire.strong_count() > 0);
        self.wires.iter().filter_map(Weak::upgrade).collect()
    }

    /// Changes the life of a process, unless it has ended.
    fn become_(&mut self, process: usize, life: Life) {
        let process = &mut self.processes[process];
        if !matches!(process.life, Life::Killed | Life::Off(_)) {
            process.life = life;
            if let Some(waker) = process.waker.take() {
                waker.wake();
            }
        }
    }

    /// Resets a connection of a process.
    fn reset_one(&mut self, process: usize) {
        let mut wires = self.wires();
        wires.retain(|wire| wire.lock().unwrap().is_of(process));
        if !wires.is_empty() {
            wires[self.dice.below(wires.len())].lock().unwrap().reset();
        }
    }
}

impl Cut {
    fn separates(&self, one: usize, other: usize) -> bool {
        self.side.contains(&one) != self.side.contains(&other)
    }
}
