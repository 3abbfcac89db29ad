//! Processors of a node that ranks share: each busy thread gets its part of the cores.
//!
//! A replay gives each rank cores of its own. Then the number of busy threads is known at each moment: those of ranks that
//! compute, and one of each rank whose call runs. With more of them than cores, all get on more slowly by that factor, and
//! so does the whole step. Threads that compute at the same time also share caches and memory, which is measured.

use crate::stage_time::Slot;

/// The processors of a node, and the ranks on them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sharing {
    /// Cores of the node.
    pub cores: usize,
    /// Ranks of each stage.
    pub ranks: usize,
    /// Threads of a rank that computes.
    pub threads: usize,
    /// Time of a kernel while all cores compute, over its time alone.
    pub contention: f64,
}

/// Time of a rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Piece {
    pub(crate) slot: Slot,
    pub(crate) start: f64,
    pub(crate) end: f64,
}

impl Sharing {
    /// The factor of time while so many threads compute and so many others pass on messages.
    fn factor(&self, computing: usize, communicating: usize) -> f64 {
        // A rank's own threads were measured together.
        let others = computing.min(self.cores).saturating_sub(self.threads) as f64;
        let most = self.cores.saturating_sub(self.threads).max(1) as f64;
        let contention = 1.0 + (self.contention - 1.0) * others / most;
        let busy = (computing + communicating) as f64;
        contention * (busy / self.cores as f64).max(1.0)
    }
}

/// Moments of a replay, and when they are on shared cores.
pub(crate) struct Stretch {
    moments: Vec<[f64; 2]>,
    /// The factor behind the last of them.
    last: f64,
}

impl Stretch {
    pub(crate) fn new(sharing: &Sharing, pieces: &[Vec<Piece>]) -> Stretch {
        // Changes of the numbers of threads that compute, and of those that pass on messages.
        let mut changes: Vec<(f64, [isize; 2])> = Vec::new();
        for Piece { slot, start, end } in pieces.iter().flatten() {
            let [computing, communicating] = match slot {
                Slot::Computing(_) => [sharing.ranks * sharing.threads, 0],
                Slot::Communicating(_) => [0, sharing.ranks],
                Slot::Exposed(_) | Slot::Bubble => continue,
            };
            let busy = [computing as isize, communicating as isize];
            changes.push((*start, busy));
            changes.push((*end, busy.map(|threads| -threads)));
        }
        changes.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (mut busy, mut moments, mut factor) = ([0_isize; 2], vec![[0.0; 2]], 1.0);
        for (moment, change) in changes {
            let [from, until] = moments[moments.len() - 1];
            if moment > from {
                moments.push([moment, until + factor * (moment - from)]);
            }
            busy = [busy[0] + change[0], busy[1] + change[1]];
            factor = sharing.factor(busy[0].max(0) as usize, busy[1].max(0) as usize);
        }
        Stretch { moments, last: factor }
    }

    /// The moment on shared cores.
    pub(crate) fn at(&self, moment: f64) -> f64 {
        let behind = self.moments.partition_point(|[from, _]| *from <= moment).max(1);
        let [from, until] = self.moments[behind - 1];
        let factor = match self.moments.get(behind) {
            Some([next, then]) => (then - until) / (next - from),
            None => self.last,
        };
        until + factor * (moment - from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steps::{Part, Traffic};

    fn piece(slot: Slot, start: f64, end: f64) -> Piece {
        Piece { slot, start, end }
    }

    #[test]
    fn more_busy_threads_than_cores_take_turns() {
        let products = Slot::Computing(Part::Products);
        let messages = Slot::Communicating(Traffic::Data);
        let sharing = Sharing { cores: 2, ranks: 1, threads: 1, contention: 1.0 };
        // Two stages compute for 2 s, of which the first one's message takes 1 s.
        let pieces = [
            vec![piece(products, 0.0, 2.0), piece(messages, 1.0, 2.0)],
            vec![piece(products, 0.0, 2.0)],
        ];
        let times = Stretch::new(&sharing, &pieces);
        for (moment, want) in
            [(0.0, 0.0), (0.5, 0.5), (1.0, 1.0), (1.5, 1.75), (2.0, 2.5), (3.0, 3.5)]
        {
            assert!((times.at(moment) - want).abs() < 1e-12, "{moment}: {}", times.at(moment));
        }
        // Two ranks of each stage are twice as many.
        let times = Stretch::new(&Sharing { ranks: 2, ..sharing }, &pieces);
        assert!((times.at(2.0) - 5.0).abs() < 1e-12, "{}", times.at(2.0));
    }

    #[test]
    fn threads_that_compute_together_share_caches() {
        let sharing = Sharing { cores: 3, ranks: 1, threads: 1, contention: 1.5 };
        assert_eq!([0, 1, 2, 3].map(|busy| sharing.factor(busy, 0)), [1.0, 1.0, 1.25, 1.5]);
        assert_eq!((sharing.factor(1, 1), sharing.factor(6, 0)), (1.0, 3.0));
        let one = Sharing { cores: 1, ranks: 1, threads: 1, contention: 1.0 };
        assert_eq!((one.factor(1, 0), one.factor(1, 1)), (1.0, 2.0));
        // A rank of two threads shares nothing with itself.
        let pairs = Sharing { cores: 6, ranks: 1, threads: 2, contention: 1.5 };
        assert_eq!([0, 2, 4, 6, 12].map(|busy| pairs.factor(busy, 0)), [1.0, 1.0, 1.25, 1.5, 3.0]);
        let pair = Sharing { cores: 2, ..pairs };
        assert_eq!((pair.factor(2, 0), pair.factor(4, 0)), (1.0, 2.0));
    }
}
