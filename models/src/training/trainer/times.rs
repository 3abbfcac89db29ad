//! The times that a rank spends on computing, on others and on data.

use std::time::Duration;

/// The time that this rank has spent in some steps, by what it did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RankTimes {
    /// Number of the steps.
    pub steps: u64,
    /// The rest of the time. With tensors on a GPU, the host's time.
    pub compute: Duration,
    /// Waiting for other ranks, and for what they send: see
    /// [`waited_during`](ferrotron_parallel::collective::waited_during).
    pub communication: Duration,
    /// Waiting for samples.
    pub data: Duration,
}

impl RankTimes {
    pub(super) fn add_data(&mut self, seconds: f64) {
        self.data += Duration::from_secs_f64(seconds);
    }
}
