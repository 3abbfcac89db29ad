//! The memory number before the start is what the pool of a GPU then counts.

use ferrotron_autograd::ActivationCompressionConfig;
use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron_models::data::{DocumentConfig, DocumentSamples};
use ferrotron_models::gpt::{Gpt, GptConfig, Recompute, SavedActivations};
use ferrotron_models::memory::{DocumentResets, MemoryEstimator, PlannedDevice, RankMemory};
use ferrotron_models::trainer::{ParallelConfig, SaveMode, Trainer, TrainerConfig};
use ferrotron_nn::schedule::LrSchedule;
use ferrotron_nn::{AdafactorConfig, OptimizerConfig, Scope};
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, Device, MemoryKind, Result};

use crate::{LENGTH, Noise, VOCAB};

fn plan(
    model: GptConfig,
    dtype: DType,
    optimizer: OptimizerConfig,
    parallel: ParallelConfig,
    device: PlannedDevice,
) -> Result<MemoryEstimator<Gpt>> {
    let batch_size = BatchSize::new(BatchSizeConfig {
        micro_batch_size: 2,
        global_batch_size: Some(4),
        ..BatchSizeConfig::default()
    })?;
    Ok(MemoryEstimator::<Gpt> {
        model,
        layout: ParallelDims::single(),
        sequence_parallel: SequenceParallel::Off,
        trainer: TrainerConfig {
            optimizer,
            parallel,
            ..TrainerConfig::new(1, LrSchedule::constant(1e-3)?, batch_size)
        },
        dtype,
        seq_length: LENGTH,
        documents: DocumentResets::default(),
        device,
    })
}

#[test]
fn the_number_before_the_start_is_that_of_the_gpu() -> Result<()> {
    let name = "the_number_before_the_start_is_that_of_the_gpu";
    let Some(gpu) = ferrotron_cuda_sim::gpu(name) else { return Ok(()) };
    let gpt2 = GptConfig::gpt2(VOCAB, 3, 32, 4, LENGTH);
    let dropping = GptConfig { hidden_dropout: 0.1, attention_dropout: 0.1, ..gpt2.clone() };
    let llama = GptConfig::llama(VOCAB, 3, 32, 4, 2, LENGTH);
    let narrow = GptConfig::gpt2(VOCAB, 2, 30, 5, LENGTH);
    let adafactor = AdafactorConfig { beta1: 0.9, ..AdafactorConfig::default() };
    let adafactor = OptimizerConfig::Adafactor(adafactor);
    let (adamw, plain) = (OptimizerConfig::ADAMW, ParallelConfig::default());
    let [selective, full] = [Recompute::SELECTIVE, Recompute::FULL]
        .map(|recompute| ParallelConfig { recompute, ..plain });
    let states = ParallelConfig { optimizer_states: MemoryKind::Host, ..plain };
    let saved = |offloaded_layers, dtype| SavedActivations {
        offloaded_layers,
        packing: ActivationCompressionConfig { dtype, ..ActivationCompressionConfig::default() },
    };
    let offloaded = ParallelConfig { saved_activations: saved(2, None), ..states };
    let packed = ParallelConfig { saved_activations: saved(3, Some(DType::BF16)), ..plain };
    for (model, dtype, optimizer, parallel) in [
        (&gpt2, DType::F32, adamw, plain),
        (&gpt2, DType::BF16, adamw, plain),
        (&dropping, DType::BF16, adamw, selective),
        (&dropping, DType::F16, adamw, full),
        (&llama, DType::F32, adamw, plain),
        (&llama, DType::BF16, adamw, selective),
        (&narrow, DType::BF16, adamw, plain),
        (&gpt2, DType::BF16, adafactor, plain),
        (&gpt2, DType::BF16, adamw, states),
        (&gpt2, DType::F32, adamw, offloaded),
        (&llama, DType::F32, adamw, packed),
    ] {
        let device = Device::cuda(&gpu)?;
        let (own, architecture) = match device.gpu() {
            Some(gpu) => (gpu.own_bytes(), gpu.context().architecture()),
            None => continue,
        };
        let planned = PlannedDevice::Gpu(architecture);
        let plan = plan(model.clone(), dtype, optimizer, parallel, planned)?;
        let scope = Scope::new(&device, dtype, plan.trainer.seed);
        let mut trainer =
            Trainer::<Gpt>::on_mesh(&scope, &Mesh::single(), model, plan.trainer.clone())?;
        for _ in 0..2 {
            trainer.step(&Noise)?;
        }
        drop(trainer);
        let (found, said) = (RankMemory::from_device(&device), plan.rank(0)?);
        assert_eq!(found.total_bytes, device.memory().peak + own);
        let products = if architecture.major >= 9 { 32 << 20 } else { 4 << 20 };
        assert_eq!(own, products + (2 << 20), "cuBLASLt's workspace, and cells");
        // To the byte, which the two percent of what is big would hide.
        assert_eq!(said, found, "{model:?} {dtype} {optimizer:?} {parallel:?}");
    }
    Ok(())
}

