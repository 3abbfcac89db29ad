//! Recomputation: the bytes that blocks keep are those of the formula, and nothing else changes, to the bit.

use ferrotron_autograd::{Leaf, WeightGrads, backward};
use ferrotron_models::activation_bytes::Activations;
use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron_models::gpt::{
    Gpt, GptConfig, GptPart, Recompute, RecomputeMethod, RecomputeModules, RecomputedAttention,
    RecomputedMlp, RegionInputs,
};
use ferrotron_models::trainer::{ParallelConfig, PrecisionConfig, Trainer, TrainerConfig};
use ferrotron_nn::schedule::{Schedule, ScheduleConfig};
use ferrotron_nn::{Axis, Context, Mode, Module, OptimizerConfig, Scope, Sharding};
use ferrotron_parallel::collective::{WorldConfig, run_threads};
use ferrotron_parallel::data_parallel::DataParallelConfig;
use ferrotron_parallel::mesh::{Layout, Mesh};
use ferrotron_parallel::pipeline::ScheduleKind;
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::ops::random;
use ferrotron_tensor::{Category, DType, Device, Place, RandomKey, Result};

mod common;

use common::{BATCH, Noise, SEQ_LENGTH, bits, models};

fn parts(attention: RecomputedAttention, mlp: RecomputedMlp) -> Recompute {
    Recompute::Selective(RecomputeModules { attention, mlp })
}

fn selections() -> [Recompute; 6] {
    use RecomputedAttention::{Core, Layer, None};
    [
        Recompute::None,
        Recompute::SELECTIVE,
        parts(Layer, RecomputedMlp::None),
        parts(None, RecomputedMlp::Layer),
        parts(Core, RecomputedMlp::Layer),
        parts(Layer, RecomputedMlp::Layer),
    ]
}

fn full(method: RecomputeMethod, layers: usize) -> Recompute {
    Recompute::Full { method, layers, inputs: RegionInputs::Whole }
}

/// Of one block each, with inputs that tensor-parallel ranks share.
const DISTRIBUTED: Recompute = Recompute::Full {
    method: RecomputeMethod::Uniform,
    layers: 1,
    inputs: RegionInputs::Distributed,
};

/// What a pass through all blocks and back found.
struct Pass {
    /// Output, gradient of the input, and those of all parameters.
    bits: Vec<Vec<u64>>,
    /// Bytes kept between forward and backward: those that nodes hold, and those of the pool.
    kept: [usize; 2],
    /// Most bytes kept at any time.
    peak: usize,
}

fn pass(mesh: &Mesh, model: &GptConfig, dtype: DType, recompute: Recompute) -> Result<Pass> {
    let device = Device::cpu(1)?;
    let blocks = GptPart { blocks: 0..model.num_layers, first: false, last: false };
    let gpt = Gpt::part(&Scope::new(&device, dtype, 7), mesh, model, &blocks)?;
    let gpt = gpt.with_recompute(recompute);
    let ctx = mesh.context(Context::new(3, 1, Mode::Train, BATCH, SEQ_LENGTH))?;
    let place = Place::whole(&[BATCH, ctx.residual.len(), model.hidden_size]);
    let draw =
        |what: &str| random::normal(&device, dtype, &place, &RandomKey::new(1, 0, what), 0.0, 1.0);
    let (x, dy) = (Leaf::new("x", draw("x")?), draw("dy")?);
    // The weights are made where they are first read.
    gpt.params().iter().try_for_each(|param| param.leaf().value().map(drop))?;
    device.reset_memory_peaks();
    let y = gpt.run_blocks(&ctx, x.var()?.mul_scalar(1.0)?)?;
    let kept = [y.saved_bytes(), device.memory().of(Category::Saved)];
    let mut found = vec![bits(y.value())?];
    backward(&[(&y, dy)], WeightGrads::Now)?.run()?;
    let saved = Category::ALL.iter().position(|&category| category == Category::Saved);
    let peak = device.memory().peak_by_category[saved.expect("a category")];
    for leaf in [&x].into_iter().chain(gpt.params().iter().map(|param| param.leaf())) {
        found.push(bits(&leaf.gradient()?.expect("a gradient"))?);
    }
    Ok(Pass { bits: found, kept, peak })
}

/// Ranks along the axes, and sequence parallelism.
const LAYOUTS: [(usize, usize, SequenceParallel); 5] = [
    (1, 1, SequenceParallel::Off),
    (2, 1, SequenceParallel::Off),
    (2, 1, SequenceParallel::On),
    (1, 2, SequenceParallel::Off),
    (2, 2, SequenceParallel::On),
];

