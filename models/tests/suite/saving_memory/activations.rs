//! Saved activations in host memory, in 16 bits, or without their zeros.

use ferrotron_autograd::{ActivationCompressionConfig, ZeroEncoding};
use ferrotron_models::gpt::{
    ActivationKind, Recompute, RecomputeMethod, RecomputedAttention, RecomputedMlp, RegionInputs,
    SavedActivations,
};
use ferrotron_models::trainer::ParallelConfig;
use ferrotron_nn::Sharding;
use ferrotron_parallel::collective::{WorldConfig, run_threads};
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::pipeline::ScheduleKind;
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{Category, DType, Result};

use super::blocks::{DISTRIBUTED, LAYOUTS, activations, full, parts, pass};
use super::training::{BATCH, Case, SEQ_LENGTH, STEPS, cases, models};

/// The kinds of recomputation, without and with inputs that tensor-parallel ranks share.
fn recomputations(tp: usize, sequence: SequenceParallel) -> Vec<Recompute> {
    let mut all = vec![
        Recompute::None,
        Recompute::SELECTIVE,
        parts(RecomputedAttention::Layer, RecomputedMlp::None),
        parts(RecomputedAttention::None, RecomputedMlp::Layer),
        Recompute::FULL,
        full(RecomputeMethod::Uniform, 2),
        full(RecomputeMethod::Block, 1),
    ];
    if tp > 1 && sequence == SequenceParallel::Off {
        all.push(DISTRIBUTED);
    }
    all
}

fn offloaded(offloaded_layers: usize) -> SavedActivations {
    SavedActivations { offloaded_layers, ..SavedActivations::default() }
}

fn in_16_bits(dtype: DType) -> SavedActivations {
    let packing = ActivationCompressionConfig {
        dtype: Some(dtype),
        ..ActivationCompressionConfig::default()
    };
    SavedActivations { packing, ..SavedActivations::default() }
}

fn sparse() -> SavedActivations {
    let packing = ActivationCompressionConfig {
        zeros: ZeroEncoding::Bitmap,
        ..ActivationCompressionConfig::default()
    };
    SavedActivations { packing, ..SavedActivations::default() }
}

#[test]
fn blocks_keep_their_bytes_where_and_in_the_type_that_is_said() {
    const LAYERS: usize = 3;
    for (tp, cp, sequence) in LAYOUTS {
        let layout = ParallelDims::new(tp * cp, tp, cp, 1).unwrap();
        let ranks = run_threads(tp * cp, &WorldConfig::default(), |world| {
            let mesh = Mesh::new(&world, layout, sequence)?;
            for (model, dtype, recompute) in models(LAYERS).iter().flat_map(|model| {
                [DType::F32, DType::BF16].into_iter().flat_map(move |dtype| {
                    recomputations(tp, sequence).into_iter().map(move |how| (model, dtype, how))
                })
            }) {
                let activations = |dtype| activations(model, dtype, (tp, cp, sequence));
                let regions = recompute.regions(LAYERS);
                let whole = regions.last().map_or(0, |last| last.end);
                let share = if recompute.inputs() == RegionInputs::Distributed { tp } else { 1 };
                // Of the blocks before or after the first `layers`; a region is where its first block is.
                let bytes = |dtype, layers: std::ops::Range<usize>| {
                    let activations = activations(dtype);
                    let inputs = regions.iter().filter(|region| layers.contains(&region.start));
                    let blocks = (whole..LAYERS).filter(|block| layers.contains(block));
                    inputs.count() * activations.input() / share
                        + blocks.count() * activations.block(recompute.modules())
                };
                let what = format!("tp {tp} cp {cp} {sequence:?} {dtype} {recompute:?} {model:?}");
                let plain = pass(&mesh, model, dtype, recompute, SavedActivations::default())?;
                for layers in [1, LAYERS] {
                    let found = pass(&mesh, model, dtype, recompute, offloaded(layers))?;
                    let here = bytes(dtype, layers..LAYERS);
                    let want = [here, here, bytes(dtype, 0..layers)];
                    assert_eq!(found.kept, want, "{layers} layers: {what}");
                    assert!(found.bits() == plain.bits(), "{layers} layers, other bits: {what}");
                }
                if dtype == DType::F32 {
                    // In 16 bits as many as a model in 16 bits keeps; half of them wait in the other memory.
                    let packed =
                        SavedActivations { offloaded_layers: 1, ..in_16_bits(DType::BF16) };
                    let found = pass(&mesh, model, dtype, recompute, packed)?;
                    let here = bytes(DType::BF16, 1..LAYERS);
                    let want = [here, here, bytes(DType::BF16, 0..1)];
                    assert_eq!(found.kept, want, "16 bits: {what}");
                    assert!(found.values[0] == plain.values[0], "forward is in 32 bits: {what}");
                }
            }
            Ok(())
        });
        ranks.into_iter().for_each(|rank| rank.unwrap());
    }
}

