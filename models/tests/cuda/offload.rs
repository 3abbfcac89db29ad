//! Offloading from a GPU to host memory: the same bits, less of the GPU's own memory, and prefetched.

use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron_models::gpt::{
    Gpt, GptConfig, Recompute, RecomputeMethod, RegionInputs, SavedActivations,
};
use ferrotron_models::trainer::{ParallelConfig, Trainer, TrainerConfig};
use ferrotron_nn::schedule::LrSchedule;
use ferrotron_nn::{AdafactorConfig, OptimizerConfig, Scope};
use ferrotron_parallel::mesh::Mesh;
use ferrotron_tensor::{Category, DType, Device, MemoryKind, MemoryStats, Result};
use std::sync::{Arc, Mutex};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::{LENGTH, Noise, VOCAB};

const STEPS: usize = 2;
const BATCH: usize = 2;

/// A training run and its options.
#[derive(Debug, Clone, Copy)]
struct Run {
    dtype: DType,
    layers: usize,
    optimizer: OptimizerConfig,
    recompute: Recompute,
    offloaded_layers: usize,
    states: MemoryKind,
}

const PLAIN: Run = Run {
    dtype: DType::F32,
    layers: 4,
    optimizer: OptimizerConfig::ADAMW,
    recompute: Recompute::None,
    offloaded_layers: 0,
    states: MemoryKind::Device,
};

/// The results of a run.
struct Found {
    /// Losses, norms, weights, moments.
    bits: Vec<Vec<u64>>,
    device: MemoryStats,
    host: MemoryStats,
}

impl Run {
    fn train(&self, device: &Device) -> Result<Found> {
        let batch_size = BatchSize::new(BatchSizeConfig {
            micro_batch_size: 1,
            global_batch_size: Some(BATCH),
            ..BatchSizeConfig::default()
        })?;
        let saved_activations = SavedActivations {
            offloaded_layers: self.offloaded_layers,
            ..SavedActivations::default()
        };
        let parallel = ParallelConfig {
            recompute: self.recompute,
            saved_activations,
            optimizer_states: self.states,
            ..ParallelConfig::default()
        };
        let config = TrainerConfig {
            optimizer: self.optimizer,
            parallel,
            ..TrainerConfig::new(7, LrSchedule::constant(1e-2)?, batch_size)
        };
        let model = GptConfig {
            hidden_dropout: 0.1,
            attention_dropout: 0.1,
            ..GptConfig::gpt2(VOCAB, self.layers, 32, 4, LENGTH)
        };
        let scope = Scope::new(device, self.dtype, 1234);
        let mut trainer = Trainer::<Gpt>::on_mesh(&scope, &Mesh::single(), &model, config)?;
        let mut bits = Vec::new();
        for _ in 0..STEPS {
            let step = trainer.step(&Noise)?;
            bits.push(vec![step.loss.to_bits(), step.grad_norm.to_bits()]);
        }
        let (weights, moments) = trainer.local_shards()?;
        for held in weights.iter().chain(&moments.shards) {
            bits.push(held.tensor.to_f64()?.into_iter().map(f64::to_bits).collect());
        }
        drop((weights, moments, trainer));
        let [device, host] =
            [MemoryKind::Device, MemoryKind::Host].map(|kind| device.memory_of(kind));
        assert_eq!((device.current, host.current), (0, 0), "{self:?}");
        Ok(Found { bits, device, host })
    }
}

/// A stand-in is as late as a GPU may be. Once more with a stream of copies that is as early as one may be.
fn hasty(device: Device) -> Device {
    if let Some(gpu) = device.gpu() {
        ferrotron_cuda_sim::hasten(gpu.copies());
    }
    device
}