#[test]
fn blocks_keep_the_bytes_of_the_formula() {
    const LAYERS: usize = 2;
    for (tp, cp, sequence) in LAYOUTS {
        let layout = Layout::new(tp * cp, tp, cp, 1).unwrap();
        let ranks = run_threads(tp * cp, &WorldConfig::default(), |world| {
            let mesh = Mesh::new(&world, layout, sequence)?;
            for model in &models(LAYERS) {
                for dtype in [DType::F32, DType::BF16] {
                    let activations = Activations {
                        model,
                        dtype,
                        batch: BATCH,
                        positions: SEQ_LENGTH / cp,
                        tensor: tp,
                        sequence: if sequence == SequenceParallel::On { tp } else { 1 },
                    };
                    let plain = pass(&mesh, model, dtype, Recompute::None)?.bits;
                    let fulls = [Recompute::FULL, full(RecomputeMethod::Block, 1)];
                    let parts = (sequence == SequenceParallel::Off).then_some(DISTRIBUTED);
                    for recompute in selections().into_iter().chain(fulls).chain(parts) {
                        let whole = recompute.regions(LAYERS).len();
                        let ranks = if recompute == DISTRIBUTED { tp } else { 1 };
                        let want = whole * activations.input() / ranks
                            + (LAYERS - whole) * activations.block(recompute.modules());
                        let found = pass(&mesh, model, dtype, recompute)?;
                        let what =
                            format!("tp {tp} cp {cp} {sequence:?} {dtype} {recompute:?} {model:?}");
                        assert_eq!(found.kept, [want; 2], "nodes, pool: {what}");
                        assert!(found.bits == plain, "other bits: {what}");
                    }
                }
            }
            Ok(())
        });
        ranks.into_iter().for_each(|rank| rank.unwrap());
    }
}

/// Korthikanti et al., section 4, as the formula that holds for fused attention and dropout without masks.
#[test]
fn the_formula_is_that_of_the_documentation() {
    let model = GptConfig::gpt2(50257, 12, 768, 12, 1024);
    let (s, b, h, a) = (1024, 2, 768, 12);
    let activations = |dtype, tensor, sequence| Activations {
        model: &model,
        dtype,
        batch: b,
        positions: s,
        tensor,
        sequence,
    };
    let none = RecomputeModules::NONE;
    let sb = s * b;
    for (t, q) in [(1, 1), (4, 1), (4, 4)] {
        let [half, single] = [DType::BF16, DType::F32].map(|dtype| activations(dtype, t, q));
        assert_eq!(half.block(none), sb * (h * (4 / q + 16 / t) + 16 / q + 4 * a / t));
        assert_eq!(single.block(none), sb * (h * (8 / q + 32 / t) + 16 / q + 4 * a / t));
        assert_eq!(half.input(), 2 * sb * h / q);
        assert_eq!(single.input(), 4 * sb * h / q);
    }
}

/// c regions of l / c blocks: c A_input + l / c A_block, less the input that a region and its first block share;
/// least at c = sqrt(l A_block / A_input), and of the order of sqrt(l) there.
#[test]
fn the_number_of_regions_makes_the_bytes() {
    let mesh = Mesh::single();
    for (layers, best) in [(10, 10), (40, 20), (90, 30)] {
        let model = GptConfig { num_layers: layers, ..models(layers)[1].clone() };
        let activations = Activations {
            model: &model,
            dtype: DType::F32,
            batch: BATCH,
            positions: SEQ_LENGTH,
            tensor: 1,
            sequence: 1,
        };
        let (input, block) = (activations.input(), activations.block(RecomputeModules::NONE));
        let mut least = (usize::MAX, 0);
        for size in 1..=layers {
            if layers > 40 && layers % size > 0 {
                continue;
            }
            let regions = layers.div_ceil(size);
            // The last region may be shorter. It runs again first, while all inputs are kept.
            let last = layers - (regions - 1) * size;
            let peak = |regions: usize, size: usize| (regions - 1) * input + size * block;
            let want = match regions {
                1 => peak(1, last),
                _ => peak(regions, last).max(peak(regions - 1, size)),
            };
            let recompute = full(RecomputeMethod::Uniform, size);
            let found = pass(&mesh, &model, DType::F32, recompute).unwrap();
            assert_eq!(found.kept, [regions * input; 2], "{layers} layers, regions of {size}");
            assert_eq!(found.peak, want, "{layers} layers, regions of {size}");
            least = least.min((found.peak, regions));
        }
        let (peak, regions) = least;
        assert_eq!(regions, best, "{layers} layers");
        let optimum = (layers as f64 * block as f64 / input as f64).sqrt();
        assert!((optimum - best as f64).abs() < 0.5, "{layers} layers: {optimum}");
        let bound = 2.0 * (layers as f64 * block as f64 * input as f64).sqrt();
        assert!(peak as f64 <= bound, "{layers} layers: {peak} of {bound}");
    }
}

