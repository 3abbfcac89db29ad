//! Runs in 16 bits that resume in one layout after another. Exact parts stay exact, and the rest drifts no farther than
//! runs that differ by rounding alone.

use ferrotron::models::gpt::GptConfig;
use ferrotron::models::trainer::PrecisionConfig;
use ferrotron::nn::{Rounding, Sharding, WeightUpdate};
use ferrotron::parallel::tensor_parallel::SequenceParallel;
use ferrotron::tensor::{DType, Result};

use super::train::{Found, Layout, Task, difference, run};
use super::{task, tied, untied};

const STOCHASTIC: PrecisionConfig = PrecisionConfig {
    weight_update: WeightUpdate::MasterCopy,
    rounding: Rounding::Stochastic { seed: 3 },
    loss_scale: ferrotron::nn::LossScale::NONE,
};

/// Every way to keep weights of 16 bits.
fn precisions() -> Vec<(DType, PrecisionConfig)> {
    let nearest = PrecisionConfig::default();
    let mut all = Vec::new();
    for dtype in [DType::BF16, DType::F16] {
        for precision in [nearest, STOCHASTIC] {
            for weight_update in [WeightUpdate::MasterCopy, WeightUpdate::InPlace] {
                all.push((dtype, PrecisionConfig { weight_update, ..precision }));
            }
        }
    }
    all
}

/// Layouts of every axis.
fn layouts() -> Vec<Layout> {
    let tp_sp = Layout { sequence: SequenceParallel::On, ..Layout::model(2, 1) };
    vec![
        Layout::SERIAL,
        Layout { dp: 2, sharding: Sharding::Weights, ..tp_sp },
        Layout { dp: 2, sharding: Sharding::Optimizer, ..Layout::model(2, 2) },
        Layout { cp: 2, ..Layout::data(2, Sharding::Gradients) },
        Layout::data(4, Sharding::Weights),
        Layout { chunks: 2, ..Layout::model(1, 2) },
    ]
}

/// Steps in each of `layouts` in turn, saved and loaded in between.
fn chain(task: &Task, layouts: &[Layout], steps: usize) -> Result<Found> {
    let folder = tempfile::tempdir().unwrap();
    let mut whole: Option<Found> = None;
    for (part, &layout) in layouts.iter().enumerate() {
        let [load, save] = [part, part + 1].map(|part| folder.path().join(part.to_string()));
        let load = (part > 0).then_some(load.as_path());
        // Other initial weights, so that what is not loaded shows.
        let seed = task.seed + part as u64;
        let found = run(&Task { layout, steps, load, save: Some(&save), seed, ..*task })?;
        whole = Some(match whole {
            None => found,
            Some(before) => Found {
                losses: [before.losses, found.losses].concat(),
                norms: [before.norms, found.norms].concat(),
                samples: [before.samples, found.samples].concat(),
                ..found
            },
        });
    }
    Ok(whole.expect("at least one layout"))
}

/// A run that is interrupted and resumed in the same layout is the same to the last bit. This covers losses, norms,
/// weights, master weights, moments, and with them the random numbers of rounding and dropout.
#[test]
fn in_the_same_layout_going_on_is_exact_in_16_bits() -> Result<()> {
    let model = GptConfig { num_layers: 4, ..tied() };
    for (number, (dtype, precision)) in precisions().into_iter().enumerate() {
        // One rank and, in turn, one of the others.
        for layout in [layouts()[0], layouts()[1 + number % 5]] {
            let task = Task { dtype, precision, ..task(&model, layout) };
            let whole = run(&Task { steps: 6, ..task })?;
            let parts = chain(&task, &[layout; 3], 2)?;
            assert_eq!(parts.losses, whole.losses, "{dtype} {precision:?} {layout}");
            assert_eq!(parts.norms, whole.norms, "{dtype} {precision:?} {layout}");
            assert_eq!(difference(&parts.tensors, &whole.tensors), None, "{dtype} {layout}");
        }
    }
    Ok(())
}

/// Weights, master weights and moments of 16-bit runs pass through a chain of layouts bit by bit.
#[test]
fn a_chain_of_layouts_moves_16_bit_state_exactly() -> Result<()> {
    for model in [tied(), untied()] {
        for (dtype, precision) in precisions() {
            let folder = tempfile::tempdir().unwrap();
            let mut load = folder.path().join("start");
            let task = Task { dtype, precision, ..task(&model, Layout::model(2, 2)) };
            let saved = run(&Task { steps: 2, save: Some(&load), ..task })?;
            for (part, layout) in layouts().into_iter().enumerate() {
                let save = folder.path().join(part.to_string());
                let step =
                    Task { load: Some(&load), save: Some(&save), seed: 4321, layout, ..task };
                let found = run(&step)?;
                assert_eq!(difference(&found.tensors, &saved.tensors), None, "{dtype} {layout}");
                load = save;
            }
        }
    }
    Ok(())
}

