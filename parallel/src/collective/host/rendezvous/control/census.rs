//! Finding the ranks that all others wait for, in messages that do not grow with the number of ranks that ask.

use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

use super::super::super::runtime::awake::awake_for;
use super::super::super::runtime::census::{Census, Query};
use super::super::frame::Body;
use super::{ANSWER, Control, has_left, lock};
use crate::collective::tree;

/// Time between two signs of life of a rank that waits for answers itself: several of them fit into [`ANSWER`], also when
/// packets are lost and sent again.
const SIGN_OF_LIFE: Duration = Duration::from_millis(500);

/// Longest time that a message takes to a neighbour, if packets of it are lost and sent again.
const HOP: Duration = Duration::from_secs(1);

impl Control {
    /// Asks all ranks whether they are there and, with a query, whether they have entered its call.
    pub async fn census(self: &Arc<Self>, query: Option<Query>) -> Census {
        self.count(query, None).await
    }

    /// Counts this rank and all that are behind its neighbours but `asker`. Children that have not come yet are silent.
    ///
    /// All that ask the same meanwhile get the same answer, so the messages do not grow with the number of ranks that ask.
    async fn count(self: &Arc<Self>, query: Option<Query>, asker: Option<usize>) -> Census {
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
            census.join(match self.counted_behind(peer, receiver, asked_at).await {
                Some(counted) => counted,
                None => {
                    lock(&self.counts).remove(&(peer, query.clone()));
                    Census { silent: vec![peer], ..Census::default() }
                }
            });
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

    /// Waits for a neighbour's count as long as the neighbour says anything: one that waits itself gives signs of life.
    async fn counted_behind(
        &self,
        peer: usize,
        mut counted: oneshot::Receiver<Census>,
        asked_at: Instant,
    ) -> Option<Census> {
        let mut heard = asked_at;
        loop {
            let left = (heard + ANSWER).saturating_duration_since(Instant::now());
            if let Some(counted) = awake_for(left, &mut counted).await {
                return counted.ok();
            }
            match lock(&self.heard).get(&peer) {
                Some(&later) if later > heard => heard = later,
                _ => return None,
            }
        }
    }

    /// Counts for neighbour `asker`, and tells it meanwhile that this rank is there: it would take this rank for the one that
    /// is silent, where the silent one is farther away.
    pub(super) async fn count_for(self: &Arc<Self>, query: Option<Query>, asker: usize) {
        let signs_of_life = async {
            loop {
                sleep(SIGN_OF_LIFE).await;
                self.post(self.message(asker, Body::Alive));
            }
        };
        let census = tokio::select! {
            census = self.count(query.clone(), Some(asker)) => census,
            () = signs_of_life => unreachable!("it goes on for ever"),
        };
        self.post(self.message(asker, Body::Counted { query, census }));
    }

    /// Longest time that a census takes: to the farthest rank and back, one of them being silent.
    pub(super) fn longest_census(&self) -> Duration {
        ANSWER + HOP * 4 * tree::depth(self.size) as u32
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
