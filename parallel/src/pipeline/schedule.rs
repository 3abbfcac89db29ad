//! A schedule: the instructions of every rank, and who neighbours whom.

use super::instruction::{Direction, Instruction, Message};

/// The instructions of every rank of a pipeline for one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    stages: usize,
    microbatches: usize,
    chunks: usize,
    ranks: Vec<Vec<Instruction>>,
}

impl Schedule {
    /// A schedule written by hand, one list for each of the stages. Nothing is checked here: see
    /// [`check`](super::check).
    pub fn from_instructions(
        ranks: Vec<Vec<Instruction>>,
        microbatches: usize,
        chunks: usize,
    ) -> Schedule {
        Schedule { stages: ranks.len(), microbatches, chunks, ranks }
    }

    /// Whether no rank runs any backward: a schedule for evaluation.
    pub fn is_forward_only(&self) -> bool {
        let is_backward = |instruction: &Instruction| {
            instruction.place().is_some() && !matches!(instruction, Instruction::Forward { .. })
        };
        !self.ranks.iter().flatten().any(is_backward)
    }

    /// Ranks of the pipeline.
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// Microbatches of the step.
    pub fn microbatches(&self) -> usize {
        self.microbatches
    }

    /// Chunks on each rank.
    pub fn chunks(&self) -> usize {
        self.chunks
    }

    /// What a rank does, in order. Panics if there is no such rank.
    pub fn instructions(&self, rank: usize) -> &[Instruction] {
        &self.ranks[rank]
    }

    /// What every rank does.
    pub fn ranks(&self) -> &[Vec<Instruction>] {
        &self.ranks
    }

    /// Number of the virtual stage that a rank's chunk is: `chunk * stages + rank`.
    pub(super) fn virtual_stage(&self, rank: usize, chunk: usize) -> usize {
        chunk * self.stages + rank
    }

    /// Number of the virtual stages: the last one is `virtual_stages() - 1`.
    fn virtual_stages(&self) -> usize {
        self.stages * self.chunks
    }

    /// What a rank's chunk receives before its forward or backward; `None` at the ends of the model.
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

    /// What a rank's chunk sends after its forward or backward; `None` at the ends of the model.
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

    /// The message whose tensor a computation needs; `None` at the ends of the model, for the weight part
    /// of a backward, and for messages.
    pub fn needed(&self, rank: usize, instruction: &Instruction) -> Option<Message> {
        let (direction, microbatch, chunk) = instruction.along()?;
        self.received(direction, rank, microbatch, chunk)
    }

    /// The message that carries on what a computation made; `None` as for [`needed`](Self::needed).
    pub fn made(&self, rank: usize, instruction: &Instruction) -> Option<Message> {
        let (direction, microbatch, chunk) = instruction.along()?;
        self.sent(direction, rank, microbatch, chunk)
    }

    /// How the receiver names what `rank` sends; `None` if there is no such receiver.
    pub(super) fn at_receiver(&self, rank: usize, sent: &Message) -> Option<Message> {
        let stage = self.virtual_stage(rank, sent.chunk);
        let to = match sent.direction {
            Direction::Forward => stage + 1,
            Direction::Backward => stage.checked_sub(1)?,
        };
        let fits = to < self.virtual_stages() && to % self.stages == sent.peer;
        fits.then_some(Message { chunk: to / self.stages, peer: rank, ..*sent })
    }
}
