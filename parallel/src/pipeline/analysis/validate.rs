//! Validates schedules: proves completeness and freedom from deadlock, and counts peak activations.

use ferrotron_tensor::{Error, Result};
use std::collections::HashMap;

use crate::pipeline::analysis::rule::{Rule, must, wrong};
use crate::pipeline::analysis::versions::weight_versions;
use crate::pipeline::schedule::PipelineSchedule;
use crate::pipeline::schedule::blocking_sim::BlockingSim;
use crate::pipeline::schedule::instruction::{Direction, Instruction, Message};

/// The peak number of activations in memory on a rank, in units of one micro-batch of one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PeakActivations {
    /// Activations between the start of their forward and the end of their backward (its input part, if split).
    pub activations: usize,
    /// Deferred weight gradients, which save each layer's input and output gradient.
    pub deferred: usize,
    /// Peak of the sum of both, which may be less than the sum of the peaks.
    pub total: usize,
}

/// Proves that a schedule can run, and returns the peak of each rank.
///
/// It checks the following conditions.
///
/// - Each micro-batch has exactly one forward on every virtual stage, after its input has arrived. Its one backward
///   follows after the gradient of its output has arrived. If the backward is split, its weight part comes last. In a
///   schedule for evaluation, no rank runs a backward, and nothing is kept.
/// - Every tensor between virtual stages on different ranks is sent once, after it was computed, and received once.
/// - Weights are used and updated as [`weight_versions`] demands.
/// - On each channel (a direction between a pair of ranks) both ends list the same messages in the same order.
/// - With blocking, unbuffered sends every rank reaches the end of its list. It then does with buffered sends too.
///
/// # Errors
/// The first violation, with rank, instruction index and instruction; for a deadlock, those of every waiting rank.
pub fn validate(schedule: &PipelineSchedule) -> Result<Vec<PeakActivations>> {
    let sizes = [schedule.stages(), schedule.microbatches(), schedule.chunks()];
    if sizes.contains(&0) {
        let [stages, microbatches, chunks] = sizes;
        return Err(wrong(format!(
            "{stages} stages, {microbatches} microbatches and {chunks} chunks: all must be positive"
        )));
    }
    let peaks = (0..schedule.stages()).map(|rank| follow(schedule, rank)).collect::<Result<_>>()?;
    weight_versions(schedule)?;
    compare_channels(schedule)?;
    let mut rendezvous = BlockingSim::new(schedule, schedule.ranks());
    if !rendezvous.advance(schedule.ranks()) {
        return Err(deadlock(schedule, &rendezvous));
    }
    Ok(peaks)
}

/// The progress of a micro-batch on one chunk of a rank.
#[derive(Debug, Clone, Copy, Default)]
struct MicrobatchProgress {
    input_received: bool,
    forward_done: bool,
    output_sent: bool,
    gradient_received: bool,
    input_gradient_done: bool,
    gradient_sent: bool,
    weight_gradient_done: bool,
}

/// Checks order and completeness of a rank's list, as far as they depend on this rank alone.
fn follow(schedule: &PipelineSchedule, rank: usize) -> Result<PeakActivations> {
    let mut walk = RankWalk {
        schedule,
        rank,
        forward_only: schedule.is_forward_only(),
        progress: vec![MicrobatchProgress::default(); schedule.microbatches() * schedule.chunks()],
        live: PeakActivations::default(),
        peak: PeakActivations::default(),
    };
    for (index, instruction) in schedule.instructions(rank).iter().enumerate() {
        walk.take(instruction).map_err(|why| {
            wrong(format!("rank {rank}, instruction {index}, {instruction}: {why}"))
        })?;
    }
    for chunk in 0..schedule.chunks() {
        for microbatch in 0..schedule.microbatches() {
            if let Some(missing) = walk.missing(microbatch, chunk) {
                return Err(wrong(format!(
                    "rank {rank} ends after {} instructions without {missing} of microbatch \
                     {microbatch}, chunk {chunk}",
                    schedule.instructions(rank).len()
                )));
            }
        }
    }
    Ok(walk.peak)
}

