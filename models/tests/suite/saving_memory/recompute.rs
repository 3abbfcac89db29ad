//! Recomputation: the bytes that blocks keep are those of the formula, and nothing else changes, to the bit.

use ferrotron_models::activation_bytes::Activations;
use ferrotron_models::gpt::{
    GptConfig, Recompute, RecomputeMethod, RecomputeModules, RecomputedAttention, RecomputedMlp,
    SavedActivations,
};
use ferrotron_models::trainer::ParallelConfig;
use ferrotron_nn::Sharding;
use ferrotron_parallel::collective::{WorldConfig, run_threads};
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::pipeline::ScheduleKind;
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, Result};

use super::blocks::{DISTRIBUTED, LAYOUTS, Pass, activations, full, parts};
use super::training::{Case, gpt2, models};

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

fn pass(mesh: &Mesh, model: &GptConfig, dtype: DType, recompute: Recompute) -> Result<Pass> {
    super::blocks::pass(mesh, model, dtype, recompute, SavedActivations::default())
}

#[test]
fn blocks_keep_the_bytes_of_the_formula() {
    const LAYERS: usize = 2;
    for (tp, cp, sequence) in LAYOUTS {
        let layout = ParallelDims::new(tp * cp, tp, cp, 1).unwrap();
        let ranks = run_threads(tp * cp, &WorldConfig::default(), |world| {
            let mesh = Mesh::new(&world, layout, sequence)?;
            for model in &models(LAYERS) {
                for dtype in [DType::F32, DType::BF16] {
                    let activations = activations(model, dtype, (tp, cp, sequence));
                    let plain = pass(&mesh, model, dtype, Recompute::None)?.bits();
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
                        assert_eq!(found.kept, [want, want, 0], "nodes, pool, host: {what}");
                        assert_eq!(found.tables, activations.rotary_table(), "tables: {what}");
                        assert!(found.bits() == plain, "other bits: {what}");
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

/// c regions of l / c blocks take c A_input + l / c A_block bytes, less the input that a region and its first block
/// share. They take least at c = sqrt(l A_block / A_input), and of the order of sqrt(l) there.
#[test]
fn the_number_of_regions_makes_the_bytes() {
    let mesh = Mesh::single();
    for (layers, best) in [(10, 10), (40, 20), (90, 30)] {
        let model = gpt2(layers);
        let activations = activations(&model, DType::F32, (1, 1, SequenceParallel::Off));
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
            let kept = regions * input;
            assert_eq!(found.kept, [kept, kept, 0], "{layers} layers, regions of {size}");
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

/// Pipelines, deferred weight gradients, sharded weights, everything together, and 16 bits.
#[test]
fn training_is_the_same_to_the_bit() {
    let (single, half) = (Case::new(DType::F32), Case::new(DType::BF16));
    let (interleaved, zero_bubble) = (ScheduleKind::Interleaved, ScheduleKind::ZbH1);
    let (weights, on) = (Sharding::Weights, SequenceParallel::On);
    for case in [
        half,
        Case { ranks: 2, sizes: (1, 1, 2), schedule: zero_bubble, ..single },
        Case { ranks: 2, sizes: (1, 1, 2), schedule: interleaved, chunks: 2, ..single },
        Case { ranks: 2, sharding: weights, ..single },
        Case { ranks: 4, sizes: (1, 2, 2), schedule: zero_bubble, ..single },
        Case { ranks: 4, sizes: (2, 1, 2), sequence: on, schedule: zero_bubble, ..half },
        Case { ranks: 4, sizes: (2, 2, 1), sequence: on, sharding: weights, ..single },
        Case { ranks: 4, sizes: (2, 1, 2), schedule: zero_bubble, ..single },
        Case { ranks: 4, sizes: (2, 1, 1), sharding: weights, ..single },
    ] {
        let run = |recompute| -> Vec<_> {
            let found = case.train(ParallelConfig { recompute, ..case.parallel() });
            found.into_iter().map(|rank| rank.bits).collect()
        };
        let [plain, others @ ..] = selections();
        let want = run(plain);
        let (tp, _, pp) = case.sizes;
        let most = case.layers / (pp * case.chunks);
        let fulls = [full(RecomputeMethod::Uniform, most), full(RecomputeMethod::Block, 1)];
        let distributed = (tp > 1 && case.sequence == SequenceParallel::Off).then_some(DISTRIBUTED);
        for recompute in others.into_iter().chain(fulls).chain(distributed) {
            assert!(run(recompute) == want, "{recompute:?}: {case:?}");
        }
    }
}
