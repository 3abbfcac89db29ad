//! Checks the weight versions of schedules without a flush, and counts those that a rank keeps.

use ferrotron_tensor::Result;

use crate::pipeline::analysis::rule::{Rule, must, wrong};
use crate::pipeline::schedule::PipelineSchedule;
use crate::pipeline::schedule::instruction::Instruction;

/// The number of weight versions that each rank keeps, the newest included: 1 with a flush.
///
/// It checks the following conditions.
///
/// - A selected version exists: version v needs v updates on that rank.
/// - The passes of a micro-batch use one version on a rank: backward has the weights of its forward.
/// - Updates are in the order of their steps. Each has a gradient, and no gradient is left behind the last one.
/// - All ranks have the same updates of the same micro-batches.
/// - Each rank ends with the newest version selected.
///
/// # Errors
/// The first violation, with rank, instruction index and instruction.
pub fn weight_versions(schedule: &PipelineSchedule) -> Result<Vec<usize>> {
    let mut kept = Vec::with_capacity(schedule.stages());
    let mut first: Option<Vec<Option<usize>>> = None;
    for rank in 0..schedule.stages() {
        let walk = follow(schedule, rank)?;
        let steps = first.get_or_insert_with(|| walk.steps.clone());
        if let Some(at) = (0..steps.len()).find(|&at| steps[at] != walk.steps[at]) {
            let step =
                |step: Option<usize>| step.map_or("no step".to_string(), |s| format!("step {s}"));
            return Err(wrong(format!(
                "rank {rank} updates by microbatch {} in {}, rank 0 in {}",
                at % schedule.microbatches(),
                step(walk.steps[at]),
                step(steps[at])
            )));
        }
        kept.push(walk.oldest + 1);
    }
    Ok(kept)
}

fn follow(schedule: &PipelineSchedule, rank: usize) -> Result<Walk> {
    let passes = schedule.microbatches() * schedule.chunks();
    let mut walk = Walk { used: vec![None; passes], steps: vec![None; passes], ..Walk::default() };
    for (index, instruction) in schedule.instructions(rank).iter().enumerate() {
        let at = instruction.microbatch_and_chunk();
        let pass = at.map(|(microbatch, chunk)| chunk * schedule.microbatches() + microbatch);
        walk.take(instruction, pass.unwrap_or_default()).map_err(|why| {
            wrong(format!("rank {rank}, instruction {index}, {instruction}: {why}"))
        })?;
    }
    if walk.selected != walk.newest {
        return Err(wrong(format!(
            "rank {rank} ends with version {} of the weights, the newest is {}",
            walk.selected, walk.newest
        )));
    }
    if walk.newest > 0 && !walk.since_update.is_empty() {
        let left = walk.since_update[0] % schedule.microbatches();
        return Err(wrong(format!(
            "rank {rank} ends without an update by the gradients of microbatch {left}"
        )));
    }
    Ok(walk)
}

/// A rank's way through its list. A pass is a micro-batch on a chunk, by its number.
#[derive(Default)]
struct Walk {
    /// The version that the next computation uses.
    selected: usize,
    /// The number of updates so far.
    newest: usize,
    /// The largest number of updates that a selected version is behind.
    oldest: usize,
    /// The version that each pass has used in forward.
    used: Vec<Option<usize>>,
    /// The step in which each pass has updated the weights.
    steps: Vec<Option<usize>>,
    /// The passes with gradients that no update has used.
    since_update: Vec<usize>,
}

impl Walk {
    fn take(&mut self, instruction: &Instruction, pass: usize) -> Rule {
        match *instruction {
            Instruction::UseWeights { version } => {
                let newest = self.newest;
                must(version <= newest, &format!("the newest version is {newest}"))?;
                self.selected = version;
            }
            Instruction::Update { step } => {
                must(step == self.newest, &format!("the next step is {}", self.newest))?;
                must(!self.since_update.is_empty(), "there is no gradient since the last one")?;
                for pass in self.since_update.drain(..) {
                    self.steps[pass] = Some(step);
                }
                self.newest += 1;
                self.selected = self.newest;
            }
            Instruction::Forward { .. } => {
                self.used[pass] = Some(self.selected);
                self.oldest = self.oldest.max(self.newest - self.selected);
            }
            Instruction::Backward { .. } => {
                self.backward(pass)?;
                self.since_update.push(pass);
            }
            Instruction::BackwardInput { .. } => self.backward(pass)?,
            Instruction::BackwardWeight { .. } => self.since_update.push(pass),
            Instruction::Send(_) | Instruction::Receive(_) | Instruction::Exchange { .. } => {}
        }
        Ok(())
    }

    fn backward(&mut self, pass: usize) -> Rule {
        let (used, selected) = (self.used[pass].unwrap_or_default(), self.selected);
        self.oldest = self.oldest.max(self.newest - selected);
        let why =
            format!("its forward used version {used} of the weights, this would use {selected}");
        must(used == selected, &why)
    }
}
