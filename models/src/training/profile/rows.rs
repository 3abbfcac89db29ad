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
    /// The work of each call.
    works: Vec<Amount>,
}

/// The dtype of a call's operands, its floating-point operations, and the bytes that it reads and writes.
pub(super) type Amount = (DType, f64, f64, f64);

impl Row {
    /// Adds a call.
    pub fn add(&mut self, amount: Amount, time: Duration) {
        let (_, flops, read, written) = amount;
        self.calls += 1;
        self.time += time;
        self.flops += flops;
        self.read += read;
        self.written += written;
        self.works.push(amount);
    }

    /// The seconds that the calls take at the ceilings.
    pub fn least_seconds(&self, ceilings: &Ceilings) -> f64 {
        let least = |&(dtype, flops, read, written): &Amount| {
            ceilings.least_seconds(dtype, flops, read, written)
        };
        self.works.iter().map(least).sum()
    }
}
