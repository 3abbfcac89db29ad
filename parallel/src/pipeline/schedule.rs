//! Schedules: the instructions of every rank, and the topology of virtual stages.

pub(super) mod blocking_sim;
pub(super) mod config;
pub(super) mod generate;
pub(super) mod instruction;
pub(super) mod transfers;

use super::schedule::instruction::{Direction, Instruction, Message};

/// The instructions of every pipeline rank, for one step or, without a flush, for several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PipelineSchedule {
    stages: usize,
    microbatches: usize,
    steps: usize,
    chunks: usize,
    ranks: Vec<Vec<Instruction>>,
}

impl PipelineSchedule {
    /// A custom schedule, with one list per stage. It is not checked here: see [`validate`](super::validate).
    pub fn from_instructions(
        ranks: Vec<Vec<Instruction>>,
        microbatches: usize,
        chunks: usize,
    ) -> PipelineSchedule {
        let is_update =
            |instruction: &&Instruction| matches!(instruction, Instruction::Update { .. });
        let updates = ranks.first().map_or(0, |list| list.iter().filter(is_update).count());
        PipelineSchedule { stages: ranks.len(), microbatches, steps: updates.max(1), chunks, ranks }
    }

    /// Whether no rank runs any backward: a schedule for evaluation.
    pub fn is_forward_only(&self) -> bool {
        let is_backward = |instruction: &Instruction| {
            instruction.microbatch_and_chunk().is_some()
                && !matches!(instruction, Instruction::Forward { .. })
        };
        !self.ranks.iter().flatten().any(is_backward)
    }

    /// Number of pipeline ranks.
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// Number of micro-batches, of all steps.
    pub fn microbatches(&self) -> usize {
        self.microbatches
    }

    /// Number of steps: that of the updates, or 1 if the schedule has none.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// Number of chunks per rank.
    pub fn chunks(&self) -> usize {
        self.chunks
    }

    /// A rank's instructions, in order. Panics if there is no such rank.
    pub fn instructions(&self, rank: usize) -> &[Instruction] {
        &self.ranks[rank]
    }

    /// Every rank's instructions.
    pub fn ranks(&self) -> &[Vec<Instruction>] {
        &self.ranks
    }

    /// The virtual stage of a rank's chunk: `chunk * stages + rank`.
    pub(super) fn virtual_stage(&self, rank: usize, chunk: usize) -> usize {
        chunk * self.stages + rank
    }

    /// Number of virtual stages.
    fn virtual_stages(&self) -> usize {
        self.stages * self.chunks
    }

    /// The message that a chunk receives before its forward or backward; `None` at the ends of the model.
    pub(super) fn received(
        &self,
        direction: Direction,
        rank: usize,
        microbatch: usize,
        chunk: usize,
    ) -> Option<Message> {
        let stage = self.virtual_stage(rank, chunk);
        let from = match direction {
            Direction::Forward => stage.checked_sub(1)?,
            Direction::Backward => Some(stage + 1).filter(|&next| next < self.virtual_stages())?,
        };
        Some(Message { direction, microbatch, chunk, peer: from % self.stages })
    }

    /// The message that a chunk sends after its forward or backward; `None` at the ends of the model.
    pub(super) fn sent(
        &self,
        direction: Direction,
        rank: usize,
        microbatch: usize,
        chunk: usize,
    ) -> Option<Message> {
        // The neighbour on the other side.
        let opposite = match direction {
            Direction::Forward => Direction::Backward,
            Direction::Backward => Direction::Forward,
        };
        let message = self.received(opposite, rank, microbatch, chunk)?;
        Some(Message { direction, ..message })
    }

    /// The message that a computation waits for. `None` at the ends of the model, for the weight part of a backward,
    /// and for messages.
    pub fn consumed(&self, rank: usize, instruction: &Instruction) -> Option<Message> {
        let (direction, microbatch, chunk) = instruction.along()?;
        self.received(direction, rank, microbatch, chunk)
    }

    /// The message that carries a computation's result; `None` as for [`consumed`](Self::consumed).
    pub fn produced(&self, rank: usize, instruction: &Instruction) -> Option<Message> {
        let (direction, microbatch, chunk) = instruction.along()?;
        self.sent(direction, rank, microbatch, chunk)
    }

    /// The receiver's name for a message that `rank` sends; `None` if there is no such receiver.
    pub fn at_receiver(&self, rank: usize, sent: &Message) -> Option<Message> {
        let stage = self.virtual_stage(rank, sent.chunk);
        let to = match sent.direction {
            Direction::Forward => stage + 1,
            Direction::Backward => stage.checked_sub(1)?,
        };
        let fits = to < self.virtual_stages() && to % self.stages == sent.peer;
        fits.then_some(Message { chunk: to / self.stages, peer: rank, ..*sent })
    }
}
