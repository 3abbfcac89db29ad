//! Asynchronous updates, from a recorded synchronous step: all steps until every update is applied.
//!
//! Every rank takes the same time here, so a step takes its kernels, and the sums of its gradients run beside the next
//! steps. Behind its backward a step waits for the sums of the one K steps before, whose gradient buffers it needs, then
//! launches its own, and updates; behind the last step all are waited for. A test below compares this order with that of the
//! trainer. What a rank that is late costs the others is not predicted.

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
        let mut block = Block::default();
        let update = |block: &mut Block| {
            block.steps.extend(behind.steps.iter().cloned());
            block.launches.extend(&behind.launches);
        };
        if number >= late {
            block.steps.extend(waits_for(late as i64));
        }
        block.steps.extend(sums.iter().cloned());
        if number >= late {
            update(&mut block);
        }
        let outstanding = if number + 1 == steps { late.min(steps) } else { 0 };
        for steps_ago in (0..outstanding).rev() {
            block.steps.extend(waits_for(steps_ago as i64));
            update(&mut block);
        }
        block
    };
    let blocks = (0..steps).map(of_step).collect();
    step.over_steps(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Cluster;
    use crate::predict::RecordedRun;
    use crate::record::{Watched, Work, record};
    use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
    use ferrotron_models::data::{Batch, Samples};
    use ferrotron_models::gpt::{Gpt, GptConfig};
    use ferrotron_models::memory::{DocumentResets, MemoryEstimator, PlannedDevice};
    use ferrotron_models::trainer::{Model, ParallelConfig, Trainer, TrainerConfig};
    use ferrotron_nn::Scope;
    use ferrotron_nn::schedule::LrSchedule;
    use ferrotron_parallel::data_parallel::DataParallelConfig;
    use ferrotron_parallel::mesh::{Mesh, ParallelDims};
    use ferrotron_parallel::tensor_parallel::SequenceParallel;
    use ferrotron_tensor::{DType, Device, Result};
    use std::collections::BTreeMap;

    const RANKS: usize = 2;
    const SEQ_LENGTH: usize = 16;
    const DEVICE: PlannedDevice = PlannedDevice::Cpu { threads: 1 };

    /// The use that a rank makes of the sums of a step, by its number from 0 on. Calls of one step beside each other are one.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Event {
        Start(usize),
        Wait(usize),
        Update,
    }

    fn run(updates: AsyncUpdates) -> Result<MemoryEstimator<Gpt>> {
        let batch_size = BatchSize::new(BatchSizeConfig {
            micro_batch_size: 1,
            data_parallel_size: RANKS,
            global_batch_size: Some(2 * RANKS),
            ..BatchSizeConfig::default()
        })?;
        let data_parallel = DataParallelConfig {
            async_updates: Some(updates),
            bucket_numel: Some(5000), // several buckets
            ..DataParallelConfig::default()
        };
        let parallel = ParallelConfig { data_parallel, ..ParallelConfig::default() };
        let trainer = TrainerConfig::new(1, LrSchedule::constant(1e-3)?, batch_size);
        Ok(MemoryEstimator {
            model: GptConfig::gpt2(64, 2, 32, 2, SEQ_LENGTH),
            layout: ParallelDims::new(RANKS, 1, 1, 1)?,
            sequence_parallel: SequenceParallel::Off,
            trainer: TrainerConfig { parallel, ..trainer },
            dtype: DType::F32,
            seq_length: SEQ_LENGTH,
            documents: DocumentResets::default(),
            device: DEVICE,
        })
    }

    struct Example<'a>(&'a GptConfig);

    impl Samples for Example<'_> {
        fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
            let mut batch = Gpt::example_batch(self.0, micro_batch, SEQ_LENGTH)?;
            batch.first_sample = first_sample;
            Ok(batch)
        }

        fn seq_length(&self) -> usize {
            SEQ_LENGTH
        }
    }

    /// The event that a step's number makes, with the group and the number of the call; none for an update.
    type Found = Option<(fn(usize) -> Event, usize, usize)>;

    /// The events by step, and the calls of a step: each group has equally many in each of the `steps`.
    fn by_step(found: Vec<Found>, steps: usize) -> (Vec<Event>, usize) {
        let mut groups: BTreeMap<usize, (usize, usize)> = BTreeMap::new(); // first number, and calls
        for (event, group, number) in found.iter().flatten() {
            let (first, calls) = groups.entry(*group).or_insert((*number, 0));
            *first = *number.min(first);
            *calls += usize::from(event(0) == Event::Start(0));
        }
        let event = |found: Found| match found {
            None => Event::Update,
            Some((event, group, number)) => {
                let (first, calls) = groups[&group];
                event((number - first) * steps / calls)
            }
        };
        let mut events: Vec<Event> = found.into_iter().map(event).collect();
        events.dedup();
        (events, groups.values().map(|(_, calls)| calls).sum::<usize>() / steps)
    }

    /// The events of the trainer. Fake calls are done when they are waited for, as late as may be.
    fn taken(run: &MemoryEstimator<Gpt>, steps: usize) -> Result<(Vec<Event>, usize)> {
        let mesh = Mesh::fake(run.layout, 1, run.sequence_parallel)?;
        let scope = Scope::new(&Device::fake(1)?, run.dtype, 1);
        let mut trainer = Trainer::<Gpt>::on_mesh(&scope, &mesh, &run.model, run.trainer.clone())?;
        let mut found: Vec<Found> = Vec::new();
        for _ in 0..steps {
            let step = || trainer.step_async(&Example(&run.model));
            let ((), recording) = record(Watched::default(), step)?;
            let is_data = |group: &usize| Traffic::of(&recording.groups[*group]) == Traffic::Data;
            let instructions = recording.instructions.iter().flatten();
            for work in recording.before.iter().chain(instructions).chain(&recording.behind) {
                match work {
                    Work::Call { group, number, .. } if is_data(group) => {
                        found.push(Some((Event::Start, 0, *number as usize)));
                    }
                    Work::Await { group, number } if is_data(group) => {
                        found.push(Some((Event::Wait, 0, *number as usize)));
                    }
                    Work::Open("optimizer", _) => found.push(None),
                    _ => {}
                }
            }
        }
        Ok(by_step(found, steps))
    }

    /// The events of the predicted program.
    fn predicted(run: &MemoryEstimator<Gpt>, steps: usize) -> Result<(Vec<Event>, usize)> {
        let mut cluster = Cluster::named("dgx-a100-80")?;
        cluster.gpu.device = DEVICE;
        let recorded = RecordedRun::new(run, DEVICE, false)?;
        let (schedule, programs) = (recorded.schedule()?, recorded.programs(&cluster)?);
        let mut calls = vec![0; programs[0].groups.len()];
        let mut found: Vec<Found> = Vec::new();
        for instruction in schedule.instructions(0) {
            let first = calls.clone();
            let at = |group: usize, number: i64| (first[group] + number) as usize;
            for step in &programs[0].block(instruction, &schedule)?.steps {
                match step {
                    Step::Start { group, number, .. } => {
                        calls[*group] += 1;
                        found.push(Some((Event::Start, *group, at(*group, *number))));
                    }
                    Step::Wait { group, number } => {
                        found.push(Some((Event::Wait, *group, at(*group, *number))));
                    }
                    Step::Open("optimizer", _) => found.push(None),
                    _ => {}
                }
            }
        }
        Ok(by_step(found, steps))
    }

    #[test]
    fn sums_start_and_are_waited_for_in_the_order_of_the_trainer() -> Result<()> {
        for (max_staleness, drain_interval) in [(1, 5), (2, 5), (3, 7)] {
            let run = run(AsyncUpdates { max_staleness, drain_interval })?;
            let (events, calls) = taken(&run, drain_interval)?;
            assert!(calls > 3, "{calls} calls a step");
            let updates = events.iter().filter(|event| **event == Event::Update).count();
            assert_eq!(updates, drain_interval, "{events:?}");
            assert_eq!(predicted(&run, drain_interval)?, (events, calls), "K {max_staleness}");
        }
        Ok(())
    }
}