/// A ReLU's result is kept as a bit for each element and the elements that are not zero.
#[test]
fn the_zeros_of_a_relu_take_a_bit() -> Result<()> {
    const LAYERS: usize = 3;
    let ([model, ..], mesh) = (models(LAYERS), Mesh::single());
    for (dtype, recompute) in [
        (DType::F32, Recompute::None),
        (DType::BF16, Recompute::SELECTIVE),
        (DType::F32, full(RecomputeMethod::Block, 1)),
    ] {
        let plain = pass(&mesh, &model, dtype, recompute, SavedActivations::default())?;
        let blocks = LAYERS - recompute.regions(LAYERS).len();
        let elements = BATCH * SEQ_LENGTH * model.ffn_hidden_size;
        for offloaded_layers in [0, LAYERS] {
            let saved = SavedActivations { offloaded_layers, ..sparse() };
            let found = pass(&mesh, &model, dtype, recompute, saved)?;
            assert!(found.bits() == plain.bits(), "other bits");
            let [nodes, here, there] = found.kept;
            assert_eq!((nodes, if offloaded_layers > 0 { 0 } else { there }), (here, 0));
            let less = plain.kept[0] - here - there;
            let zeros = (less + blocks * elements / 8) / dtype.size();
            assert_eq!(zeros * dtype.size(), less + blocks * elements / 8);
            let share = zeros as f64 / (blocks * elements) as f64;
            assert!((0.4..0.6).contains(&share), "{share} of the results are zero");
        }
    }
    Ok(())
}

/// Each activation is rounded by half a unit in the last place at most; forward does not change. So gradients are off
/// by about as much: less than one unit of their norm, or two where norms of queries and keys divide once more. A ReLU
/// that is recomputed from a rounded input may fall on the other side of its kink, so that one is left out with whole
/// blocks recomputed.
#[test]
fn activations_in_16_bits_change_gradients_by_their_rounding() -> Result<()> {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    for (model, dtype) in
        models(6).iter().flat_map(|model| [DType::BF16, DType::F16].map(|dtype| (model, dtype)))
    {
        for recompute in [Recompute::None, Recompute::SELECTIVE, Recompute::FULL] {
            if model.activation == ActivationKind::Relu && recompute == Recompute::FULL {
                continue;
            }
            let run = |saved| pass(&Mesh::single(), model, DType::F32, recompute, saved);
            let (exact, rounded) = (run(SavedActivations::default())?, run(in_16_bits(dtype))?);
            assert!(exact.values[0] == rounded.values[0], "forward is in 32 bits");
            for (i, (want, got)) in exact.values.iter().zip(&rounded.values).enumerate().skip(1) {
                let error = norm(&mut want.iter().zip(got).map(|(want, got)| want - got));
                let units = if model.qk_layernorm { 2.0 } else { 1.0 };
                let limit = units * dtype.epsilon() * norm(&mut want.iter().copied());
                let what = format!("{:?} {dtype} {recompute:?}, gradient {i}", model.activation);
                assert!(error <= limit, "{what}: {error}, at most {limit}");
            }
            let rounds = exact.values.iter().zip(&rounded.values).any(|(a, b)| a != b);
            assert!(rounds, "nothing was rounded");
        }
    }
    Ok(())
}

