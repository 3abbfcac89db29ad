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
    pub time: Duration,
    pub calls: Vec<Amount>,
}

/// The work of a call on operands of `dtype`: floating-point operations, and bytes that it reads and writes.
pub(super) struct Amount {
    pub dtype: DType,
    pub flops: f64,
    pub read: f64,
    pub written: f64,
}

impl Row {
    /// Adds a call.
    pub fn add(&mut self, amount: Amount, time: Duration) {
        self.time += time;
        self.calls.push(amount);
    }

    pub fn flops(&self) -> f64 {
        self.calls.iter().map(|call| call.flops).sum()
    }

    /// Bytes that the calls read and write.
    pub fn bytes(&self) -> f64 {
        self.calls.iter().map(|call| call.read + call.written).sum()
    }

    /// The seconds that the calls take at the ceilings.
    pub fn least_seconds(&self, ceilings: &Ceilings) -> f64 {
        let least =
            |call: &Amount| ceilings.least_seconds(call.dtype, call.flops, call.read, call.written);
        self.calls.iter().map(least).sum()
    }
}