struct RankWalk<'a> {
    schedule: &'a PipelineSchedule,
    rank: usize,
    /// No rank runs a backward, so no activation is kept.
    forward_only: bool,
    progress: Vec<MicrobatchProgress>,
    live: PeakActivations,
    peak: PeakActivations,
}

impl RankWalk<'_> {
    fn at(
        &mut self,
        microbatch: usize,
        chunk: usize,
    ) -> std::result::Result<&mut MicrobatchProgress, String> {
        let (microbatches, chunks) = (self.schedule.microbatches(), self.schedule.chunks());
        if microbatch >= microbatches || chunk >= chunks {
            return Err(format!("there are {microbatches} microbatches and {chunks} chunks"));
        }
        Ok(&mut self.progress[chunk * microbatches + microbatch])
    }

    fn take(&mut self, instruction: &Instruction) -> Rule {
        match *instruction {
            Instruction::Forward { microbatch, chunk } => self.forward(microbatch, chunk)?,
            Instruction::Backward { microbatch, chunk } => {
                self.backward(microbatch, chunk)?;
                self.at(microbatch, chunk)?.weight_gradient_done = true;
                self.live.activations -= 1;
            }
            Instruction::BackwardInput { microbatch, chunk } => {
                self.backward(microbatch, chunk)?;
                self.live.activations -= 1;
                self.live.deferred += 1;
            }
            Instruction::BackwardWeight { microbatch, chunk } => {
                let at = self.at(microbatch, chunk)?;
                must(at.input_gradient_done, "its input part has not run")?;
                must(!at.weight_gradient_done, "it is there already")?;
                at.weight_gradient_done = true;
                self.live.deferred -= 1;
            }
            // Checked by `weight_versions`.
            Instruction::UseWeights { .. } | Instruction::Update { .. } => {}
            Instruction::Send(_) | Instruction::Receive(_) | Instruction::Exchange { .. } => {
                for message in instruction.sends() {
                    self.send(message)?;
                }
                for message in instruction.receives() {
                    self.receive(message)?;
                }
            }
        }
        self.live.total = self.live.activations + self.live.deferred;
        self.peak.activations = self.peak.activations.max(self.live.activations);
        self.peak.deferred = self.peak.deferred.max(self.live.deferred);
        self.peak.total = self.peak.total.max(self.live.total);
        Ok(())
    }

    fn forward(&mut self, microbatch: usize, chunk: usize) -> Rule {
        let (schedule, rank) = (self.schedule, self.rank);
        let at = self.at(microbatch, chunk)?;
        let needs = schedule.received(Direction::Forward, rank, microbatch, chunk);
        must(!at.forward_done, "it is a second forward")?;
        must(needs.is_none() || at.input_received, "its input has not been received")?;
        at.forward_done = true;
        self.live.activations += usize::from(!self.forward_only);
        Ok(())
    }

    fn backward(&mut self, microbatch: usize, chunk: usize) -> Rule {
        let (schedule, rank) = (self.schedule, self.rank);
        let at = self.at(microbatch, chunk)?;
        let needs = schedule.received(Direction::Backward, rank, microbatch, chunk);
        must(at.forward_done, "its forward has not run")?;
        must(!at.input_gradient_done, "it is a second backward")?;
        must(
            needs.is_none() || at.gradient_received,
            "the gradient of its output has not been received",
        )?;
        at.input_gradient_done = true;
        Ok(())
    }

    fn send(&mut self, message: &Message) -> Rule {
        let Message { direction, microbatch, chunk, .. } = *message;
        let (schedule, rank) = (self.schedule, self.rank);
        let at = self.at(microbatch, chunk)?;
        addressed(message, schedule.sent(direction, rank, microbatch, chunk))?;
        let (made, sent) = match direction {
            Direction::Forward => (at.forward_done, &mut at.output_sent),
            Direction::Backward => (at.input_gradient_done, &mut at.gradient_sent),
        };
        must(made, "what it sends has not been computed")?;
        must(!*sent, "it is a second send")?;
        *sent = true;
        Ok(())
    }

    fn receive(&mut self, message: &Message) -> Rule {
        let Message { direction, microbatch, chunk, .. } = *message;
        let (schedule, rank) = (self.schedule, self.rank);
        let at = self.at(microbatch, chunk)?;
        addressed(message, schedule.received(direction, rank, microbatch, chunk))?;
        let received = match direction {
            Direction::Forward => &mut at.input_received,
            Direction::Backward => &mut at.gradient_received,
        };
        must(!*received, "it is a second receive")?;
        *received = true;
        Ok(())
    }

    /// The first missing step of a micro-batch on a chunk.
    fn missing(&self, microbatch: usize, chunk: usize) -> Option<&'static str> {
        let at = self.progress[chunk * self.schedule.microbatches() + microbatch];
        let sends =
            |direction| self.schedule.sent(direction, self.rank, microbatch, chunk).is_some();
        // Receives need no check: without them no forward or backward ran.
        let steps = [
            (at.forward_done, "the forward"),
            (at.output_sent || !sends(Direction::Forward), "sending the output"),
            (at.input_gradient_done, "the backward"),
            (at.gradient_sent || !sends(Direction::Backward), "sending the gradient of the input"),
            (at.weight_gradient_done, "the weight part of the backward"),
        ];
        let steps = if self.forward_only { &steps[..2] } else { &steps[..] };
        steps.iter().find_map(|&(done, what)| (!done).then_some(what))
    }
}

