//! The steps of programs: kernels, calls, waits and spans, with durations.

use ferrotron_parallel::pipeline::Direction;
use std::collections::HashSet;

/// The parts into which a step's time is divided while a GPU computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Matrix products.
    Products,
    /// Attention between its projections.
    Attention,
    /// Kernels that memory bounds.
    Memory,
    /// The update of the weights.
    Optimizer,
}

impl Part {
    /// Every part.
    pub const ALL: [Part; 4] = [Part::Products, Part::Attention, Part::Memory, Part::Optimizer];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        ["products", "attention", "memory-bound kernels", "optimizer"][self as usize]
    }
}

/// The kinds of communication, by the ranks that take part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Traffic {
    /// Ranks along the tensor axis.
    Tensor,
    /// Ranks along the context axis.
    Context,
    /// Gradients and weights, along data and context.
    Data,
    /// Activations and their gradients between stages.
    Pipeline,
    /// Gradients of tied embeddings, between the first and the last stage.
    Embedding,
    /// Numbers of all ranks, such as the norm of the gradients.
    World,
}

impl Traffic {
    /// Every kind.
    pub const ALL: [Traffic; 6] = [
        Traffic::Tensor,
        Traffic::Context,
        Traffic::Data,
        Traffic::Pipeline,
        Traffic::Embedding,
        Traffic::World,
    ];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        ["tensor", "context", "data", "pipeline", "embedding", "world"][self as usize]
    }

    /// The kind of a group's calls, by the name that the mesh gives it.
    pub(crate) fn of(group: &str) -> Traffic {
        match group {
            "tp" => Traffic::Tensor,
            "cp" => Traffic::Context,
            "dp" | "dp-cp" => Traffic::Data,
            "pp-ends" => Traffic::Embedding,
            _ if direction(group).is_some() => Traffic::Pipeline,
            _ => Traffic::World,
        }
    }
}

/// The direction of a channel between stages, by the name of its group.
pub(crate) fn direction(group: &str) -> Option<Direction> {
    match group.split(' ').next() {
        Some("pp-forward") => Some(Direction::Forward),
        Some("pp-backward") => Some(Direction::Backward),
        _ => None,
    }
}

/// A group of a program.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupFacts {
    /// Its name.
    pub name: String,
    /// The kind of its calls.
    pub traffic: Traffic,
    /// Whether its calls use the network between nodes.
    pub leaves_node: bool,
    /// Number of pipeline stages whose ranks take part.
    pub stages: usize,
}

/// A step of a program. Calls are numbered relative to the first one of the same part of the program.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// Kernels run one after another.
    Compute(f64, Part),
    /// A call that takes so long begins.
    Start {
        /// Index of the group.
        group: usize,
        /// Relative number.
        number: i64,
        /// Duration.
        seconds: f64,
        /// The operation's name.
        operation: &'static str,
        /// Bytes of the whole buffer.
        bytes: u64,
    },
    /// The GPU waits for a call.
    Wait {
        /// Index of the group.
        group: usize,
        /// Relative number.
        number: i64,
    },
    /// The GPU waits for the tensor that the instruction needs from another stage.
    Receive,
    /// The GPU waits for the last message of a direction that it has sent.
    Sent(Direction),
    /// A span opens, by its category and name.
    Open(&'static str, String),
    /// The span that was opened last closes.
    Close,
}

/// Steps, and how often they launch each kernel.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Block {
    /// The steps, in order.
    pub steps: Vec<Step>,
    /// Index and number of launches.
    pub launches: Vec<(usize, u64)>,
}

impl Block {
    /// Takes the gathers of weights out of the end of a step that does not wait for them: the next one does.
    pub(crate) fn take_carried(&mut self, groups: &[GroupFacts]) -> Vec<Step> {
        let waited_for = |step: &Step| match step {
            Step::Wait { group, number } => Some((*group, *number)),
            _ => None,
        };
        let waits: HashSet<(usize, i64)> = self.steps.iter().filter_map(waited_for).collect();
        let is_carried = |step: &Step| match step {
            Step::Start { group, number, operation: "all_gather", .. } => {
                groups[*group].traffic == Traffic::Data && !waits.contains(&(*group, *number))
            }
            _ => false,
        };
        let (carried, rest) = std::mem::take(&mut self.steps).into_iter().partition(is_carried);
        self.steps = rest;
        carried
    }
}

/// A message between stages.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct MessageCost {
    /// Time on the link.
    pub seconds: f64,
    /// Time of the sender's kernels.
    pub copy: f64,
    /// Bytes that this rank sends.
    pub bytes: u64,
    /// Whether the message uses the network between nodes.
    pub leaves_node: bool,
}
