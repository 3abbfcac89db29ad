//! Lower bounds of a step's time and of a rank's bytes, by which the search leaves layouts out.
//!
//! The first bound comes from one block of the model: a rank in the middle of a pipeline with a block on each stage takes
//! one micro-batch. All blocks of a stage take at least the time of their kernels for each micro-batch, the last stage that of
//! the head, and p-1 more stages fill and drain the pipeline. The second bound has the programs of the layout's own stages, each without waits
//! for other stages.

use ferrotron_models::memory::RankMemory;
use ferrotron_parallel::pipeline::PipelineSchedule;
use ferrotron_tensor::Result;
use std::collections::HashMap;

use crate::program::Program;
use crate::space::{Layout, Recomputation};
use crate::steps::{Block, GroupFacts, Part, Step};

/// Rounding in sums.
const ROUNDING: f64 = 1.0 - 1e-9;
/// Share of bytes that are certain: buffers are rounded up, and that differs by layout.
const CERTAIN: f64 = 0.95;

/// A block of the model in one micro-batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct BlockCost {
    /// Forward and backward.
    pub(crate) seconds: f64,
    /// Forward alone.
    pub(crate) forward: f64,
    /// Seconds of the last stage beside its blocks, forward and backward.
    pub(crate) head: f64,
    /// Memory with all states.
    pub(crate) memory: RankMemory,
}

impl BlockCost {
    /// The cost of the only block of a stage whose step of one micro-batch was recorded, and of the last such stage.
    pub(crate) fn new(program: &Program, last: &Program, memory: RankMemory) -> BlockCost {
        let computing = |block: &Block| -> f64 {
            let seconds = block.steps.iter().map(|step| match step {
                Step::Compute(seconds, _) => *seconds,
                _ => 0.0,
            });
            seconds.sum()
        };
        let of = |program: &Program| program.blocks_of(0).map(computing).sum();
        let (seconds, whole): (f64, f64) = (of(program), of(last));
        let forward = program.forwards_of(0).map(computing).sum();
        BlockCost { seconds, forward, head: (whole - seconds).max(0.0), memory }
    }

    /// The least time of a step in a layout of a model of so many blocks.
    pub(crate) fn seconds(&self, layout: &Layout, blocks: usize) -> f64 {
        let of_stage = (blocks / layout.pipeline) as f64;
        // Weights' gradients that are put off may fill the end.
        let fills = if layout.schedule.splits_backward() { self.forward } else { self.seconds };
        let fill = fills * (layout.pipeline - 1) as f64 / layout.chunks as f64;
        let microbatches = layout.microbatches() as f64;
        ROUNDING * (of_stage * (self.seconds * microbatches + fill) + self.head * microbatches)
    }

    /// The least bytes of a rank of the first stage; `keeps_activations` unless some wait in host memory.
    pub(crate) fn bytes(&self, layout: &Layout, blocks: usize, keeps_activations: bool) -> f64 {
        let memory = &self.memory;
        let ranks = (layout.data() * layout.context) as f64;
        let share = |from: u8, bytes: usize| {
            bytes as f64 / if layout.zero_stage >= from { ranks } else { 1.0 }
        };
        // Backward keeps more for a while where it computes again.
        let saved = match layout.recompute {
            Recomputation::None if keeps_activations => {
                memory.activations_bytes * layout.microbatches().min(layout.pipeline)
            }
            _ => 0,
        };
        let optimizer = match layout.offload.has_states() {
            true => 0.0,
            false => share(1, memory.optimizer_bytes),
        };
        let states = optimizer + share(2, memory.gradients_bytes) + share(3, memory.weights_bytes);
        let bytes = states + saved as f64;
        CERTAIN * bytes * (blocks / layout.pipeline) as f64
    }
}

/// The least time of a step over `schedule` with the program of each stage.
///
/// Errors if a program lacks a computation.
pub(crate) fn least_seconds(schedule: &PipelineSchedule, programs: &[&Program]) -> Result<f64> {
    let mut fill = 0.0;
    let mut least = 0.0_f64;
    let (first, splits) = (&programs[0], programs[0].splits_backward());
    let ends = match splits {
        true => 0.0,
        false => alone(&first.before, &first.groups) + alone(&first.behind, &first.groups),
    };
    for (stage, program) in programs.iter().enumerate() {
        let alone = |block: &Block| alone(block, &program.groups);
        let mut known: HashMap<*const Block, f64> = HashMap::new();
        let mut work = 0.0;
        for instruction in schedule.instructions(stage) {
            if instruction.microbatch_and_chunk().is_some() {
                let block = program.block(instruction, schedule)?;
                work += *known.entry(block).or_insert_with(|| alone(block));
            }
        }
        // The first micro-batch has come through all stages before, and the last one goes back through them: at the same
        // time as gradients of weights, where these are put off.
        let last = stage + 1 == programs.len();
        let whole = if last { work + fill + ends } else { work };
        least = least.max(whole).max(beside_calls(schedule, stage, program)?);
        let fills: f64 = match splits {
            true => program.forwards_of(0).map(alone).sum(),
            false => program.blocks_of(0).map(alone).sum(),
        };
        fill += fills / schedule.chunks() as f64;
    }
    Ok(ROUNDING * least)
}

/// The kernels of a stage, and what products lose to the calls beside them: calls that outlast all other kernels run beside
/// products, or while these wait, which takes longer.
fn beside_calls(schedule: &PipelineSchedule, stage: usize, program: &Program) -> Result<f64> {
    let (mut computing, mut others, mut calls) = (0.0, 0.0, [0.0_f64; 2]);
    for instruction in schedule.instructions(stage) {
        if instruction.microbatch_and_chunk().is_none() {
            continue;
        }
        for step in &program.block(instruction, schedule)?.steps {
            match step {
                Step::Compute(seconds, Part::Products | Part::Attention) => computing += seconds,
                Step::Compute(seconds, _) => others += seconds,
                Step::Start { group, seconds, .. } if program.groups[*group].stages == 1 => {
                    calls[usize::from(program.groups[*group].leaves_node)] += seconds;
                }
                _ => {}
            }
        }
    }
    let under_products = (calls[0].max(calls[1]) - others).clamp(0.0, computing);
    Ok(computing + others + program.taken_by_calls * under_products)
}

/// The least duration of a block: its calls find free links, and it waits for no other stage.
fn alone(block: &Block, groups: &[GroupFacts]) -> f64 {
    let (mut now, mut free) = (0.0_f64, [0.0_f64; 2]);
    let mut ends: Vec<(usize, i64, f64)> = Vec::new();
    for step in &block.steps {
        match step {
            Step::Compute(seconds, _) => now += seconds,
            Step::Start { group, number, seconds, .. } => {
                let facts = &groups[*group];
                let end = match facts.stages {
                    1 => {
                        let link = &mut free[usize::from(facts.leaves_node)];
                        *link = link.max(now) + seconds;
                        *link
                    }
                    _ => now + seconds,
                };
                ends.push((*group, *number, end));
            }
            Step::Wait { group, number } => {
                let found = ends.iter().rev().find(|end| (end.0, end.1) == (*group, *number));
                now = now.max(found.map_or(0.0, |end| end.2));
            }
            _ => {}
        }
    }
    now
}
