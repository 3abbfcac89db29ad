//! State that ranks share beside data: whether the world has failed, and the progress of every rank.

use ferrotron_tensor::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::collective::host::recent::Recent;
use crate::collective::host::runtime::watched::Watched;
use crate::collective::host::transport::connect::GroupId;
use crate::collective::host::transport::header::Header;

/// The kind of event that a group counts. Not every rank takes part in a message, so messages are counted by pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// Calls of the whole group.
    Call,
    /// Messages to the rank with this number in the group.
    Sent(usize),
    /// Messages from the rank with this number in the group.
    Received(usize),
}

/// The n-th of a [`Kind`], from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Entry {
    /// The kind of event that is counted.
    pub kind: Kind,
    /// Its number, from 1.
    pub number: u64,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = self.number;
        match self.kind {
            Kind::Call => write!(f, "call {number}"),
            Kind::Sent(_) => write!(f, "the send of message {number}"),
            Kind::Received(_) => write!(f, "the receive of message {number}"),
        }
    }
}

/// The progress of one rank in one group.
#[derive(Debug, Clone, Default)]
pub struct CallCounters {
    entered: BTreeMap<Kind, u64>,
    /// The last call, with the name of the group.
    last: Option<(Arc<str>, Header)>,
    running: bool,
}

/// The answer of a rank that others wait for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Answer {
    /// Whether it has entered the call.
    pub entered: bool,
    /// Its last call, in words.
    pub last: String,
    /// Whether it has not entered the call, and waits in a call of another group.
    pub waits: bool,
}

impl Answer {
    /// The answer of a rank that has not entered a call and waits in no other.
    pub fn missing(last: &str) -> Answer {
        Answer { entered: false, last: last.to_string(), waits: false }
    }
}

/// The result of asking a rank: its answer, if that has come in time.
pub type Reply = Option<Answer>;

impl CallCounters {
    /// Counts one more of `kind` and returns its number.
    pub fn enter(&mut self, kind: Kind) -> u64 {
        let count = self.entered.entry(kind).or_default();
        *count += 1;
        *count
    }

    /// Notes that the call of `header` is under way.
    pub fn begin(&mut self, group: &Arc<str>, header: Header) {
        (self.last, self.running) = (Some((group.clone(), header)), true);
    }

    /// Notes that it is done.
    pub fn end(&mut self) {
        self.running = false;
    }

    /// Whether this rank has entered a call, and what it did last.
    pub fn answer(&self, entry: Entry) -> Answer {
        let last = match (&self.last, self.running) {
            (None, _) => "it has called nothing in this group".to_string(),
            (Some((_, header)), true) => format!("it is in {}", header.describe()),
            (Some((_, header)), false) => format!("its last was {}", header.describe()),
        };
        let entered = self.entered.get(&entry.kind).is_some_and(|&count| count >= entry.number);
        Answer { entered, last, waits: false }
    }
}

/// Progress in groups.
#[derive(Default)]
struct CounterTable {
    /// By group and rank in the world.
    ranks: HashMap<GroupId, HashMap<usize, CallCounters>>,
    /// Ranks that have left groups, whose last calls others may still ask for.
    left: Recent<(GroupId, usize)>,
}

/// The state that all ranks of a process share.
pub struct WorldHealth {
    failure: Watched<Option<Arc<str>>>,
    counters: Mutex<CounterTable>,
}

impl WorldHealth {
    /// A world in which nothing has happened yet.
    pub fn new() -> Arc<WorldHealth> {
        Arc::new(WorldHealth { failure: Watched::default(), counters: Mutex::default() })
    }

    /// Ends the world: every pending and later call of every rank fails with the first reason given. Returns
    /// whether this was the first.
    pub fn fail(&self, reason: &str) -> bool {
        self.failure.change(|failure| {
            let first = failure.is_none();
            if first {
                *failure = Some(Arc::from(reason));
            }
            first
        })
    }

    /// Errors if the world has failed.
    pub fn check(&self) -> Result<()> {
        match self.failure.get().as_deref() {
            Some(reason) => Err(Error::communication("", reason)),
            None => Ok(()),
        }
    }

    /// Returns when the world has failed.
    pub async fn failed(&self) {
        self.failure.wait_for(Option::is_some).await;
    }

    /// Changes what is known of a rank's progress in a group.
    pub fn note<R>(
        &self,
        group: GroupId,
        rank: usize,
        f: impl FnOnce(&mut CallCounters) -> R,
    ) -> R {
        f(self.board().ranks.entry(group).or_default().entry(rank).or_default())
    }

    /// A rank makes no further calls in a group. What is known of it is forgotten when thousands more have done so.
    pub fn leave(&self, group: GroupId, rank: usize) {
        let table = &mut *self.board();
        let Some((group, rank)) = table.left.add((group, rank)) else { return };
        if let Some(ranks) = table.ranks.get_mut(&group) {
            ranks.remove(&rank);
            if ranks.is_empty() {
                table.ranks.remove(&group);
            }
        }
    }

    /// Returns the progress of a rank in a group.
    pub fn answer(&self, group: GroupId, rank: usize, entry: Entry) -> Answer {
        let board = self.board();
        let mut answer = match board.ranks.get(&group).and_then(|ranks| ranks.get(&rank)) {
            Some(progress) => progress.answer(entry),
            None => Answer::missing("it has not made this group"),
        };
        if !answer.entered {
            let others = board.ranks.iter().filter(|(id, _)| **id != group);
            let running = others.filter_map(|(id, ranks)| {
                ranks.get(&rank).filter(|progress| progress.running).map(|progress| (id, progress))
            });
            if let Some((_, CallCounters { last: Some((name, header)), .. })) =
                running.min_by_key(|(id, _)| **id)
            {
                answer.waits = true;
                answer.last += &format!("; it waits in {} of group {name}", header.describe());
            }
        }
        answer
    }

    fn board(&self) -> MutexGuard<'_, CounterTable> {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_that_were_dropped_long_ago_are_forgotten() {
        let shared = WorldHealth::new();
        let entry = Entry { kind: Kind::Call, number: 1 };
        for group in 0..20_000 {
            for rank in [0, 1] {
                shared.note(group, rank, |progress| progress.enter(Kind::Call));
                shared.leave(group, rank);
            }
        }
        assert!(shared.answer(19_999, 1, entry).entered);
        assert!(!shared.answer(0, 1, entry).entered);
        assert!(shared.board().ranks.len() < 5000, "{}", shared.board().ranks.len());
    }
}
