//! Computes the bytes that a rank sends in a training step, per kind of group.
//!
//! With a = micro-batch x local positions x hidden size elements, per micro-batch:
//!
//! | axis | communication | elements sent |
//! |---|---|---|
//! | tp | two all-reduces per direction in a block (Shoeybi et al., arXiv 1909.08053, figure 4); one after the embedding, one of the head's gradient | 2 (t-1)/t a each |
//! | tp, sequence parallel | six all-gathers and four reduce-scatters in a block (Korthikanti et al., arXiv 2205.05198, section 4.2.2); two of these gather again for backward | (t-1)/t a each |
//! | tp, last stage | all-reduce of three numbers per token in vocabulary-parallel cross-entropy, in f32 or wider | 2 (t-1)/t x 3 tokens |
//! | tp, pipeline | all-gather of a message received in t shards | (t-1)/t a each |
//! | cp | rings of keys and values in a block, in backward with their gradients (Liu et al., arXiv 2310.01889) | (3c - 2) times those of the rank |
//! | pp | activations to the next stage, gradients to the previous one | a/t each |
//! | recomputation | the forward communication of recomputed modules | two halves each of attention and MLP, (c - 1) of a ring; a half for each distributed input |
//! | tp, Adafactor | sums over rows or columns of sharded tensors that span ranks, and two numbers per tensor, in f64, once per step | 2 (t-1)/t each |
//! | tp, Muon | all-gather of the momentum of each sharded matrix, in f32 or wider, once per step | (t-1)/t each |
//! | dp | gradients and weights | see [`DataParallel::expected_traffic`] |
//!
//! [`DataParallel::expected_traffic`]: ferrotron_parallel::data_parallel::DataParallel::expected_traffic

use ferrotron_nn::Axis;
use ferrotron_parallel::pipeline::{PipelineConfig, PipelineSchedule};
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{Result, partition_range};

use crate::model::gpt::{Gpt, RegionInputs};
use crate::training::trainer::Trainer;

/// Bytes that a rank sends in a step, without the scalars norm, loss and number of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepTraffic {
    /// Bytes to ranks along the tensor axis.
    pub tensor: u64,
    /// Bytes to ranks along the context axis: keys and values.
    pub context: u64,
    /// Bytes to adjacent pipeline stages.
    pub pipeline: u64,
    /// Gradients and weights, to all ranks with the same parameters.
    pub data: u64,
    /// Bytes for tensors that are sharded along the tensor axis: Adafactor's sums, and the shards of Muon's matrices.
    pub optimizer: u64,
    /// Weights, per averaging, if replicas take independent steps. Averaging is not part of a step here.
    pub average: u64,
}

