//! State that replayed stages share: messages between them, and calls of groups that span them.

use ferrotron_parallel::pipeline::{Message, PipelineSchedule};
use std::collections::HashMap;

use crate::cluster::Software;

/// State of all stages.
pub(super) struct Shared<'a> {
    pub(super) schedule: &'a PipelineSchedule,
    pub(super) software: Software,
    /// Transfers by receiver and its name for the message.
    pub(super) messages: HashMap<(usize, Message), Transfer>,
    /// Calls of groups that span stages, by group and number: when each stage came.
    pub(super) meetings: HashMap<(String, i64), Vec<f64>>,
}

impl<'a> Shared<'a> {
    pub(super) fn new(schedule: &'a PipelineSchedule, software: Software) -> Shared<'a> {
        Shared { schedule, software, messages: HashMap::new(), meetings: HashMap::new() }
    }
}

/// A message on its way.
#[derive(Clone, Copy, Default)]
pub(super) struct Transfer {
    pub(super) sent: Option<f64>,
    pub(super) posted: Option<f64>,
    pub(super) seconds: f64,
}

impl Transfer {
    /// The end, if both sides have come.
    pub(super) fn end(&self) -> Option<f64> {
        Some(self.sent?.max(self.posted?) + self.seconds)
    }
}
