//! Ranks whose processes are stopped, as by SIGSTOP or a debugger: the others wait for them.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::rank_process::RankProcess;

/// Pause between looks, and the shortest stop that is told.
const PAUSE: Duration = Duration::from_millis(500);

/// Ranks that are stopped.
#[derive(Default)]
pub struct StoppedRanks {
    looked: Option<Instant>,
    stopped: BTreeMap<usize, Stopped>,
}

/// A rank's stop.
struct Stopped {
    since: Instant,
    is_told: bool,
}

impl StoppedRanks {
    /// Looks which ranks are stopped, now and then, and names new ones in a line to `err`.
    pub fn look<W: Write>(&mut self, ranks: &[RankProcess], err: &Mutex<W>) {
        if self.looked.is_some_and(|looked| looked.elapsed() < PAUSE) {
            return;
        }
        self.looked = Some(Instant::now());
        for (number, rank) in ranks.iter().enumerate() {
            if !rank.is_stopped() {
                self.stopped.remove(&number);
                continue;
            }
            let begun = || Stopped { since: Instant::now(), is_told: false };
            let stop = self.stopped.entry(number).or_insert_with(begun);
            if !stop.is_told && stop.since.elapsed() >= PAUSE {
                stop.is_told = true;
                let pid = rank.id();
                let line = format!(
                    "[launcher] rank {number} is stopped (process {pid}) and the others wait for it: kill -CONT {pid} \
                     lets it go on\n"
                );
                let mut err = err.lock().unwrap_or_else(PoisonError::into_inner);
                let _ = err.write_all(line.as_bytes()).and_then(|()| err.flush());
            }
        }
    }

    /// Returns for how long a rank has been stopped that is still, counted from `start` on.
    pub fn longest_since(&self, start: Instant) -> Duration {
        let stops = self.stopped.values().map(|stop| stop.since.max(start).elapsed());
        stops.max().unwrap_or_default()
    }
}
