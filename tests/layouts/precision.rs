//! Layouts in f32 and in 16 bits: as far from the loop in f64 as one rank is, and no farther.

use ferrotron::models::trainer::PrecisionConfig;
use ferrotron::nn::{
    AdafactorConfig, GradDType, LossScale, OptimizerConfig, Rounding, StepSize, WeightUpdate,
};
use ferrotron::tensor::DType;
use std::ops::Range;

use super::layout::{Layout, all, covering};
use super::reference::reference;
use super::tensors::Tensors;
use super::train::{Found, Numbers, WEIGHTS, train};
use super::{gpt2, random};

/// The distance of a layout's runs from the reference.
#[derive(Debug)]
struct Distance {
    /// Root mean square of the relative differences of the steps' losses, and of their gradient norms.
    loss: f64,
    norm: f64,
    /// Root mean square of the differences of first gradients and of last weights, relative to gradients and weights.
    gradients: f64,
    weights: f64,
}

fn distance(runs: &[(Found, &Found)]) -> Distance {
    let mean = |part: &dyn Fn(&Found, &Found) -> f64| {
        let squares = runs.iter().map(|(got, want)| part(got, want).powi(2)).sum::<f64>();
        (squares / runs.len() as f64).sqrt()
    };
    let of_steps = |what: fn(&(f64, f64)) -> f64| {
        mean(&|got, want| {
            let pairs = got.steps.iter().zip(&want.steps);
            let squares = pairs.map(|(got, want)| (what(got) / what(want) - 1.0).powi(2));
            (squares.sum::<f64>() / got.steps.len() as f64).sqrt()
        })
    };
    Distance {
        loss: of_steps(|step| step.0),
        norm: of_steps(|step| step.1),
        gradients: mean(&|got, want| of_tensors(&got.gradients, &want.gradients)),
        weights: mean(&|got, want| of_tensors(&got.weights, &want.weights)),
    }
}

fn of_tensors(got: &Tensors, want: &Tensors) -> f64 {
    assert!(got.keys().eq(want.keys()), "{:?} and {:?}", got.keys(), want.keys());
    if got.is_empty() {
        return 0.0; // gradients, which only AdamW keeps
    }
    let pairs = || got.iter().flat_map(|(name, got)| got.iter().zip(&want[name]));
    let squares: f64 = pairs().map(|(got, want)| (got - want).powi(2)).sum();
    (squares / pairs().map(|(_, want)| want * want).sum::<f64>()).sqrt()
}

/// The distances of `layouts`, over runs from the weights of `seeds` seeds.
fn distances(numbers: &Numbers, layouts: &[Layout], seeds: u64) -> Vec<Distance> {
    let model = gpt2();
    let of_seed = |seed| Numbers { weights: WEIGHTS + seed, ..*numbers };
    let references: Vec<Found> = (0..seeds)
        .map(|seed| reference(&model, &of_seed(seed)).unwrap().without_key_biases(&model))
        .collect();
    let of = |layout: &Layout| {
        let run = |(seed, reference)| {
            let found = train(&model, layout, &of_seed(seed), &|collective| collective);
            let found = found.unwrap_or_else(|error| panic!("{layout}: {error}"));
            (found.without_key_biases(&model), reference)
        };
        distance(&(0..).zip(&references).map(run).collect::<Vec<_>>())
    };
    layouts.iter().map(of).collect()
}

/// The optimizers, with the constants that they have by default.
fn optimizers() -> [OptimizerConfig; 3] {
    let relative = AdafactorConfig::default();
    let scheduled = AdafactorConfig { step_size: StepSize::Scheduled, ..relative };
    [
        OptimizerConfig::ADAMW,
        OptimizerConfig::Adafactor(relative),
        OptimizerConfig::Adafactor(scheduled),
    ]
}

#[test]
fn layouts_in_f32_agree_to_1e_5() {
    let all = all(&gpt2());
    for optimizer in optimizers() {
        let others =
            if optimizer == OptimizerConfig::ADAMW { covering(&all) } else { random(&all, 8, 8) };
        let layouts = [vec![Layout::SERIAL], others].concat();
        let numbers = Numbers { optimizer, ..Numbers::with_dtype(DType::F32) };
        for (layout, found) in layouts.iter().zip(distances(&numbers, &layouts, 1)) {
            let Distance { loss, norm, gradients, weights } = found;
            let largest = loss.max(norm).max(gradients).max(weights);
            assert!(largest <= 1e-5, "{optimizer:?} {layout}: {found:?}");
        }
    }
}

