//! Memory of all pipeline stages, of which each rank estimates its own alone.

use ferrotron_nn::Axis;
use ferrotron_parallel::collective::{Group, Reduction};
use ferrotron_tensor::{Device, Result, Tensor};

use super::memory::{MemoryEstimator, RankMemory, StageMemory};
use crate::training::model::Model;

/// Numbers that a stage tells: its layers, the rank with the highest peak, and that rank's memory.
const NUMBERS: usize = 12;

impl<M: Model> MemoryEstimator<M> {
    /// The pipeline stage of a rank.
    pub fn stage_of(&self, rank: usize) -> usize {
        self.layout.coordinate(rank, Axis::Pipeline)
    }

    /// The memory of all stages, of which each rank of `world` gives its [own](MemoryEstimator::stage), in one call of 96
    /// bytes a stage. All ranks call this, with the same layout.
    ///
    /// Errors as the communication does.
    pub fn stages_together(&self, own: &StageMemory, world: &Group) -> Result<Vec<StageMemory>> {
        let stages = self.layout.size(Axis::Pipeline);
        let mut all = vec![0_i64; stages * NUMBERS];
        // Ranks of a stage have the same numbers.
        all[own.stage * NUMBERS..][..NUMBERS].copy_from_slice(&numbers(own));
        let device = Device::cpu(1)?;
        let all = Tensor::from_slice(&device, &all, &[all.len()])?;
        let all = world.all_reduce(all, Reduction::Max)?.wait()?.to_vec::<i64>()?;
        let (all, _) = all.as_chunks::<NUMBERS>();
        let stages = all.iter().enumerate();
        Ok(stages.map(|(stage, numbers)| from_numbers(stage, own.ranks, numbers)).collect())
    }
}

fn numbers(of: &StageMemory) -> [i64; NUMBERS] {
    let RankMemory {
        weights_bytes,
        gradients_bytes,
        optimizer_bytes,
        activations_bytes,
        logits_bytes,
        buffers_bytes,
        snapshot_bytes,
        workspace_bytes,
        total_bytes,
        host_bytes,
    } = of.memory;
    [
        of.layers,
        of.rank,
        weights_bytes,
        gradients_bytes,
        optimizer_bytes,
        activations_bytes,
        logits_bytes,
        buffers_bytes,
        snapshot_bytes,
        workspace_bytes,
        total_bytes,
        host_bytes,
    ]
    .map(|number| number as i64)
}

fn from_numbers(stage: usize, ranks: usize, numbers: &[i64; NUMBERS]) -> StageMemory {
    let [
        layers,
        rank,
        weights_bytes,
        gradients_bytes,
        optimizer_bytes,
        activations_bytes,
        logits_bytes,
        buffers_bytes,
        snapshot_bytes,
        workspace_bytes,
        total_bytes,
        host_bytes,
    ] = numbers.map(|number| number as usize);
    let memory = RankMemory {
        weights_bytes,
        gradients_bytes,
        optimizer_bytes,
        activations_bytes,
        logits_bytes,
        buffers_bytes,
        snapshot_bytes,
        workspace_bytes,
        total_bytes,
        host_bytes,
    };
    StageMemory { stage, layers, ranks, rank, memory }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::gpt::{Gpt, GptConfig};
    use crate::planning::memory::{DocumentResets, PlannedDevice};
    use crate::training::batch_size::{BatchSize, BatchSizeConfig};
    use crate::training::trainer::TrainerConfig;
    use ferrotron_nn::schedule::LrSchedule;
    use ferrotron_parallel::collective::{WorldConfig, run_threads};
    use ferrotron_parallel::mesh::ParallelDims;
    use ferrotron_parallel::tensor_parallel::SequenceParallel;
    use ferrotron_tensor::DType;

    #[test]
    fn ranks_that_estimate_their_own_stage_know_all() {
        let layout = ParallelDims::new(6, 2, 1, 3).unwrap();
        let batch_size = BatchSizeConfig {
            micro_batch_size: 2,
            global_batch_size: Some(8),
            ..BatchSizeConfig::default()
        };
        let batch_size = BatchSize::new(batch_size).unwrap();
        let plan = MemoryEstimator::<Gpt> {
            model: GptConfig::gpt2(16, 4, 32, 2, 16),
            layout,
            sequence_parallel: SequenceParallel::On,
            trainer: TrainerConfig::new(1, LrSchedule::constant(1e-3).unwrap(), batch_size),
            dtype: DType::F32,
            seq_length: 16,
            documents: DocumentResets::default(),
            device: PlannedDevice::Cpu { threads: 1 },
        };
        let all = plan.stages().unwrap();
        assert!(all[0].memory != all[1].memory && all[1].memory != all[2].memory);
        let found = run_threads(6, &WorldConfig::default(), |world| {
            let everyone = world.everyone()?;
            let own = plan.stage(plan.stage_of(world.rank()))?;
            let stages = plan.stages_together(&own, &everyone)?;
            Ok((stages, everyone.traffic().calls_and_bytes("all_reduce").0))
        });
        for (stages, calls) in found.into_iter().map(Result::unwrap) {
            assert_eq!((&stages, calls), (&all, 1));
        }
    }
}
