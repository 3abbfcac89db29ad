//! Heartbeats: a rank that is stopped, or whose machine hangs, is named by its neighbours also while no call waits for it.
//!
//! Every rank tells its neighbours in the tree once a period that it is there, and listens to them only. So no rank gets
//! more than five of these messages a period, however many ranks there are.

use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

use super::super::frame::Body;
use super::{Control, lock};
use crate::collective::host::silence::blame;

/// Heartbeats within the timeout of a call.
const PER_TIMEOUT: u32 = 20;

/// Time between two heartbeats at least.
const SHORTEST: Duration = Duration::from_secs(1);

/// Periods of silence at least that end the world: ranks that share a core wait for their turns.
const FEWEST: u32 = 5;

/// The rhythm of heartbeats.
#[derive(Debug, Clone, Copy)]
pub struct Heartbeat {
    /// Time between two.
    pub period: Duration,
    /// The silence that ends the world.
    pub limit: Duration,
}

impl Heartbeat {
    /// The rhythm in a world with this timeout of calls.
    pub fn of(timeout: Duration) -> Heartbeat {
        let timeout = timeout.min(Duration::from_secs(365 * 24 * 3600));
        let period = (timeout / PER_TIMEOUT).max(SHORTEST);
        // The last heartbeat may be a period old when a rank stops, and its silence a period old when it is noticed.
        let limit = timeout.saturating_sub(2 * period).max(period * FEWEST);
        Heartbeat { period, limit }
    }
}

impl Control {
    /// Tells the neighbours once a period that this rank is there, and ends the world if one of them is silent for too
    /// long. A pause of this rank's own process counts for nobody's silence: all ranks of a job may have been stopped.
    pub async fn beat(self: Arc<Self>, Heartbeat { period, limit }: Heartbeat) {
        lock(&self.heard).clear();
        let mut due = Instant::now();
        loop {
            let now = Instant::now();
            if now.duration_since(due) > period {
                lock(&self.heard).clear();
            }
            let departed = lock(&self.departed).clone();
            let (mut silent, mut neighbours) = (Vec::new(), self.neighbours());
            neighbours.retain(|peer| !departed.contains(peer));
            for peer in neighbours {
                let heard = *lock(&self.heard).entry(peer).or_insert(now);
                if now.duration_since(heard) >= limit {
                    silent.push(peer);
                }
                self.post(self.message(peer, Body::Alive));
            }
            if let Some(silent) = blame(&silent) {
                let rank = self.rank;
                self.shared.fail(&format!("{silent}; rank {rank} has heard nothing for {limit:?}"));
            }
            due = now + period;
            tokio::select! {
                biased;
                () = sleep_until(due) => {}
                () = self.shared.failed() => return,
            }
        }
    }
}
