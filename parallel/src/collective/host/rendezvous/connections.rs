//! The connections of a rank's groups, while they are made and until its calls take them.
//!
//! Either of two ranks may connect when it first needs the other, and often both do at once. The one with the higher
//! number decides: it lets the other in unless it has begun to connect itself.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

use super::super::recent::Recent;
use super::super::transport::connect::{GroupId, Pipes};

/// The progress of a group's connection with another rank.
enum State {
    /// This rank connects to the other.
    Connecting,
    /// The other has been let in.
    Accepting,
    /// It can be used.
    Ready(Pipes),
    /// A call uses it.
    Taken,
}

/// The next thing that a call has to do for its connection.
pub enum Step {
    /// Connect.
    Connect,
    /// Wait for a change.
    Wait,
    /// Nothing more.
    Take(Pipes),
}

/// The answer to another rank.
#[derive(Debug, PartialEq, Eq)]
pub enum Decision {
    /// It is let in.
    Admitted,
    /// This rank has begun to connect, and goes before.
    Crossed,
    /// This rank makes no further calls in the group.
    Left,
    /// It is connected already.
    Twice,
}

/// The connections of one rank, by group and rank at the other end.
#[derive(Default)]
pub struct Connections {
    rank: usize,
    /// Calls that wait for one.
    awaited: AtomicUsize,
    /// The connections that calls have used.
    taken: AtomicU64,
    table: Mutex<Table>,
    changed: Notify,
}

#[derive(Default)]
struct Table {
    states: BTreeMap<(GroupId, usize), State>,
    /// Ranks that this rank is trying to reach, and how that stands.
    attempts: BTreeMap<(GroupId, usize), String>,
    /// Groups in which this rank makes no further calls: the last few thousand. One that connects for an older one waits.
    closed: Recent<GroupId>,
    left: bool,
}

