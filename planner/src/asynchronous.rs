//! Asynchronous updates, from a recorded synchronous step: all steps until every update is applied.
//!
//! Every rank takes the same time here, so a step takes its kernels, and the sums of its gradients run beside the next
//! steps. An update waits for the sums of its own step, once K later ones are launched; behind the last step all are waited for.
//! What a rank that is late costs the others is not predicted.

use ferrotron_parallel::data_parallel::AsyncUpdates;
use ferrotron_parallel::pipeline::{Instruction, PipelineSchedule};

use crate::program::Program;
use crate::steps::{Block, Step, Traffic};

/// The instructions of as many steps as lie between two drains, each like those of `step`, with an update behind it.
pub(crate) fn schedule(step: &PipelineSchedule, updates: AsyncUpdates) -> PipelineSchedule {
    let microbatches = step.microbatches();
    let of_step = |number: usize| {
        let shifted = move |instruction: &Instruction| {
            let mut instruction = instruction.clone();
            match &mut instruction {
                Instruction::Forward { microbatch, .. }
                | Instruction::Backward { microbatch, .. }
                | Instruction::BackwardInput { microbatch, .. }
                | Instruction::BackwardWeight { microbatch, .. } => {
                    *microbatch += number * microbatches;
                }
                _ => {}
            }
            instruction
        };
        let update = Instruction::Update { step: number };
        step.instructions(0).iter().map(shifted).chain([update])
    };
    let steps = updates.drain_interval;
    let instructions = (0..steps).flat_map(of_step).collect();
    PipelineSchedule::from_instructions(vec![instructions], steps * microbatches, step.chunks())
}

/// The program of those steps, from that of a synchronous one.
pub(crate) fn program(mut step: Program, updates: AsyncUpdates) -> Program {
    let groups = step.groups.len();
    // The sums of gradients, and the call of the loss, in place of which the numbers of a step are summed.
    let mut sums: Vec<Step> = Vec::new();
    let mut calls = vec![0; groups];
    let traffic: Vec<Traffic> = step.groups.iter().map(|group| group.traffic).collect();
    let mut take = |block: &mut Block, kind: Traffic, most: usize| {
        let mut left = most;
        for at in &block.steps {
            if let Step::Start { group, seconds, operation, bytes, .. } = *at
                && traffic[group] == kind
                && left > 0
            {
                sums.push(Step::Start { group, number: calls[group], seconds, operation, bytes });
                (left, calls[group]) = (left - 1, calls[group] + 1);
            }
        }
        block.steps.retain(|at| !matches!(at, Step::Start { .. } | Step::Wait { .. }));
    };
    take(&mut step.before, Traffic::Data, 0); // numbers that nobody asks for
    for block in step.blocks_mut() {
        take(block, Traffic::Data, usize::MAX);
    }
    let mut behind = std::mem::take(&mut step.behind);
    let mut loss = behind.clone();
    take(&mut loss, Traffic::World, 1);
    take(&mut behind, Traffic::Data, usize::MAX);
    let calls = &calls;
    let waits_for = |steps_ago: i64| {
        let wait = |group: usize| {
            (0..calls[group])
                .map(move |call| Step::Wait { group, number: call - steps_ago * calls[group] })
        };
        (0..groups).flat_map(wait).collect::<Vec<Step>>()
    };
    let (late, steps) = (updates.max_staleness, updates.drain_interval);
    let of_step = |number: usize| {
        let mut block = Block { steps: sums.clone(), launches: Vec::new() };
        let first = number.saturating_sub(late);
        let applied = if number + 1 == steps {
            first..steps
        } else {
            first..number + 1 - late.min(number + 1)
        };
        for earlier in applied {
            block.steps.extend(waits_for((number - earlier) as i64));
            block.steps.extend(behind.steps.iter().cloned());
            block.launches.extend(&behind.launches);
        }
        block
    };
    let blocks = (0..steps).map(of_step).collect();
    step.over_steps(blocks)
}
