//! Runs the messages of a schedule with blocking sends, to find where it deadlocks.
//!
//! Timing does not matter. A rank stays at an instruction until each of its messages has met its counterpart, and the
//! order of these matches does not affect where the ranks stop.

use crate::pipeline::schedule::PipelineSchedule;
use crate::pipeline::schedule::instruction::{Instruction, Message};

/// The position of every rank, and its pending messages there.
pub struct BlockingSim<'a> {
    schedule: &'a PipelineSchedule,
    position: Vec<usize>,
    sends: Vec<Vec<Message>>,
    receives: Vec<Vec<Message>>,
}

impl<'a> BlockingSim<'a> {
    /// All ranks before their first instruction. The schedule defines neighbours; the instructions are passed to
    /// [`advance`](Self::advance), since they may change between calls.
    pub fn new(schedule: &'a PipelineSchedule, lists: &[Vec<Instruction>]) -> Self {
        let ranks = lists.len();
        let empty = vec![Vec::new(); ranks];
        let mut start = BlockingSim {
            schedule,
            position: vec![0; ranks],
            sends: empty.clone(),
            receives: empty,
        };
        for (rank, list) in lists.iter().enumerate() {
            start.post(rank, list);
        }
        start
    }

    /// Advances until no rank can move; true if all have reached their ends.
    pub fn advance(&mut self, lists: &[Vec<Instruction>]) -> bool {
        let mut moved = true;
        while moved {
            moved = false;
            for (rank, list) in lists.iter().enumerate() {
                while self.position[rank] < list.len() {
                    moved |= self.meet(rank);
                    if !self.sends[rank].is_empty() || !self.receives[rank].is_empty() {
                        break;
                    }
                    self.position[rank] += 1;
                    self.post(rank, list);
                    moved = true;
                }
            }
        }
        self.position.iter().zip(lists).all(|(&position, list)| position == list.len())
    }

    /// The index of a rank's current instruction.
    pub fn position(&self, rank: usize) -> usize {
        self.position[rank]
    }

    /// The sends of a rank that wait for their receivers.
    pub fn waiting_sends(&self, rank: usize) -> &[Message] {
        &self.sends[rank]
    }

    /// Registers a receive that was added to a rank's current instruction.
    pub fn add_receive(&mut self, rank: usize, message: Message) {
        self.receives[rank].push(message);
    }

    fn post(&mut self, rank: usize, list: &[Instruction]) {
        if let Some(instruction) = list.get(self.position[rank]) {
            self.sends[rank].extend_from_slice(instruction.sends());
            self.receives[rank].extend_from_slice(instruction.receives());
        }
    }

    /// Removes the sends of a rank whose receivers are waiting, and those receives.
    fn meet(&mut self, rank: usize) -> bool {
        let before = self.sends[rank].len();
        let mut sends = std::mem::take(&mut self.sends[rank]);
        sends.retain(|sent| {
            let met = self.schedule.at_receiver(rank, sent).and_then(|received| {
                let there = self.receives[sent.peer].iter().position(|&other| other == received)?;
                Some(self.receives[sent.peer].remove(there))
            });
            met.is_none()
        });
        self.sends[rank] = sends;
        self.sends[rank].len() < before
    }
}