/// Counts as long as it lives: a wait may be given up.
pub struct Awaited<'a>(&'a AtomicUsize);

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Connections {
    /// The connections of rank `rank`: none yet.
    pub fn new(rank: usize) -> Connections {
        Connections { rank, ..Connections::default() }
    }

    /// Counts a call that waits.
    pub fn wait(&self) -> Awaited<'_> {
        self.awaited.fetch_add(1, Ordering::Relaxed);
        Awaited(&self.awaited)
    }

    /// Returns whether a call waits.
    pub fn is_awaited(&self) -> bool {
        self.awaited.load(Ordering::Relaxed) > 0
    }

    /// Number of connections that calls have used.
    pub fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Notified by every change.
    pub fn changed(&self) -> &Notify {
        &self.changed
    }

    /// Remembers how an attempt to reach `peer` stands, until there is a connection.
    pub fn note(&self, group: GroupId, peer: usize, stands: String) {
        self.table().attempts.insert((group, peer), stands);
    }

    /// Returns whether this rank connects to `peer`, which it has not let in meanwhile.
    pub fn is_connecting(&self, group: GroupId, peer: usize) -> bool {
        matches!(self.table().states.get(&(group, peer)), Some(State::Connecting))
    }

    /// Returns how the first attempt of a group stands that has not succeeded, if there is one.
    pub fn unreached(&self, group: GroupId) -> Option<String> {
        let table = self.table();
        table
            .attempts
            .range((group, 0)..=(group, usize::MAX))
            .next()
            .map(|(_, stands)| stands.clone())
    }

    /// Returns the next thing that a call has to do for its connection to `peer`.
    pub fn step(&self, group: GroupId, peer: usize) -> Step {
        let table = &mut *self.table();
        let state = match table.states.entry((group, peer)) {
            std::collections::btree_map::Entry::Vacant(place) => {
                place.insert(State::Connecting);
                return Step::Connect;
            }
            std::collections::btree_map::Entry::Occupied(state) => state.into_mut(),
        };
        if !matches!(state, State::Ready(_)) {
            return Step::Wait;
        }
        match std::mem::replace(state, State::Taken) {
            State::Ready(pipes) => {
                self.taken.fetch_add(1, Ordering::Relaxed);
                table.attempts.remove(&(group, peer));
                Step::Take(pipes)
            }
            _ => Step::Wait,
        }
    }

    /// Decides whether `peer`, who has connected, is let in. If so, [`Connections::made`] or [`Connections::failed`]
    /// must follow.
    pub fn admit(&self, group: GroupId, peer: usize) -> Decision {
        let mut table = self.table();
        if table.left || table.closed.contains(&group) {
            return Decision::Left;
        }
        match table.states.get(&(group, peer)) {
            Some(State::Connecting) if self.rank > peer => return Decision::Crossed,
            Some(State::Ready(_) | State::Taken | State::Accepting) => return Decision::Twice,
            Some(State::Connecting) | None => {}
        }
        table.states.insert((group, peer), State::Accepting);
        Decision::Admitted
    }

    /// A connection that can be used, unless the group is closed meanwhile.
    pub fn made(&self, group: GroupId, peer: usize, pipes: Pipes) {
        let mut table = self.table();
        if !table.left && !table.closed.contains(&group) {
            table.states.insert((group, peer), State::Ready(pipes));
        }
        drop(table);
        self.changed.notify_waiters();
    }

    /// An attempt of this rank, if `own`, or of the other has come to nothing. Returns whether the next may begin, since no
    /// other is under way or has succeeded.
    pub fn failed(&self, group: GroupId, peer: usize, own: bool) -> bool {
        let mut table = self.table();
        let state = table.states.get(&(group, peer));
        let is_this = match own {
            true => matches!(state, Some(State::Connecting)),
            false => matches!(state, Some(State::Accepting)),
        };
        if is_this {
            table.states.remove(&(group, peer));
        }
        drop(table);
        self.changed.notify_waiters();
        is_this
    }

    /// Closes what calls of a group have not taken, and lets nobody in any more.
    pub fn close(&self, group: GroupId) {
        let mut table = self.table();
        table.closed.add(group);
        table.states.retain(|&(id, _), _| id != group);
        table.attempts.retain(|&(id, _), _| id != group);
    }

    /// Closes those of all groups.
    pub fn close_all(&self) {
        let mut table = self.table();
        table.left = true;
        table.states.clear();
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two ranks that connect to each other, have one connection, whichever sees the other first.
    #[test]
    fn the_higher_number_decides() {
        let [low, high] = [Connections::new(1), Connections::new(4)];
        assert!(matches!(low.step(7, 4), Step::Connect));
        assert!(matches!(high.step(7, 1), Step::Connect));
        assert_eq!(high.admit(7, 1), Decision::Crossed);
        assert_eq!(low.admit(7, 4), Decision::Admitted);
        assert!(matches!(low.step(7, 4), Step::Wait));
        assert!(!low.failed(7, 4, true)); // the attempt that was refused is no reason to begin another
        assert!(matches!(low.step(7, 4), Step::Wait));
        assert!(low.failed(7, 4, false) && high.failed(7, 1, true));
        // The lower one comes first.
        assert!(matches!(low.step(7, 4), Step::Connect));
        assert_eq!(high.admit(7, 1), Decision::Admitted);
        assert!(matches!(high.step(7, 1), Step::Wait));
        assert_eq!(high.admit(7, 1), Decision::Twice);
    }

    #[test]
    fn nobody_is_let_into_a_closed_group() {
        let connections = Connections::new(0);
        connections.note(7, 1, "rank 1 does not answer".to_string());
        connections.close(7);
        assert_eq!(connections.unreached(7), None);
        assert_eq!(connections.admit(7, 1), Decision::Left);
        assert_eq!(connections.admit(8, 1), Decision::Admitted);
        connections.close_all();
        assert_eq!(connections.admit(9, 1), Decision::Left);
    }
}
