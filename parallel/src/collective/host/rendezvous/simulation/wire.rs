//! A connection between two simulated processes: the bytes that are under way.

use std::collections::VecDeque;
use std::task::Waker;
use tokio::time::Instant;

/// Bytes that arrive at a moment, or never.
pub struct Packet {
    pub at: Option<Instant>,
    pub bytes: Vec<u8>,
    pub read: usize,
}

/// One direction of a connection.
#[derive(Default)]
pub struct Lane {
    pub packets: VecDeque<Packet>,
    pub held: usize,
    /// The arrival of the last packet, after which the next one arrives.
    latest: Option<Instant>,
    /// Nothing is written any more. The reader learns it then, if ever.
    pub ended: Option<Option<Instant>>,
    /// Nothing is read any more. The writer learns it then, if ever.
    pub unread: Option<Option<Instant>>,
    pub reader: Option<Waker>,
    pub writer: Option<Waker>,
}

/// A connection between two processes.
pub struct Wire {
    pub processes: [usize; 2],
    /// From the first to the second, and back.
    pub lanes: [Lane; 2],
    pub is_reset: bool,
}

impl Wire {
    /// A connection over which nothing has come.
    pub fn new(processes: [usize; 2]) -> Wire {
        Wire { processes, lanes: Default::default(), is_reset: false }
    }

    /// Lets all who wait look again.
    pub fn wake(&mut self) {
        for lane in &mut self.lanes {
            for waker in [lane.reader.take(), lane.writer.take()].into_iter().flatten() {
                waker.wake();
            }
        }
    }

    /// Returns whether it is a connection of this process.
    pub fn is_of(&self, process: usize) -> bool {
        self.processes.contains(&process) && !self.is_reset
    }

    /// Breaks the connection, as a firewall does.
    pub fn reset(&mut self) {
        self.is_reset = true;
        self.wake();
    }
}

impl Lane {
    /// The arrival of a packet that arrives after those before it, and not before `at`.
    pub fn after_all(&mut self, at: Option<Instant>) -> Option<Instant> {
        let is_lost = self.packets.back().is_some_and(|last| last.at.is_none());
        let at = at.filter(|_| !is_lost).map(|at| self.latest.map_or(at, |latest| at.max(latest)));
        self.latest = at.or(self.latest);
        at
    }
}
