//! The counted operations of a step are those of the model: neither the layout nor the device changes them.

use ferrotron_cuda::nvrtc::Architecture;
use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron_models::gpt::{Gpt, GptConfig};
use ferrotron_models::memory::{DocumentResets, MemoryEstimator, PlannedDevice};
use ferrotron_models::trainer::TrainerConfig;
use ferrotron_nn::schedule::LrSchedule;
use ferrotron_parallel::mesh::ParallelDims;
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_planner::{Cluster, RecordedRun};
use ferrotron_tensor::DType;

const SEQ_LENGTH: usize = 256;

/// Counted operations of a step on four ranks, `context` of which share a sequence.
fn counted(context: usize, device: PlannedDevice) -> f64 {
    let model = GptConfig::gpt2(512, 2, 256, 4, SEQ_LENGTH);
    let batch_size = BatchSize::new(BatchSizeConfig {
        micro_batch_size: 1,
        data_parallel_size: 4 / context,
        global_batch_size: Some(8),
        rampup: None,
    })
    .unwrap();
    let run = MemoryEstimator::<Gpt> {
        layout: ParallelDims::new(4, 1, context, 1).unwrap(),
        sequence_parallel: SequenceParallel::Off,
        trainer: TrainerConfig::new(1, LrSchedule::constant(1e-4).unwrap(), batch_size),
        dtype: DType::F32,
        seq_length: SEQ_LENGTH,
        documents: DocumentResets::default(),
        device,
        model,
    };
    let mut cluster = Cluster::named("h100").unwrap();
    cluster.gpu.device = device;
    let step = RecordedRun::new(&run, device, false).unwrap().predict(&cluster, false).unwrap();
    step.hardware_operations
}

#[test]
fn layouts_and_devices_count_the_same() {
    let gpu = PlannedDevice::Gpu(Architecture { major: 9, minor: 0 });
    let whole = counted(1, gpu);
    for context in [2, 4] {
        let found = counted(context, gpu);
        assert!((found / whole - 1.0).abs() < 1e-12, "{context} contexts: {found}, not {whole}");
    }
    // A processor's kernels state the pairs on the diagonal too: one more for each of 256 positions.
    for context in [1, 2, 4] {
        let found = counted(context, PlannedDevice::Cpu { threads: 1 });
        assert!((found / whole - 1.0).abs() < 1e-3, "{context} contexts: {found}, not {whole}");
    }
}
