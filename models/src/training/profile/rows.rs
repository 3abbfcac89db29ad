//! What a recording adds up: rows of calls of one name in one pass.

use ferrotron_tensor::DType;
use ferrotron_tensor::ceilings::Ceilings;
use std::collections::BTreeMap;
use std::time::Duration;

/// All calls that have ended.
#[derive(Default)]
pub(super) struct Recording {
    pub steps: usize,
    /// Time of the steps.
    pub total: Duration,
    /// Time of them outside of the rows.
    pub outside: Duration,
    /// Rows by pass and name.
    pub rows: BTreeMap<(&'static str, String), Row>,
}

/// Calls of one name in one pass.
#[derive(Default)]
pub(super) struct Row {
    pub calls: usize,
    pub time: Duration,
    pub flops: f64,
    pub read: f64,
    pub written: f64,
    /// Seconds that the calls take at the ceilings.
    pub least_seconds: f64,
}

impl Row {
    /// Adds a call on operands of `dtype`, which has read and written so many bytes.
    pub fn add(
        &mut self,
        (dtype, flops, read, written): (DType, f64, f64, f64),
        time: Duration,
        ceilings: &Ceilings,
    ) {
        self.calls += 1;
        self.time += time;
        self.flops += flops;
        self.read += read;
        self.written += written;
        self.least_seconds += ceilings.least_seconds(dtype, flops, read, written);
    }
}