/// The bytes that this rank sends in its next step over sequences of `seq_length`.
///
/// # Errors
/// A pipeline schedule that cannot be made for the micro-batches of that step.
pub fn expected_traffic(trainer: &Trainer<Gpt>, seq_length: usize) -> Result<StepTraffic> {
    let (model, mesh) = (trainer.model(), trainer.mesh());
    let (tp, cp) = (mesh.axis(Axis::Tensor), mesh.axis(Axis::Context));
    let sizes = &trainer.config().batch_size;
    let microbatches = sizes.microbatches(trainer.progress().consumed_samples);
    let parallel = &trainer.config().parallel;
    let sequence_parallel = mesh.sequence() == SequenceParallel::On;

    let tokens = sizes.micro_batch_size() * seq_length / cp.size();
    let activation = tokens * model.hidden_size;
    let t = tp.size();
    // An all-gather or a reduce-scatter; an all-reduce is both.
    let half = activation * (t - 1) / t;
    let groups = partition_range(model.num_query_groups, t, tp.rank()).len();
    let key_values = tokens * 2 * groups * model.kv_channels;

    let (mut layers, mut joined, mut rings, mut messages) = (0, 0, 0, 0);
    for part in trainer.parts().iter().map(Gpt::chunk) {
        let blocks = part.blocks.len();
        let recompute = parallel.recompute.recompute_count(blocks);
        let inner = usize::from(!part.first) + usize::from(!part.last);
        messages += inner;
        let (first, last) = (usize::from(part.first), usize::from(part.last));
        layers += half
            * match sequence_parallel {
                false => 8 * blocks + 2 * first + 2 * last + inner,
                true => 10 * blocks + 2 * first + 3 * last,
            };
        layers += half * 2 * (recompute.attention + recompute.mlp);
        if parallel.recompute.inputs() == RegionInputs::Distributed {
            // Without the input received from the previous stage.
            let inputs = parallel.recompute.regions(blocks).len();
            layers += half * (inputs - usize::from(!part.first));
        }
        joined += last * 2 * (3 * tokens) * (t - 1) / t;
        rings += match cp.size() {
            1 => 0,
            c => blocks * (3 * c - 2) + recompute.core * (c - 1),
        };
    }
    let width = trainer.scope().dtype().size();
    let bytes = |elements: usize| (elements * microbatches * width) as u64;
    let accumulated = |numbers: usize| (numbers * microbatches * width.max(4)) as u64;
    let schedule = PipelineSchedule::new(&PipelineConfig {
        kind: parallel.pipeline_schedule,
        stages: mesh.axis(Axis::Pipeline).size(),
        microbatches,
        chunks: parallel.chunks,
    })?;
    let instructions = schedule.instructions(mesh.axis(Axis::Pipeline).rank());
    let sent = |steps| {
        trainer.data_parallel().expected_pipeline_traffic(instructions, microbatches, steps)
    };
    let sharded = sent(1);
    let average = match parallel.data_parallel.synchronize_every {
        1 => 0,
        every => sent(every).batch,
    };
    Ok(StepTraffic {
        tensor: bytes(layers) + accumulated(joined),
        context: bytes(rings * key_values),
        pipeline: bytes(messages * (activation / t)),
        data: sharded.batch + sharded.holders,
        optimizer: trainer.data_parallel().expected_shard_exchanges(trainer.optimizer()),
        average,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::data::{Batch, Samples, TokenBatch};
    use crate::model::gpt::{
        GptConfig, Recompute, RecomputeMethod, RecomputeModules, RecomputedAttention, RecomputedMlp,
    };
    use crate::training::batch_size::{BatchSize, BatchSizeConfig};
    use crate::training::trainer::{ParallelConfig, TrainerConfig};
    use ferrotron_nn::schedule::LrSchedule;
    use ferrotron_nn::{
        AdafactorConfig, GradDType, MuonConfig, OptimizerConfig, Scope, Sharding, StepSize,
    };
    use ferrotron_parallel::collective::{Group, WorldConfig, run_threads};
    use ferrotron_parallel::data_parallel::DataParallelConfig;
    use ferrotron_parallel::mesh::{Mesh, ParallelDims};
    use ferrotron_parallel::pipeline::ScheduleKind;
    use ferrotron_tensor::{DType, Device};

    const SEQ_LENGTH: usize = 16;

    struct Counting;

    impl Samples for Counting {
        fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
            let tokens = micro_batch * SEQ_LENGTH;
            TokenBatch {
                inputs: (0..tokens).map(|i| i as u32 % 8).collect(),
                targets: (0..tokens).map(|i| i as i64 % 5).collect(),
                first_sample,
                micro_batch,
                seq_length: SEQ_LENGTH,
            }
            .try_into()
        }

        fn seq_length(&self) -> usize {
            SEQ_LENGTH
        }
    }

    fn trainer(
        mesh: &Mesh,
        parallel: ParallelConfig,
        (optimizer, dtype): (OptimizerConfig, DType),
    ) -> Result<Trainer<Gpt>> {
        let batch_size = BatchSize::new(BatchSizeConfig {
            micro_batch_size: 2,
            data_parallel_size: mesh.axis(Axis::Data).size(),
            global_batch_size: Some(8),
            ..BatchSizeConfig::default()
        })?;
        let config = TrainerConfig {
            optimizer,
            parallel,
            ..TrainerConfig::new(1, LrSchedule::constant(1e-3)?, batch_size)
        };
        let model = GptConfig { num_query_groups: 2, ..GptConfig::gpt2(8, 4, 64, 4, SEQ_LENGTH) };
        Trainer::on_mesh(&Scope::new(&Device::cpu(1)?, dtype, 1), mesh, &model, config)
    }

    /// Counted bytes of the groups: along cp, along pp, and all others. Gradient reductions along the tensor axis and
    /// the layers' communication are not distinguished.
    fn counted(mesh: &Mesh) -> [u64; 3] {
        let bytes = |group: &Group| group.traffic().bytes();
        let stages = mesh.stages();
        let pipeline = bytes(&stages.forward_out) + bytes(&stages.backward_out);
        let others = [mesh.axis(Axis::Tensor), mesh.dp_cp(), &stages.embedding_group];
        [bytes(mesh.axis(Axis::Context)), pipeline, others.map(bytes).iter().sum()]
    }

    /// Asserts that every rank of a layout sends the expected bytes in a step; returns the bytes of the optimizer's
    /// sums.
    fn check(
        (ranks, (t, c, p), sequence): (usize, (usize, usize, usize), SequenceParallel),
        parallel: ParallelConfig,
        numbers: (OptimizerConfig, DType),
    ) -> Vec<u64> {
        let layout = ParallelDims::new(ranks, t, c, p).unwrap();
        let found = run_threads(ranks, &WorldConfig::default(), |world| {
            let mesh = Mesh::new(&world, layout, sequence)?;
            let mut trainer = trainer(&mesh, parallel, numbers)?;
            let want = expected_traffic(&trainer, SEQ_LENGTH)?;
            trainer.step(&Counting)?;
            trainer.data_parallel().wait_for_weights()?;
            Ok((counted(&mesh), want))
        });
        let of_rank = |(rank, found): (usize, Result<([u64; 3], StepTraffic)>)| {
            let (got, want) = found.unwrap();
            let StepTraffic { tensor, context, pipeline, data, optimizer, .. } = want;
            let what = format!("{layout:?} {sequence:?} {parallel:?} {numbers:?} rank {rank}");
            assert_eq!(got[..2], [context, pipeline], "{what}: context, pipeline");
            // In addition to the formula: all-reduces of a few scalars.
            let over = got[2].checked_sub(tensor + data + optimizer);
            assert!(over.is_some_and(|over| over <= 64), "{what}: {} of {want:?}", got[2]);
            optimizer
        };
        found.into_iter().enumerate().map(of_rank).collect()
    }

    #[test]
    fn the_sums_and_whole_parameters_of_adafactor_are_counted() {
        let relative = AdafactorConfig::default();
        let plain = AdafactorConfig { step_size: StepSize::Scheduled, ..relative };
        let (off, on) = (SequenceParallel::Off, SequenceParallel::On);
        let zero = |sharding, gradients| ParallelConfig {
            data_parallel: DataParallelConfig {
                sharding,
                gradients,
                bucket_numel: Some(5000),
                ..DataParallelConfig::default()
            },
            ..ParallelConfig::default()
        };
        let wide = |sharding| zero(sharding, GradDType::Accumulator);
        let narrow = |sharding| zero(sharding, GradDType::Weight);
        let f32 = DType::F32;
        for (layout, parallel, config, dtype) in [
            ((2, (2, 1, 1), off), wide(Sharding::None), plain, f32),
            ((8, (2, 2, 2), off), wide(Sharding::None), relative, f32),
            // Tied embeddings, on two stages with separate ranks along the tensor axis.
            ((4, (2, 1, 2), on), wide(Sharding::None), relative, f32),
            ((8, (2, 1, 2), off), wide(Sharding::Optimizer), relative, f32),
            ((4, (2, 1, 1), on), wide(Sharding::Weights), plain, f32),
            ((4, (1, 1, 1), off), wide(Sharding::Optimizer), plain, f32),
            ((4, (1, 2, 1), off), wide(Sharding::Gradients), plain, f32),
            ((4, (1, 1, 1), off), wide(Sharding::Weights), plain, DType::BF16),
            ((4, (1, 1, 1), off), narrow(Sharding::Optimizer), plain, DType::BF16),
            ((4, (2, 1, 1), off), narrow(Sharding::Gradients), relative, DType::BF16),
            ((4, (1, 1, 1), off), narrow(Sharding::None), plain, DType::BF16),
        ] {
            let sent = check(layout, parallel, (OptimizerConfig::Adafactor(config), dtype));
            let cut = layout.1.0 > 1;
            assert!(sent.iter().all(|&bytes| (bytes > 0) == cut), "{layout:?}: {sent:?}");
        }
        // In a block on two ranks: sums of columns for queries, keys, values and fc (64 inputs each), sums of rows
        // for the two projections (64 outputs). Before and after the blocks the token matrix. In the second call one
        // number each for these 6 + 1 matrices and for the biases of the 4.
        let sums = |blocks: usize| (blocks * 6 + 1) * 64;
        let numbers = |blocks: usize| blocks * 10 + 1;
        let of_two_ranks = check(
            (2, (2, 1, 1), off),
            wide(Sharding::None),
            (OptimizerConfig::Adafactor(plain), f32),
        );
        let want: u64 = 2 * 8 * (sums(4) + numbers(4)) as u64; // an all-reduce sends as much as there is on each
        assert_eq!(of_two_ranks.iter().sum::<u64>(), want);
    }

    /// Muon gathers the shards of each matrix.
    #[test]
    fn muon_sends_what_is_expected() {
        let off = SequenceParallel::Off;
        let muon = OptimizerConfig::Muon(MuonConfig::default());
        let sharded = |sharding| ParallelConfig {
            data_parallel: DataParallelConfig { sharding, ..DataParallelConfig::default() },
            ..ParallelConfig::default()
        };
        for (layout, sharding) in [
            ((2, (2, 1, 1), off), Sharding::None),
            ((4, (2, 1, 1), off), Sharding::Optimizer),
            ((4, (2, 1, 1), off), Sharding::Weights),
            ((4, (1, 1, 1), off), Sharding::Gradients),
            ((4, (2, 1, 2), off), Sharding::None),
        ] {
            let sent = check(layout, sharded(sharding), (muon, DType::F32));
            let cut = layout.1.0 > 1;
            assert!(sent.iter().all(|&bytes| (bytes > 0) == cut), "{layout:?}: {sent:?}");
        }
        // On two ranks each sends its half of every matrix of a block: q and the projection, k and v of half the width, and
        // those of the MLP.
        let alone = check((2, (2, 1, 1), off), sharded(Sharding::None), (muon, DType::F32));
        let (width, ffn) = (64, 4 * 64);
        let elements = 4 * (3 * width * width + 2 * width * ffn);
        assert_eq!(alone.iter().sum::<u64>(), 4 * elements as u64);
    }

    #[test]
    fn a_step_sends_what_is_expected() {
        let with = |recompute| ParallelConfig { recompute, ..ParallelConfig::default() };
        let region =
            |method, layers| Recompute::Full { method, layers, inputs: RegionInputs::Whole };
        let distributed = |method, layers| {
            with(Recompute::Full { method, layers, inputs: RegionInputs::Distributed })
        };
        let two = region(RecomputeMethod::Uniform, 2);
        let three = region(RecomputeMethod::Uniform, 3);
        let first = region(RecomputeMethod::Block, 1);
        let parts = |attention, mlp| Recompute::Selective(RecomputeModules { attention, mlp });
        let both = parts(RecomputedAttention::Layer, RecomputedMlp::Layer);
        let attention = parts(RecomputedAttention::Layer, RecomputedMlp::None);
        let mlp = parts(RecomputedAttention::Core, RecomputedMlp::Layer);
        let full = with(Recompute::FULL);
        // Several buckets per block, and tied embeddings.
        let zero = |sharding, recompute| ParallelConfig {
            data_parallel: DataParallelConfig {
                sharding,
                bucket_numel: Some(5000),
                ..DataParallelConfig::default()
            },
            recompute,
            ..ParallelConfig::default()
        };
        let (keep, again) = (Recompute::None, Recompute::FULL);
        let interleaved = ParallelConfig {
            pipeline_schedule: ScheduleKind::Interleaved,
            chunks: 2,
            ..ParallelConfig::default()
        };
        let in_chunks = |sharding| ParallelConfig {
            data_parallel: zero(sharding, keep).data_parallel,
            ..interleaved
        };
        let plain = ParallelConfig::default();
        let (off, on) = (SequenceParallel::Off, SequenceParallel::On);
        for (ranks, axes, sequence, parallel) in [
            (2, (2, 1, 1), off, plain),
            (2, (2, 1, 1), off, full),
            (2, (2, 1, 1), on, plain),
            (2, (2, 1, 1), on, full),
            (2, (1, 2, 1), off, plain),
            (4, (1, 4, 1), off, full),
            (2, (1, 1, 2), off, plain),
            (2, (1, 1, 2), off, interleaved),
            (4, (2, 1, 2), off, plain),
            (4, (2, 1, 2), on, plain),
            (8, (2, 2, 2), off, plain),
            (4, (1, 1, 2), off, plain),
            (2, (1, 1, 1), off, zero(Sharding::Optimizer, again)),
            (4, (1, 1, 2), off, zero(Sharding::Optimizer, again)),
            (4, (1, 1, 1), off, zero(Sharding::Gradients, again)),
            (2, (1, 1, 1), off, zero(Sharding::Weights, keep)),
            (2, (1, 1, 1), off, zero(Sharding::Weights, again)),
            (4, (2, 1, 1), on, zero(Sharding::Weights, keep)),
            (4, (2, 1, 1), on, zero(Sharding::Weights, again)),
            (4, (1, 2, 1), off, zero(Sharding::Weights, again)),
            (4, (1, 1, 2), off, zero(Sharding::Gradients, keep)),
            (4, (1, 1, 2), off, zero(Sharding::Weights, again)),
            (8, (2, 1, 2), on, zero(Sharding::Weights, keep)),
            (4, (1, 1, 2), off, in_chunks(Sharding::Gradients)),
            (4, (1, 1, 2), off, in_chunks(Sharding::Weights)),
            (2, (2, 1, 1), off, with(first)),
            (2, (2, 1, 1), off, distributed(RecomputeMethod::Uniform, 1)),
            (4, (2, 1, 2), off, distributed(RecomputeMethod::Uniform, 1)),
            (4, (2, 2, 1), off, distributed(RecomputeMethod::Block, 2)),
            (2, (2, 1, 1), on, with(three)),
            (2, (2, 1, 1), off, with(attention)),
            (2, (2, 1, 1), on, with(both)),
            (2, (2, 1, 1), on, with(Recompute::SELECTIVE)),
            (2, (1, 2, 1), off, with(Recompute::SELECTIVE)),
            (4, (1, 2, 2), off, with(mlp)),
            (4, (2, 2, 1), off, with(first)),
            (2, (1, 1, 1), off, zero(Sharding::Weights, two)),
            (2, (1, 1, 1), off, zero(Sharding::Weights, three)),
            (2, (1, 1, 1), off, zero(Sharding::Weights, first)),
            (2, (1, 1, 1), off, zero(Sharding::Weights, both)),
            (2, (1, 1, 1), off, zero(Sharding::Weights, attention)),
            (2, (1, 1, 1), off, zero(Sharding::Weights, mlp)),
            (4, (1, 2, 1), off, zero(Sharding::Weights, Recompute::SELECTIVE)),
        ] {
            let sent = check((ranks, axes, sequence), parallel, (OptimizerConfig::SGD, DType::F32));
            assert!(sent.iter().all(|&bytes| bytes == 0), "{sent:?}");
        }
    }
}