fn addressed(message: &Message, expected: Option<Message>) -> Rule {
    match expected {
        None => Err("this end of the model has no neighbour there".to_string()),
        Some(expected) if expected.peer != message.peer => {
            Err(format!("the neighbour there is rank {}", expected.peer))
        }
        Some(_) => Ok(()),
    }
}

/// Direction, sender, receiver.
type Channel = (Direction, usize, usize);

/// A message as named by its receiver, with rank and index of its instruction.
type Listed = (Message, usize, usize);

/// Checks that both ends of every channel list the same messages in the same order.
fn compare_channels(schedule: &PipelineSchedule) -> Result<()> {
    let mut sent: HashMap<Channel, Vec<Listed>> = HashMap::new();
    let mut received: Vec<(Channel, Listed)> = Vec::new();
    for (rank, list) in schedule.ranks().iter().enumerate() {
        for (index, instruction) in list.iter().enumerate() {
            for message in instruction.sends() {
                let channel = (message.direction, rank, message.peer);
                // `follow` has checked that the receiver exists.
                if let Some(named) = schedule.at_receiver(rank, message) {
                    sent.entry(channel).or_default().push((named, rank, index));
                }
            }
            for &message in instruction.receives() {
                let channel = (message.direction, message.peer, rank);
                received.push((channel, (message, rank, index)));
            }
        }
    }
    // Every send and receive happens once, so equal contents imply equal numbers.
    let mut taken: HashMap<Channel, usize> = HashMap::new();
    for (channel, (message, rank, index)) in received {
        let next = taken.entry(channel).or_default();
        let found = sent.get(&channel).and_then(|messages| messages.get(*next));
        *next += 1;
        let receiver = &schedule.instructions(rank)[index];
        match found {
            Some((named, ..)) if *named == message => {}
            Some(&(_, sender, at)) => {
                return Err(wrong(format!(
                    "rank {rank}, instruction {index}, {receiver}: the next message of rank {sender} is \
                     another one, from its instruction {at}, {}",
                    schedule.instructions(sender)[at]
                )));
            }
            None => {
                return Err(wrong(format!(
                    "rank {rank}, instruction {index}, {receiver}: rank {} sends nothing more",
                    message.peer
                )));
            }
        }
    }
    Ok(())
}

fn deadlock(schedule: &PipelineSchedule, rendezvous: &BlockingSim) -> Error {
    let waiting: Vec<String> = (0..schedule.stages())
        .filter_map(|rank| {
            let index = rendezvous.position(rank);
            let instruction = schedule.instructions(rank).get(index)?;
            Some(format!("rank {rank}, instruction {index}, {instruction}"))
        })
        .collect();
    wrong(format!("deadlock, these wait for each other: {}", waiting.join("; ")))
}
