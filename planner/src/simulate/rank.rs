//! One rank's way through a step.

use ferrotron_parallel::pipeline::{Direction, Instruction, Message, PipelineSchedule, Span};
use ferrotron_tensor::Result;

use super::shared::Shared;
use crate::program::Program;
use crate::sharing::Piece;
use crate::stage_time::{Slot, StageTime};
use crate::steps::{Block, Part, Step, Traffic};
use crate::trace::{About, Mark};

/// Whether an instruction has a block of the program: a computation or an update.
fn is_block(instruction: &Instruction) -> bool {
    instruction.microbatch_and_chunk().is_some()
        || matches!(instruction, Instruction::Update { .. })
}

/// A call of a group.
#[derive(Clone, Copy)]
enum Call {
    /// Ends at this time.
    Until(f64),
    /// Begins when it is waited for, and takes so long.
    Later(f64),
    /// Takes so long once all stages have come.
    Meeting(f64),
}

pub(super) struct Rank<'a> {
    stage: usize,
    program: &'a Program,
    pub(super) now: f64,
    /// 0 before the instructions, then one more than their index, and last behind them.
    phase: usize,
    /// The next step of the phase.
    at: usize,
    began: f64,
    /// Calls of each group, and their number when the phase began.
    calls: Vec<Vec<Call>>,
    first: Vec<i64>,
    /// The times at which the links within the node and to the network are free.
    free: [f64; 2],
    sending: [Option<(usize, Message)>; 2],
    pub(super) time: StageTime,
    pub(super) spans: Vec<Span>,
    pub(super) marks: Option<Vec<Mark>>,
    /// Where all time went, if that is asked for.
    pub(super) pieces: Option<Vec<Piece>>,
    open: Vec<(&'static str, String, f64)>,
}