/// Losses, norms and weights of a few steps, as bits.
fn train(mesh: &Mesh, dtype: DType, parallel: ParallelConfig) -> Result<Vec<Vec<u64>>> {
    let config = TrainerConfig {
        seed: 7,
        optimizer: OptimizerConfig::ADAMW,
        schedule: Schedule::new(ScheduleConfig { max_lr: 1e-2, ..ScheduleConfig::default() })?,
        clip_grad: 1.0,
        batch_size: BatchSize::new(BatchSizeConfig {
            micro_batch_size: BATCH,
            data_parallel_size: mesh.axis(Axis::Data).size(),
            global_batch_size: Some(4 * BATCH),
            rampup: None,
        })?,
        parallel,
        precision: PrecisionConfig::default(),
    };
    let scope = Scope::new(&Device::cpu(1)?, dtype, 1234);
    let mut trainer = Trainer::on_mesh(&scope, mesh, &models(4)[1], config)?;
    let mut found = Vec::new();
    for _ in 0..2 {
        let report = trainer.step(&Noise)?;
        found.push(vec![report.loss.to_bits(), report.grad_norm.to_bits()]);
    }
    for held in trainer.held()?.0 {
        found.push(bits(&held.tensor)?);
    }
    Ok(found)
}

/// Pipelines, deferred weight gradients, sharded weights, everything together, and 16 bits.
#[test]
fn training_is_the_same_to_the_bit() {
    use ScheduleKind::{Interleaved, OneFOneB, ZbH1};
    for (ranks, (tp, cp, pp), schedule, chunks, sharding, dtype) in [
        (1, (1, 1, 1), OneFOneB, 1, Sharding::None, DType::BF16),
        (2, (1, 1, 2), ZbH1, 1, Sharding::None, DType::F32),
        (2, (1, 1, 2), Interleaved, 2, Sharding::None, DType::F32),
        (2, (1, 1, 1), OneFOneB, 1, Sharding::Weights, DType::F32),
        (4, (1, 2, 2), ZbH1, 1, Sharding::None, DType::F32),
        (4, (2, 1, 2), ZbH1, 1, Sharding::None, DType::BF16),
        (4, (2, 2, 1), OneFOneB, 1, Sharding::Weights, DType::F32),
        (4, (2, 1, 2), ZbH1, 1, Sharding::None, DType::F32),
        (4, (2, 1, 1), OneFOneB, 1, Sharding::Weights, DType::F32),
    ] {
        let layout = Layout::new(ranks, tp, cp, pp).unwrap();
        let on = tp > 1 && (cp > 1 || dtype == DType::BF16);
        let sequence = if on { SequenceParallel::On } else { SequenceParallel::Off };
        let run = |recompute| {
            let ranks = run_threads(ranks, &WorldConfig::default(), |world| {
                let mesh = Mesh::new(&world, layout, sequence)?;
                let data_parallel = DataParallelConfig {
                    sharding,
                    bucket_numel: Some(3000),
                    ..DataParallelConfig::default()
                };
                let parallel = ParallelConfig {
                    pipeline_schedule: schedule,
                    chunks,
                    data_parallel,
                    recompute,
                    ..ParallelConfig::default()
                };
                train(&mesh, dtype, parallel)
            });
            ranks.into_iter().collect::<Result<Vec<_>>>().unwrap()
        };
        let [plain, others @ ..] = selections();
        let want = run(plain);
        let most = 4 / (pp * chunks);
        let fulls = [full(RecomputeMethod::Uniform, most), full(RecomputeMethod::Block, 1)];
        let distributed = (tp > 1 && !on).then_some(DISTRIBUTED);
        for recompute in others.into_iter().chain(fulls).chain(distributed) {
            assert!(
                run(recompute) == want,
                "{layout:?} {schedule} {sharding:?} {dtype} {recompute:?}"
            );
        }
    }
}