/// Attention reads the range of keys of each query from the GPU's memory, and a batch has positions.
#[test]
fn the_number_counts_what_documents_take() -> Result<()> {
    let name = "the_number_counts_what_documents_take";
    let Some(gpu) = ferrotron_cuda_sim::gpu(name) else { return Ok(()) };
    let model = GptConfig::gpt2(VOCAB, 2, 32, 4, LENGTH);
    let mut totals = Vec::new();
    for (attention, positions) in [(false, false), (true, false), (false, true), (true, true)] {
        let device = Device::cuda(&gpu)?;
        let Some(gpu) = device.gpu() else { continue };
        let planned = PlannedDevice::Gpu(gpu.context().architecture());
        let parallel = ParallelConfig::default();
        let plan = plan(model.clone(), DType::F32, OptimizerConfig::ADAMW, parallel, planned)?;
        let plan = MemoryEstimator { documents: DocumentResets { attention, positions }, ..plan };
        let scope = Scope::new(&device, DType::F32, 1);
        let mut trainer =
            Trainer::<Gpt>::on_mesh(&scope, &Mesh::single(), &model, plan.trainer.clone())?;
        let config = DocumentConfig {
            end_of_document: 3,
            reset_attention: attention,
            reset_positions: positions,
            mask_loss: false,
        };
        for _ in 0..2 {
            trainer.step(&DocumentSamples::new(Noise, config))?;
        }
        drop(trainer);
        let said = plan.rank(0)?;
        assert_eq!(said, RankMemory::from_device(&device), "{attention} {positions}");
        totals.push(said.total_bytes);
    }
    // Two micro-batches of two samples: two words for the range of each token.
    let tokens = 4 * LENGTH;
    if let [plain, attention, positions, both] = totals[..] {
        assert!(plain + 8 * tokens == attention && plain < positions, "{totals:?}");
        assert_eq!(positions + 8 * tokens, both, "{totals:?}");
    }
    Ok(())
}

/// The copy from which a checkpoint is written is in pinned host memory, and has the bytes of the step that was saved.
#[test]
fn a_checkpoint_is_written_from_pinned_memory() -> Result<()> {
    let name = "a_checkpoint_is_written_from_pinned_memory";
    let Some(gpu) = ferrotron_cuda_sim::gpu(name) else { return Ok(()) };
    let model = GptConfig::gpt2(VOCAB, 2, 32, 4, LENGTH);
    let folder = tempfile::tempdir().unwrap();
    for states in [MemoryKind::Device, MemoryKind::Host] {
        let device = Device::cuda(&gpu)?;
        let Some(architecture) = device.gpu().map(|gpu| gpu.context().architecture()) else {
            continue;
        };
        let parallel = ParallelConfig { optimizer_states: states, ..ParallelConfig::default() };
        let planned = PlannedDevice::Gpu(architecture);
        let mut plan = plan(model.clone(), DType::BF16, OptimizerConfig::ADAMW, parallel, planned)?;
        plan.trainer.saves = SaveMode::Async;
        let scope = Scope::new(&device, DType::BF16, 1);
        let mut trainer =
            Trainer::<Gpt>::on_mesh(&scope, &Mesh::single(), &model, plan.trainer.clone())?;
        trainer.step(&Noise)?;
        let run = serde_json::Value::Null;
        let want = trainer.save(&folder.path().join("blocking"), None, run.clone())?;
        let pending = trainer.save_async(&folder.path().join("async"), None, run)?;
        trainer.step(&Noise)?;
        let got = pending.wait()?;
        for file in ["model.safetensors", "optimizer.safetensors", "progress.json"] {
            let [want, got] = [&want, &got].map(|saved| std::fs::read(saved.join(file)).unwrap());
            assert!(want == got, "{file}, {states:?}");
        }
        drop(trainer);
        let (found, said) = (RankMemory::from_device(&device), plan.rank(0)?);
        assert_eq!(said, found, "{states:?}");
        let pinned = said.weights_bytes + 12 * model.num_parameters() as usize;
        assert!(states == MemoryKind::Host || said.host_bytes == pinned, "{said:?}");
        assert_eq!(said.snapshot_bytes, 0, "it is none of the GPU's memory");
    }
    Ok(())
}