impl<'a> Rank<'a> {
    /// A rank that keeps `(marks, pieces)`.
    pub(super) fn new(
        stage: usize,
        program: &'a Program,
        (with_marks, with_pieces): (bool, bool),
    ) -> Rank<'a> {
        let groups = program.groups.len();
        let time = StageTime { launches: vec![0; program.launches.len()], ..StageTime::default() };
        let mut rank = Rank {
            stage,
            program,
            now: 0.0,
            phase: 0,
            at: 0,
            began: 0.0,
            calls: vec![Vec::new(); groups],
            first: vec![0; groups],
            free: [0.0; 2],
            sending: [None, None],
            time,
            spans: Vec::new(),
            marks: with_marks.then(Vec::new),
            pieces: with_pieces.then(Vec::new),
            open: Vec::new(),
        };
        for step in &program.carried {
            if let Step::Start { group, seconds, operation, bytes, .. } = *step {
                let call = Call::Until(rank.occupy(group, seconds));
                rank.begin(group, call, seconds, (operation, bytes));
            }
        }
        rank.first = rank.calls.iter().map(|calls| calls.len() as i64).collect();
        rank
    }

    pub(super) fn is_done(&self, schedule: &PipelineSchedule) -> bool {
        self.phase > schedule.instructions(self.stage).len() + 1
    }

    /// Runs until the rank waits for another stage; returns whether it did anything.
    pub(super) fn advance(&mut self, shared: &mut Shared<'_>) -> Result<bool> {
        let mut moved = false;
        let (program, schedule) = (self.program, shared.schedule);
        let instructions = schedule.instructions(self.stage);
        while self.phase <= instructions.len() + 1 {
            let instruction = self.phase.checked_sub(1).and_then(|index| instructions.get(index));
            let block = match instruction {
                None if self.phase == 0 => Some(&program.before),
                None => Some(&program.behind),
                Some(instruction) if is_block(instruction) => {
                    Some(program.block(instruction, schedule)?)
                }
                Some(_) => None,
            };
            let done = match (block, instruction) {
                (Some(block), _) => self.run(block, instruction, shared, &mut moved),
                (None, Some(instruction)) => self.exchange(instruction, shared, &mut moved),
                (None, None) => true,
            };
            if !done {
                return Ok(moved);
            }
            self.end_phase(block, instruction);
            moved = true;
        }
        Ok(moved)
    }

    fn end_phase(&mut self, block: Option<&Block>, instruction: Option<&Instruction>) {
        for (launch, count) in block.into_iter().flat_map(|block| &block.launches) {
            self.time.launches[*launch] += count;
        }
        if let Some(instruction) = instruction {
            let (start, end) = (self.began, self.now);
            let about = match instruction.microbatch_and_chunk() {
                Some((microbatch, chunk)) => About::Computation { microbatch, chunk },
                None => About::Nothing,
            };
            self.mark("instruction", instruction.to_string(), start, end, about);
            self.spans.push(Span { instruction: instruction.clone(), start, end });
        }
        (self.phase, self.at, self.began) = (self.phase + 1, 0, self.now);
        for (first, calls) in self.first.iter_mut().zip(&self.calls) {
            *first = calls.len() as i64;
        }
    }

    /// Runs the steps of a block; returns whether it came to the end.
    fn run(
        &mut self,
        block: &Block,
        instruction: Option<&Instruction>,
        shared: &mut Shared<'_>,
        moved: &mut bool,
    ) -> bool {
        while let Some(step) = block.steps.get(self.at) {
            let done = match step {
                Step::Compute(seconds, part) => {
                    self.compute(*seconds, *part);
                    true
                }
                Step::Start { group, number, seconds, operation, bytes } => {
                    self.start(*group, *number, *seconds, (*operation, *bytes), shared);
                    true
                }
                Step::Wait { group, number } => self.wait_for_call(*group, *number, shared),
                Step::Receive => self.receive(instruction, shared),
                Step::Sent(direction) => self.sent(*direction, shared),
                Step::Open(category, name) => {
                    if self.marks.is_some() {
                        self.open.push((category, name.clone(), self.now));
                    }
                    true
                }
                Step::Close => {
                    if let Some((category, name, start)) = self.open.pop() {
                        self.mark(category, name, start, self.now, About::Nothing);
                    }
                    true
                }
            };
            if !done {
                return false;
            }
            self.at += 1;
            *moved = true;
        }
        true
    }

    /// Posts the receives and starts the sends of an instruction, each send after the last of its direction.
    fn exchange(
        &mut self,
        instruction: &Instruction,
        shared: &mut Shared<'_>,
        moved: &mut bool,
    ) -> bool {
        if self.at == 0 {
            for message in instruction.receives() {
                let transfer = shared.messages.entry((self.stage, *message)).or_default();
                transfer.posted = Some(self.now);
            }
            (self.at, *moved) = (1, true);
        }
        while let Some(message) = instruction.sends().get(self.at - 1) {
            let direction = message.direction;
            if !self.sent(direction, shared) {
                return false;
            }
            let cost = self.program.messages[direction as usize];
            self.compute(cost.copy, Part::Memory);
            let busy = self.free[usize::from(cost.leaves_node)] > self.now;
            // Assumed: the two share the link equally, for as long as the message takes.
            let seconds = if busy { 2.0 * cost.seconds } else { cost.seconds };
            self.spend(Slot::Communicating(Traffic::Pipeline), self.now, self.now + seconds);
            if let Some(received) = shared.schedule.at_receiver(self.stage, message) {
                let key = (message.peer, received);
                let transfer = shared.messages.entry(key).or_default();
                (transfer.sent, transfer.seconds) = (Some(self.now), seconds);
                self.sending[direction as usize] = Some(key);
                let place = match direction {
                    Direction::Forward => "pp-forward",
                    Direction::Backward => "pp-backward",
                };
                let (start, end) = (self.now, self.now + seconds);
                let about = About::Call { group: place.to_string(), bytes: cost.bytes };
                self.mark("collective", "send".to_string(), start, end, about);
                if !shared.software.overlap_messages {
                    self.wait(end, seconds, Traffic::Pipeline);
                }
            }
            (self.at, *moved) = (self.at + 1, true);
        }
        true
    }

    fn start(
        &mut self,
        group: usize,
        number: i64,
        seconds: f64,
        (operation, bytes): (&'static str, u64),
        shared: &mut Shared<'_>,
    ) {
        let facts = &self.program.groups[group];
        let deferred = facts.traffic == Traffic::Data
            && !shared.software.overlap_grad_reduce
            && matches!(operation, "all_reduce" | "reduce_scatter");
        let call = if facts.stages > 1 {
            let key = (facts.name.clone(), self.first[group] + number);
            shared.meetings.entry(key).or_default().push(self.now);
            Call::Meeting(seconds)
        } else if deferred {
            Call::Later(seconds)
        } else {
            Call::Until(self.occupy(group, seconds))
        };
        self.begin(group, call, seconds, (operation, bytes));
    }

    fn begin(
        &mut self,
        group: usize,
        call: Call,
        seconds: f64,
        (operation, bytes): (&'static str, u64),
    ) {
        if let Call::Until(end) = call {
            let about = About::Call { group: self.program.groups[group].name.clone(), bytes };
            self.mark("collective", operation.to_string(), end - seconds, end, about);
        }
        self.calls[group].push(call);
    }

    /// Occupies the link of a group from now on, behind its other calls; returns the end.
    fn occupy(&mut self, group: usize, seconds: f64) -> f64 {
        let facts = &self.program.groups[group];
        let link = &mut self.free[usize::from(facts.leaves_node)];
        let start = link.max(self.now);
        let end = start + seconds;
        *link = end;
        self.spend(Slot::Communicating(facts.traffic), start, end);
        end
    }

    /// Runs kernels of `seconds`. Products, attention among them, have fewer multiprocessors as long as a call runs.
    fn compute(&mut self, seconds: f64, part: Part) {
        let start = self.now;
        let beside = (self.free[0].max(self.free[1]) - start).max(0.0);
        let taken = match part {
            Part::Products | Part::Attention => self.program.taken_by_calls,
            Part::Memory | Part::Optimizer => 0.0,
        };
        self.now += (seconds / (1.0 - taken)).min(seconds + taken * beside);
        self.spend(Slot::Computing(part), start, self.now);
    }

    /// Notes where the time from `start` to `end` went.
    pub(super) fn spend(&mut self, slot: Slot, start: f64, end: f64) {
        self.time.add(slot, end - start);
        if let Some(pieces) = self.pieces.as_mut().filter(|_| end > start) {
            pieces.push(Piece { slot, start, end });
        }
    }

    fn wait_for_call(&mut self, group: usize, number: i64, shared: &mut Shared<'_>) -> bool {
        let facts = &self.program.groups[group];
        let number = self.first[group] + number;
        let Some(call) = usize::try_from(number).ok().and_then(|at| self.calls[group].get(at))
        else {
            return true; // a call of an earlier step
        };
        match *call {
            Call::Until(end) => self.wait(end, f64::INFINITY, facts.traffic),
            Call::Later(seconds) => {
                let end = self.occupy(group, seconds);
                self.calls[group][number as usize] = Call::Until(end);
                self.wait(end, f64::INFINITY, facts.traffic);
            }
            Call::Meeting(seconds) => {
                let came = shared.meetings.get(&(facts.name.clone(), number));
                let Some(came) = came.filter(|came| came.len() == facts.stages) else {
                    return false;
                };
                let began = came.iter().fold(0.0, |last: f64, time| last.max(*time));
                let end = began + seconds;
                self.spend(Slot::Communicating(facts.traffic), began, end);
                self.wait(end, seconds, facts.traffic);
            }
        }
        true
    }

    fn receive(&mut self, instruction: Option<&Instruction>, shared: &mut Shared<'_>) -> bool {
        let needed = instruction.and_then(|needs| shared.schedule.consumed(self.stage, needs));
        let Some(message) = needed else { return true };
        self.wait_for_message((self.stage, message), shared)
    }

    /// Waits for the last message of a direction.
    fn sent(&mut self, direction: Direction, shared: &mut Shared<'_>) -> bool {
        let Some(key) = self.sending[direction as usize] else { return true };
        self.wait_for_message(key, shared)
    }

    fn wait_for_message(&mut self, key: (usize, Message), shared: &mut Shared<'_>) -> bool {
        let transfer = shared.messages.get(&key).copied().unwrap_or_default();
        let Some(end) = transfer.end() else { return false };
        self.wait(end, transfer.seconds, Traffic::Pipeline);
        true
    }

    /// Waits until `end`: at most `communicating` of the wait is communication, the rest is bubble.
    fn wait(&mut self, end: f64, communicating: f64, traffic: Traffic) {
        let wait = end - self.now;
        if wait <= 0.0 {
            return;
        }
        let exposed = wait.min(communicating);
        let began = if exposed < wait { end - exposed } else { self.now };
        self.spend(Slot::Bubble, self.now, began);
        self.spend(Slot::Exposed(traffic), began, end);
        self.mark("wait", "wait".to_string(), self.now, end, About::Nothing);
        self.now = end;
    }

    /// Marks the steps that the trainer takes one by one. All of a pipeline without a flush are one, until it is drained;
    /// asynchronous ones, which have no pipeline, end with an update each.
    pub(super) fn mark_steps(&mut self, schedule: &PipelineSchedule) {
        let is_update = |span: &&Span| matches!(span.instruction, Instruction::Update { .. });
        let mut ends: Vec<f64> = Vec::new();
        if schedule.stages() == 1 {
            ends.extend(self.spans.iter().filter(is_update).map(|span| span.end));
        }
        ends.pop(); // what lies behind the last update belongs to its step
        ends.push(self.now);
        let mut start = 0.0;
        for (index, end) in ends.into_iter().enumerate() {
            self.mark("step", "step".to_string(), start, end, About::Step(index + 1));
            start = end;
        }
    }

    fn mark(&mut self, category: &'static str, name: String, start: f64, end: f64, about: About) {
        let stage = self.stage;
        if let Some(marks) = &mut self.marks {
            marks.push(Mark { stage, category, name, start, end, about });
        }
    }
}
