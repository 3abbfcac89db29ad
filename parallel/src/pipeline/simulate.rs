//! The simulator: when each instruction begins and ends, for given durations.

use ferrotron_tensor::{Error, Result};
use std::collections::HashMap;

use super::check::check;
use super::instruction::{Instruction, Message};
use super::schedule::Schedule;

/// Durations in seconds on a whole rank: with v chunks each chunk takes a v-th.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Times {
    /// Forward of a microbatch, t_f.
    pub forward: f64,
    /// Gradient of the input, t_b of the zero-bubble paper. An unsplit backward takes this and the weights'.
    pub backward_input: f64,
    /// Gradients of the weights, t_w.
    pub backward_weight: f64,
    /// From the end of a send's computation until the tensor is there. It costs the sender no time.
    pub communication: f64,
}

impl Default for Times {
    /// Equal parts, as the matrix products of a linear layer have, and no communication.
    fn default() -> Self {
        Times { forward: 1.0, backward_input: 1.0, backward_weight: 1.0, communication: 0.0 }
    }
}

impl Times {
    /// Forward and backward of a microbatch.
    pub fn microbatch(&self) -> f64 {
        self.forward + self.backward_input + self.backward_weight
    }

    fn validated(&self) -> Result<()> {
        let Times { forward, backward_input, backward_weight, communication } = *self;
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

    /// Duration of an instruction that computes; none for messages.
    fn of(&self, instruction: &Instruction, chunks: usize) -> f64 {
        let whole = match instruction {
            Instruction::Forward { .. } => self.forward,
            Instruction::Backward { .. } => self.backward_input + self.backward_weight,
            Instruction::BackwardInput { .. } => self.backward_input,
            Instruction::BackwardWeight { .. } => self.backward_weight,
            Instruction::Send(_) | Instruction::Receive(_) | Instruction::Exchange { .. } => 0.0,
        };
        whole / chunks as f64
    }
}

/// When an instruction ran. Messages take no time: a computation begins when its tensor is there.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    /// What ran.
    pub instruction: Instruction,
    /// Its begin in seconds, from the begin of the step.
    pub start: f64,
    /// Its end.
    pub end: f64,
}

/// When every rank did what.
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

    /// Time in which a rank computes.
    fn busy(&self, rank: usize) -> f64 {
        self.computations(rank).map(|span| span.end - span.start).sum()
    }

    /// The time that the step would take if no rank ever waited: that of the busiest.
    pub fn ideal(&self) -> f64 {
        (0..self.ranks.len()).fold(0.0, |ideal, rank| self.busy(rank).max(ideal))
    }

    /// What the pipeline costs: the total time beyond the ideal one.
    pub fn bubble(&self) -> f64 {
        self.total() - self.ideal()
    }

    /// What a rank computes and when, without messages.
    pub fn computations(&self, rank: usize) -> impl Iterator<Item = &Span> {
        let spans = self.ranks[rank].iter();
        spans.filter(|span| {
            span.instruction.sends().is_empty() && span.instruction.receives().is_empty()
        })
    }
}

/// Times a schedule as an executor runs it: each rank goes through its list in order, messages are only
/// started there and cost no time, and a computation waits until the tensor that it needs has arrived.
/// The same input gives the same timeline to the last bit.
///
/// # Errors
/// Durations that are negative, not finite or all zero; a schedule that [`check`] refuses.
pub fn simulate(schedule: &Schedule, times: &Times) -> Result<Timeline> {
    times.validated()?;
    check(schedule)?;
    let mut ranks: Vec<Vec<Span>> = vec![Vec::new(); schedule.stages()];
    // When each tensor is there, by receiver and its name for the message.
    let mut arrivals: HashMap<(usize, Message), f64> = HashMap::new();
    let mut moved = true;
    while moved {
        moved = false;
        for (rank, spans) in ranks.iter_mut().enumerate() {
            while let Some(instruction) = schedule.instructions(rank).get(spans.len()) {
                let before = spans.last().map_or(0.0, |span| span.end);
                let needed = schedule.needed(rank, instruction);
                let arrival = needed.map(|message| arrivals.get(&(rank, message)).copied());
                // Made later: this rank goes on in the next round.
                let Some(arrival) = arrival.unwrap_or(Some(before)) else { break };
                let start = arrival.max(before);
                let end = start + times.of(instruction, schedule.chunks());
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