/// Shows why the biases of keys are compared nowhere: their gradients are what rounding leaves of nothing, and as many
/// different ones as there are layouts. Those of the queries beside them are not.
#[test]
fn gradients_of_key_biases_are_rounding_errors() {
    let model = gpt2();
    let [queries, keys, _] = model.attention().packed_widths();
    let layouts = [Layout::SERIAL, Layout { tp: 2, ..Layout::SERIAL }];
    for (dtype, rounding) in [(DType::F64, 1e-13), (DType::F32, 1e-4)] {
        let runs = layouts.map(|layout| {
            train(&model, &layout, &Numbers::with_dtype(dtype), &|collective| collective).unwrap()
        });
        for (name, first) in runs[0].gradients.iter().filter(|(name, _)| name.ends_with("qkv.bias"))
        {
            let second = &runs[1].gradients[name];
            let size = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
            let apart = |range: Range<usize>| {
                let pairs = first[range.clone()].iter().zip(&second[range]);
                size(&pairs.map(|(a, b)| a - b).collect::<Vec<_>>())
            };
            let (of_queries, of_keys) = (0..queries, queries..queries + keys);
            let [large, small] = [&of_queries, &of_keys].map(|range| size(&first[range.clone()]));
            println!(
                "{dtype} {name}: {large:.1e} {:.1e}, {small:.1e} {:.1e}",
                apart(of_queries.clone()),
                apart(of_keys.clone())
            );
            assert!(
                small <= rounding * large,
                "{dtype} {name}: {small:e} is not {rounding:e} of {large:e}"
            );
            assert!(apart(of_queries) <= rounding * large, "{dtype} {name}: queries");
            assert!(
                apart(of_keys) >= 0.1 * small,
                "{dtype} {name}: the same errors in both layouts"
            );
        }
    }
}

/// Asserts that layouts are at most 1.5 times as far from the loop in f64 as one rank, in the mean over runs from 32
/// weights. A single loss is right or wrong by chance: its error is about normal, so the mean of 32 absolute values
/// deviates by 0.75 / sqrt(32) = 13 %, and the ratio of two means by 19 %. Losses and norms may be 2 times as far.
fn assert_not_farther_than_one_rank(numbers: Numbers, count: u64) {
    let layouts = [vec![Layout::SERIAL], random(&all(&gpt2()), count, 5)].concat();
    let found = distances(&numbers, &layouts, 32);
    for (layout, one) in layouts.iter().zip(&found) {
        let serial = &found[0];
        for (name, got, want, times) in [
            ("loss", one.loss, serial.loss, 2.0),
            ("norm", one.norm, serial.norm, 2.0),
            ("gradients", one.gradients, serial.gradients, 1.5),
            ("weights", one.weights, serial.weights, 1.5),
        ] {
            let most = times * want;
            assert!(got <= most, "{numbers:?} {layout}: {name} is off by {got:e}, not {most:e}");
        }
    }
}

/// Numbers in bf16 that are rounded to either neighbour by chance.
fn stochastic(optimizer: OptimizerConfig, weight_update: WeightUpdate) -> Numbers {
    let rounding = Rounding::Stochastic { seed: 3 };
    let precision = PrecisionConfig { rounding, weight_update, ..PrecisionConfig::default() };
    Numbers { optimizer, precision, ..Numbers::with_dtype(DType::BF16) }
}

// A test each, so that they share the cores.

#[test]
fn layouts_in_bf16_are_not_farther_from_f64_than_one_rank() {
    assert_not_farther_than_one_rank(Numbers::with_dtype(DType::BF16), 8);
}

#[test]
fn layouts_in_f16_are_not_farther_from_f64_than_one_rank() {
    let precision =
        PrecisionConfig { loss_scale: LossScale::Constant(1024.0), ..PrecisionConfig::default() };
    let numbers = Numbers { precision, ..Numbers::with_dtype(DType::F16) };
    assert_not_farther_than_one_rank(numbers, 4);
}

#[test]
fn layouts_with_gradients_in_bf16_are_not_farther_from_f64_than_one_rank() {
    let gradients = GradDType::Weight;
    let numbers = Numbers { gradients, ..Numbers::with_dtype(DType::BF16) };
    assert_not_farther_than_one_rank(numbers, 4);
}

#[test]
fn layouts_with_stochastic_rounding_are_not_farther_from_f64_than_one_rank() {
    let weight_update = PrecisionConfig::default().weight_update;
    assert_not_farther_than_one_rank(stochastic(OptimizerConfig::ADAMW, weight_update), 4);
}

#[test]
fn layouts_with_adafactor_in_bf16_are_not_farther_from_f64_than_one_rank() {
    let optimizer = optimizers()[1];
    let numbers = Numbers { optimizer, ..Numbers::with_dtype(DType::BF16) };
    assert_not_farther_than_one_rank(numbers, 2);
}

#[test]
fn layouts_without_master_weights_are_not_farther_from_f64_than_one_rank() {
    assert_not_farther_than_one_rank(stochastic(optimizers()[2], WeightUpdate::InPlace), 2);
}
