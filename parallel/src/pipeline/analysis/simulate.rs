//! Simulates schedules: the start and end of each instruction, for given durations.

use ferrotron_tensor::{Error, Result};
use std::collections::HashMap;

use crate::pipeline::analysis::validate::validate;
use crate::pipeline::schedule::PipelineSchedule;
use crate::pipeline::schedule::instruction::{Instruction, Message};

/// Durations in seconds for a whole rank; with v chunks, each chunk takes a v-th.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StageTimes {
    /// Forward of a micro-batch, t_f.
    pub forward: f64,
    /// Gradient of the input, t_b of the zero-bubble paper. An unsplit backward takes t_b + t_w.
    pub backward_input: f64,
    /// Gradients of the weights, t_w.
    pub backward_weight: f64,
    /// Time from the end of the producing computation until the tensor has arrived. It does not block the sender.
    pub communication: f64,
}

impl Default for StageTimes {
    /// Equal times, as for the matrix products of a linear layer, and no communication.
    fn default() -> Self {
        StageTimes { forward: 1.0, backward_input: 1.0, backward_weight: 1.0, communication: 0.0 }
    }
}

impl StageTimes {
    /// Forward and backward of a micro-batch.
    pub fn microbatch(&self) -> f64 {
        self.forward + self.backward_input + self.backward_weight
    }

    fn validated(&self) -> Result<()> {
        let StageTimes { forward, backward_input, backward_weight, communication } = *self;
        let times = [forward, backward_input, backward_weight, communication];
        if times.iter().all(|time| time.is_finite() && *time >= 0.0) && self.microbatch() > 0.0 {
            return Ok(());
        }
        Err(Error::config(
            "pipeline times",
            format!(
                "forward {forward}, backward of the input {backward_input}, of the weights \
                 {backward_weight}, communication {communication}: none may be negative, and the \
                 first three not all zero"
            ),
        ))
    }

    /// Duration of a computation; 0 for messages and updates.
    fn duration(&self, instruction: &Instruction, chunks: usize) -> f64 {
        let whole = match instruction {
            Instruction::Forward { .. } => self.forward,
            Instruction::Backward { .. } => self.backward_input + self.backward_weight,
            Instruction::BackwardInput { .. } => self.backward_input,
            Instruction::BackwardWeight { .. } => self.backward_weight,
            _ => 0.0,
        };
        whole / chunks as f64
    }
}

/// An instruction with its time span. Messages take no time: a computation starts when its tensor has arrived.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    /// The instruction.
    pub instruction: Instruction,
    /// Start in seconds, relative to the start of the step.
    pub start: f64,
    /// End in seconds.
    pub end: f64,
}

/// The time spans of all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Timeline {
    /// The instructions of each rank in order.
    pub ranks: Vec<Vec<Span>>,
    /// Chunks on each rank.
    pub chunks: usize,
}

impl Timeline {
    /// Time until the last rank is done.
    pub fn total(&self) -> f64 {
        let ends = self.ranks.iter().filter_map(|spans| spans.last());
        ends.fold(0.0, |total, span| span.end.max(total))
    }

    /// Compute time of a rank.
    fn busy(&self, rank: usize) -> f64 {
        self.computations(rank).map(|span| span.end - span.start).sum()
    }

    /// Time of the step if no rank waited: the compute time of the busiest rank.
    pub fn ideal(&self) -> f64 {
        (0..self.ranks.len()).fold(0.0, |ideal, rank| self.busy(rank).max(ideal))
    }

    /// The bubble: total minus ideal time.
    pub fn bubble(&self) -> f64 {
        self.total() - self.ideal()
    }

    /// The computations of a rank with their time spans, without messages and updates.
    pub fn computations(&self, rank: usize) -> impl Iterator<Item = &Span> {
        let spans = self.ranks[rank].iter();
        spans.filter(|span| span.instruction.microbatch_and_chunk().is_some())
    }
}

/// Simulates the executor: each rank processes its list in order, messages are started without cost, and a
/// computation waits until its tensor has arrived. Results are deterministic to the last bit.
///
/// # Errors
/// Errors if durations are negative, not finite or all zero, or if [`validate`](crate::pipeline::validate) rejects the schedule.
pub fn simulate(schedule: &PipelineSchedule, times: &StageTimes) -> Result<Timeline> {
    times.validated()?;
    validate(schedule)?;
    let mut ranks: Vec<Vec<Span>> = vec![Vec::new(); schedule.stages()];
    // Arrival times by receiver and its name for the message.
    let mut arrivals: HashMap<(usize, Message), f64> = HashMap::new();
    let mut moved = true;
    while moved {
        moved = false;
        for (rank, spans) in ranks.iter_mut().enumerate() {
            while let Some(instruction) = schedule.instructions(rank).get(spans.len()) {
                let before = spans.last().map_or(0.0, |span| span.end);
                let needed = schedule.consumed(rank, instruction);
                let arrival = needed.map(|message| arrivals.get(&(rank, message)).copied());
                // Not sent yet: this rank continues in the next round.
                let Some(arrival) = arrival.unwrap_or(Some(before)) else { break };
                let start = arrival.max(before);
                let end = start + times.duration(instruction, schedule.chunks());
                for sent in instruction.sends() {
                    if let Some(received) = schedule.at_receiver(rank, sent) {
                        arrivals.insert((sent.peer, received), end + times.communication);
                    }
                }
                spans.push(Span { instruction: instruction.clone(), start, end });
                moved = true;
            }
        }
    }
    Ok(Timeline { ranks, chunks: schedule.chunks() })
}
