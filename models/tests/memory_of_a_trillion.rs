//! The memory number of the largest preset takes hardly any memory. A test of its own, since it looks at the
//! whole process.

use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron_models::bench::peak_rss_bytes;
use ferrotron_models::gpt::Gpt;
use ferrotron_models::gpt::Recompute;
use ferrotron_models::memory::{DocumentResets, MemoryEstimator, PlannedDevice};
use ferrotron_models::presets::Preset;
use ferrotron_models::trainer::{ParallelConfig, TrainerConfig};
use ferrotron_nn::schedule::LrSchedule;
use ferrotron_parallel::mesh::ParallelDims;
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::DType;

/// The model of arXiv 2205.05198, table 3, with the recomputation of its baseline.
#[test]
fn a_trillion_parameters_are_planned_in_100_megabytes() {
    let preset = Preset::find("ptd-1t").unwrap();
    let (tensor, pipeline) = (8, 64);
    let schedule = LrSchedule::constant(1e-3).unwrap();
    let batch_size = BatchSizeConfig { global_batch_size: Some(512), ..BatchSizeConfig::default() };
    let plan = MemoryEstimator::<Gpt> {
        model: preset.config(),
        layout: ParallelDims::new(tensor * pipeline, tensor, 1, pipeline).unwrap(),
        sequence_parallel: SequenceParallel::Off,
        trainer: TrainerConfig {
            parallel: ParallelConfig { recompute: Recompute::FULL, ..ParallelConfig::default() },
            ..TrainerConfig::new(1, schedule, BatchSize::new(batch_size).unwrap())
        },
        dtype: DType::BF16,
        seq_length: preset.seq_length,
        documents: DocumentResets::default(),
        device: PlannedDevice::Cpu { threads: 2 },
    };
    let stages = plan.stages().unwrap();
    let resident = peak_rss_bytes();
    assert!(resident < 100_000_000, "{resident} bytes");

    // Both ends have the embedding; a stage has 2 of 128 blocks, a rank an eighth of it.
    let parameters = plan.model.num_parameters() as usize;
    let weights: usize = stages.iter().map(|stage| stage.ranks * stage.memory.weights_bytes).sum();
    let embedding = plan.model.vocab_size * plan.model.hidden_size;
    assert!(weights.abs_diff(2 * (parameters + embedding)) < weights / 1000, "{weights}");
    // The first stage has the inputs of two blocks of 64 micro-batches, 2 sbh each.
    let inputs = 64 * 2 * 2 * plan.seq_length * plan.model.hidden_size;
    let kept = stages[0].memory.activations_bytes;
    assert!((inputs..inputs + inputs / 20).contains(&kept), "{kept}, inputs {inputs}");
}