#[test]
fn what_waits_in_host_memory_of_a_gpu_changes_no_bit() -> Result<()> {
    let name = "what_waits_in_host_memory_of_a_gpu_changes_no_bit";
    let Some(gpu) = ferrotron_cuda_sim::gpu(name) else { return Ok(()) };
    let half = Run { dtype: DType::BF16, ..PLAIN };
    let adafactor = AdafactorConfig { beta1: 0.9, ..AdafactorConfig::default() };
    let regions = Recompute::Full {
        method: RecomputeMethod::Uniform,
        layers: 2,
        inputs: RegionInputs::Whole,
    };
    for run in [
        PLAIN,
        Run { recompute: Recompute::SELECTIVE, ..half },
        Run { recompute: regions, ..PLAIN },
        Run { optimizer: OptimizerConfig::Adafactor(adafactor), ..half },
    ] {
        let want = run.train(&Device::cuda(&gpu)?)?;
        for (offloaded_layers, states, device) in [
            (1, MemoryKind::Device, Device::cuda(&gpu)?),
            (run.layers, MemoryKind::Host, Device::cuda(&gpu)?),
            (run.layers, MemoryKind::Host, hasty(Device::cuda(&gpu)?)),
        ] {
            let run = Run { offloaded_layers, states, ..run };
            let found = run.train(&device)?;
            assert!(found.bits == want.bits, "other bits: {run:?}");
            assert!(found.host.peak > 0);
            let kept = found.device.peak_bytes(Category::Optimizer);
            assert_eq!(kept == 0, states == MemoryKind::Host, "{run:?}");
        }
    }
    Ok(())
}

/// The device holds two layers at a time. In forward these are the one that is computed and the one that is copied out,
/// in backward the one that is used and the next.
#[test]
fn the_peak_of_a_gpu_falls_by_what_is_offloaded() -> Result<()> {
    let name = "the_peak_of_a_gpu_falls_by_what_is_offloaded";
    let Some(gpu) = ferrotron_cuda_sim::gpu(name) else { return Ok(()) };
    let plain = Run { layers: 12, ..PLAIN };
    let all = plain.train(&Device::cuda(&gpu)?)?.device;
    let saved = |stats: &MemoryStats| stats.peak_bytes(Category::Saved);
    for offloaded_layers in [10, 12] {
        let run = Run { offloaded_layers, ..plain };
        let Found { device, host, .. } = run.train(&Device::cuda(&gpu)?)?;
        let block = saved(&host) / offloaded_layers;
        // When what the head keeps comes on top, nothing of the last block is near any more if that is offloaded.
        let kept_less = saved(&all) - saved(&device);
        assert!(kept_less >= 10 * block, "{kept_less} of {}: {run:?}", 10 * block);
        assert!(kept_less == 10 * block || offloaded_layers == 12, "{kept_less}: {run:?}");
        let fell = all.peak - device.peak;
        assert!(fell * 100 >= 95 * 10 * block, "{fell} of {}: {run:?}", 10 * block);
    }
    Ok(())
}

/// Names of spans as they begin.
#[derive(Clone, Default)]
struct Order(Arc<Mutex<Vec<String>>>);

struct Name(String);

impl Visit for Name {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "name" {
            self.0 += value;
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

impl Subscriber for Order {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut name = Name(format!("{} ", span.metadata().name()));
        span.record(&mut name);
        self.0.lock().unwrap().push(name.0);
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Each block is on its way while backward is in the one behind it, and none comes late.
#[test]
fn blocks_are_fetched_ahead() -> Result<()> {
    let gpu = ferrotron_cuda_sim::gpu("blocks_are_fetched_ahead");
    let gpu = gpu.map(|config| Device::cuda(&config)).transpose()?;
    // Where there is one subscriber alone, `tracing` asks that of whichever thread meets a span first: another test's has none.
    let _second = tracing::Dispatch::new(Order::default());
    for device in [Device::cpu(1)?].into_iter().chain(gpu) {
        for offloaded_layers in [PLAIN.layers - 1, PLAIN.layers] {
            let order = Order::default();
            tracing::subscriber::with_default(order.clone(), || {
                Run { offloaded_layers, ..PLAIN }.train(&device)
            })?;
            let order = order.0.lock().unwrap();
            let marks = order.iter().filter_map(|span| match &span[..] {
                "offload move" => Some("move "),
                "fetch ahead" => Some("fetch "),
                "fetch late" => Some("late "),
                "backward packed_attention" => Some("block "),
                _ => None,
            });
            let blocks = match offloaded_layers {
                3 => "move move move fetch block fetch block fetch block block ",
                _ => "move move move move fetch fetch block fetch block fetch block block ",
            };
            let want = blocks.repeat(STEPS * BATCH);
            assert_eq!(marks.collect::<String>(), want, "{device:?}, {offloaded_layers} layers");
        }
    }
    Ok(())
}