/// The first loss is the same to the bit. Later losses differ by little: by the effect of rounded gradients on the
/// steps.
#[test]
fn losses_with_activations_in_16_bits_stay_close() {
    for dtype in [DType::BF16, DType::F16] {
        let case = Case::new(DType::F32);
        let losses = |parallel| -> Vec<f64> {
            let found = case.train(parallel);
            found[0].bits[..STEPS].iter().map(|step| f64::from_bits(step[0])).collect()
        };
        let plain = case.parallel();
        let want = losses(plain);
        let found = losses(ParallelConfig { saved_activations: in_16_bits(dtype), ..plain });
        assert_eq!(found[0], want[0], "{dtype}: forward is in 32 bits");
        for (step, (found, want)) in found.iter().zip(&want).enumerate().skip(1) {
            let limit = step as f64 * dtype.epsilon() * want;
            assert!((found - want).abs() <= limit, "{dtype}, step {}: {found}, {want}", step + 1);
        }
        assert!(found[1..] != want[1..], "{dtype}: nothing was rounded");
    }
}

/// Every layout, precision and recomputation: the same training wherever activations wait.
#[test]
fn offloaded_activations_change_nothing() {
    let single = Case::new(DType::F32);
    let interleaved = ScheduleKind::Interleaved;
    let more = [
        Case { ranks: 2, sizes: (1, 1, 2), schedule: interleaved, chunks: 2, ..single },
        Case { ranks: 2, sizes: (1, 1, 2), schedule: ScheduleKind::GPipe, ..single },
        Case { ranks: 2, sizes: (2, 1, 1), ..single },
        Case { ranks: 4, sizes: (2, 2, 1), sharding: Sharding::Weights, ..single },
    ];
    for case in cases().into_iter().chain(more) {
        let (tp, _, pp) = case.sizes;
        let most = case.layers / (pp * case.chunks);
        let plain = case.parallel();
        let want = case.train(plain);
        for recompute in recomputations(tp, case.sequence) {
            if recompute.unsupported_reason(most).is_some() {
                continue;
            }
            for layers in [1, most] {
                let saved_activations = offloaded(layers);
                let found = case.train(ParallelConfig { recompute, saved_activations, ..plain });
                let what = format!("{layers} layers, {recompute:?}: {case:?}");
                let mut waited = 0;
                for (found, want) in found.iter().zip(&want) {
                    assert!(found.bits == want.bits, "other bits: {what}");
                    waited += found.memory[1].peak_bytes(Category::Saved);
                }
                assert!(waited > 0, "{what}"); // but what a pipeline stage has received stays
            }
        }
    }
}

/// All but the last two layers of a stage wait in host memory: what is kept here is that of two. A zero-bubble
/// pipeline's peak may lie where many gradients wait for the weights' turn; what is saved falls there too.
#[test]
fn the_peak_falls_by_what_is_offloaded() {
    let single = Case { layers: 12, ..Case::new(DType::F32) };
    let half = Case { layers: 12, ..Case::new(DType::BF16) };
    let on = SequenceParallel::On;
    for (case, recompute) in [
        (single, Recompute::None),
        (half, Recompute::SELECTIVE),
        (single, Recompute::FULL),
        (Case { ranks: 2, sizes: (2, 1, 1), sequence: on, ..half }, Recompute::None),
        (Case { ranks: 2, sizes: (1, 1, 2), ..single }, Recompute::None),
        (
            Case { ranks: 2, sizes: (1, 1, 2), schedule: ScheduleKind::ZbH1, ..single },
            Recompute::None,
        ),
        (Case { ranks: 2, sharding: Sharding::Weights, ..single }, Recompute::None),
    ] {
        let plain = ParallelConfig { recompute, ..case.parallel() };
        let saved_activations = offloaded(case.layers / case.sizes.2 - 2);
        let want = case.train(plain);
        let found = case.train(ParallelConfig { saved_activations, ..plain });
        for (rank, (found, want)) in found.iter().zip(&want).enumerate() {
            let ([device, host], [all, _]) = (found.memory, want.memory);
            let offloaded = host.peak_bytes(Category::Saved);
            let saved = all.peak_bytes(Category::Saved) - device.peak_bytes(Category::Saved);
            let pool = match case.schedule {
                ScheduleKind::ZbH1 => saved,
                _ => all.peak - device.peak,
            };
            for fell in [saved, pool] {
                assert!(
                    fell * 100 >= 95 * offloaded,
                    "{fell} of {offloaded} bytes on rank {rank}: {recompute:?} {case:?}"
                );
            }
        }
    }
}