/// The random numbers of stochastic rounding belong to step and element, not to the rank. A step without a learning
/// rate rounds the same master weights to the same bits in every layout.
#[test]
fn stochastic_rounding_is_the_same_in_every_layout() -> Result<()> {
    let model = tied();
    let folder = tempfile::tempdir().unwrap();
    let save = Some(folder.path());
    for dtype in [DType::BF16, DType::F16] {
        let start = Task { dtype, precision: STOCHASTIC, ..task(&model, Layout::model(2, 2)) };
        let saved = run(&Task { steps: 2, save, ..start })?;
        let still = Task { learning_rate: 0.0, steps: 1, load: save, seed: 4321, ..start };
        let weights = |found: Found| {
            let is_weight = |name: &String| !name.starts_with("optimizer.exp_avg");
            found.tensors.into_iter().filter(|(name, _)| is_weight(name)).collect()
        };
        let wanted = weights(run(&Task { layout: Layout::SERIAL, ..still })?);
        // It draws again: not all weights are those of the step before.
        assert!(difference(&wanted, &weights(saved)).is_some());
        for layout in layouts() {
            let found = weights(run(&Task { layout, ..still })?);
            assert_eq!(difference(&found, &wanted), None, "{dtype} {layout}");
        }
    }
    Ok(())
}

/// A chain of layouts has the losses, norms, weights and moments of one rank. In f64, rounding does not hide a state
/// that a change of layout damages.
#[test]
fn a_chain_of_layouts_is_one_run() -> Result<()> {
    for model in [tied(), untied()] {
        let layouts: Vec<Layout> =
            layouts().into_iter().filter(|layout| layout.allowed(&model)).collect();
        let task = task(&model, Layout::SERIAL);
        let whole = run(&Task { steps: 2 * layouts.len(), ..task })?;
        let parts = chain(&task, &layouts, 2)?;
        let pairs = [(&parts.losses, &whole.losses), (&parts.norms, &whole.norms)];
        for (got, want) in pairs.into_iter().flat_map(|(got, want)| got.iter().zip(want)) {
            assert!((got - want).abs() <= 1e-9 * want, "{got}, want {want}");
        }
    }
    Ok(())
}

/// The maximum distance of two runs of the same samples: relative difference of losses, ratio of gradient norms.
fn drift(got: &Found, want: &Found) -> (f64, f64) {
    let pairs = |got: &[f64], want: &[f64]| -> Vec<f64> {
        got.iter().zip(want).map(|(got, want)| got / want).collect()
    };
    let [losses, norms] = [pairs(&got.losses, &want.losses), pairs(&got.norms, &want.norms)];
    let loss = losses.iter().map(|ratio| (ratio - 1.0).abs()).fold(0.0, f64::max);
    (loss, norms.iter().map(|ratio| ratio.max(1.0 / ratio)).fold(1.0, f64::max))
}

/// Training amplifies rounding errors by the same factor in every type, whether a run is interrupted or not. So the
/// drift of 16-bit runs is that of their rounding, and what a change of layout loses would show in f64 and f32.
#[test]
fn chains_drift_as_unbroken_runs_do() -> Result<()> {
    /// The amplification of rounding in the losses of 50 steps, with room for other processors: measured are up to 2,
    /// for runs of both kinds.
    const AMPLIFICATION: f64 = 256.0;
    let dropout = GptConfig { hidden_dropout: 0.0, attention_dropout: 0.0, ..tied() };
    let model = GptConfig { num_layers: 3, ..dropout };
    let layouts = [
        Layout::SERIAL,
        Layout::model(2, 1),
        Layout::data(2, Sharding::Weights),
        Layout::model(1, 2),
        Layout { cp: 2, ..Layout::SERIAL },
    ];
    let nearest = PrecisionConfig::default();
    for (dtype, precision, epsilon) in [
        (DType::F64, nearest, Some(f64::EPSILON)),
        (DType::F32, nearest, Some(f64::from(f32::EPSILON))),
        // At 2^-7 the drift has reached its bounds, which are not those of rounding.
        (DType::BF16, nearest, None),
        (DType::BF16, STOCHASTIC, None),
    ] {
        let (learning_rate, distinct_samples) = (4e-3, 64);
        let start = task(&model, Layout::SERIAL);
        let task = Task { dtype, precision, learning_rate, distinct_samples, ..start };
        let steps = 10;
        let one_rank = run(&Task { steps: steps * layouts.len(), ..task })?;
        let unbroken = |layout| run(&Task { steps: steps * layouts.len(), layout, ..task });
        let mut found = Vec::new();
        for &layout in &layouts[1..] {
            found.push(("unbroken", drift(&unbroken(layout)?, &one_rank)));
        }
        for turn in [0, 2] {
            let mut layouts = layouts;
            layouts.rotate_left(turn);
            found.push(("chain", drift(&chain(&task, &layouts, steps)?, &one_rank)));
        }
        for (what, (loss, norm)) in found {
            println!("{dtype} {:?} {what}: loss {loss:.1e}, norm x {norm:.3}", precision.rounding);
            let most = epsilon.map_or(f64::INFINITY, |epsilon| AMPLIFICATION * epsilon);
            assert!(loss <= most, "{dtype} {what}: {loss:e} is more than {most:e}");
            assert!(norm - 1.0 <= 16.0 * most, "{dtype} {what}: {norm} is more than 1 + {most:e}");
        }
    }
    Ok(())
}
