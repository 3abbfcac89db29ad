//! Finding the ranks that all others wait for, in messages that do not grow with the number of ranks that ask.

use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::super::super::runtime::census::{Census, Query};
use super::super::frame::Body;
use super::{Control, has_left, lock};
use crate::collective::tree;

/// Time within which a neighbour with nobody behind it answers.
const NEAREST: Duration = Duration::from_millis(2500);

/// Time that each level behind a neighbour adds: a rank that does not answer is named by its neighbour before those that
/// asked this neighbour lose patience. Longer than ranks that share a core wait for their turns.
const LEVEL: Duration = Duration::from_millis(500);

impl Control {
    /// Asks all ranks whether they are there and, with a query, whether they have entered its call.
    pub async fn census(self: &Arc<Self>, query: Option<Query>) -> Census {
        self.count(query, None).await
    }

    /// Counts this rank and all that are behind its neighbours but `asker`. Children that have not come yet are silent.
    ///
    /// All that ask the same meanwhile get the same answer, so the messages do not grow with the number of ranks that ask.
    pub(super) async fn count(
        self: &Arc<Self>,
        query: Option<Query>,
        asker: Option<usize>,
    ) -> Census {
        let asked_at = Instant::now();
        let mut census = Census::default();
        let entered = |query: &Query| self.shared.answer(query.group, self.rank, query.entry);
        if let Some(query) = query.as_ref().filter(|query| query.members.contains(self.rank)) {
            census.join(Census::of(self.rank, entered(query)));
        }
        let departed = lock(&self.departed).clone();
        let is_asked = |peer: &usize| Some(*peer) != asker && !departed.contains(peer);
        let mut absent: Vec<usize> = tree::children(self.rank, self.size).collect();
        let here = self.neighbours();
        absent.retain(|child| !here.contains(child) && !departed.contains(child));
        census.join(Census { silent: absent, ..Census::default() });
        let neighbours = here.into_iter().filter(is_asked);
        let asked: Vec<_> =
            neighbours.map(|peer| (peer, self.count_behind(peer, &query))).collect();
        for (peer, receiver) in asked {
            match timeout_at(asked_at + self.patience(peer), receiver).await {
                Ok(Ok(counted)) => census.join(counted),
                Ok(Err(_)) | Err(_) => {
                    lock(&self.counts).remove(&(peer, query.clone()));
                    let silent = vec![peer];
                    census.join(Census { silent, ..Census::default() });
                }
            }
        }
        // Of a world that has failed, others take leave because they know why.
        if let Some(query) = query.as_ref().filter(|_| self.shared.check().is_ok()) {
            let left = |rank: usize| {
                rank != self.rank && departed.contains(&tree::next_hop(self.rank, rank))
            };
            for rank in query.members.ranks().filter(|&rank| left(rank)) {
                census.join(Census::of(rank, has_left()));
            }
        }
        census
    }

    /// Longest time that a neighbour takes to answer, also if another rank asks it first: longer than it waits for those
    /// behind it.
    fn patience(&self, peer: usize) -> Duration {
        let levels = match tree::parent(self.rank) == Some(peer) {
            // Up to rank 0 and down again.
            true => tree::depth(peer + 1) + tree::depth(self.size),
            false => tree::height(peer, self.size),
        };
        NEAREST + LEVEL * levels as u32
    }

    /// Longest time that a census takes.
    pub(super) fn longest_census(&self) -> Duration {
        NEAREST + LEVEL * 2 * tree::depth(self.size) as u32
    }

    /// Asks a neighbour, unless it is being asked the same.
    fn count_behind(&self, peer: usize, query: &Option<Query>) -> oneshot::Receiver<Census> {
        let (sender, receiver) = oneshot::channel();
        let mut counts = lock(&self.counts);
        let waiting = counts.entry((peer, query.clone())).or_default();
        waiting.push(sender);
        if waiting.len() == 1 {
            drop(counts);
            self.post(self.message(peer, Body::Count { query: query.clone() }));
        }
        receiver
    }

    /// Takes a neighbour's answer.
    pub(super) fn counted(&self, peer: usize, query: Option<Query>, census: Census) {
        let waiting = lock(&self.counts).remove(&(peer, query));
        for sender in waiting.into_iter().flatten() {
            let _ = sender.send(census.clone());
        }
    }

    /// Ends the counts that wait for a neighbour which takes leave: nobody is behind it any more.
    pub(super) fn count_no_more(&self, peer: usize) {
        let waited =
            lock(&self.counts).keys().filter(|key| key.0 == peer).cloned().collect::<Vec<_>>();
        waited.into_iter().for_each(|(peer, query)| self.counted(peer, query, Census::default()));
    }
}
