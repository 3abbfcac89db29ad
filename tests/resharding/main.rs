//! A run saved in one layout resumes in any other: weights, moments and place in the data, exactly.
//!
//! The layouts are those of Megatron-LM's `dist_checkpointing/models/test_gpt_model.py` and of DeepSpeed's
//! `test_universal_checkpoint.py`, with sequence and context parallelism beside them. A small GPT or
//! BERT with dropout, and a vocabulary, widths and layers that nothing divides, is trained for two steps in one
//! layout, saved, loaded and saved in another, loaded in the first, and resumed in both.

mod bert;
mod chains;
#[path = "../../nn/tests/common/heavy_ball.rs"]
mod heavy_ball;
mod local;
#[path = "../../nn/tests/common/orthogonalized.rs"]
mod orthogonalized;
#[path = "../common/pairs.rs"]
mod pairs;
mod read_once;
mod real_size;
#[path = "../../nn/tests/common/row_scaled.rs"]
mod row_scaled;
mod samples;
#[path = "../common/tensors.rs"]
mod tensors;
mod train;
mod unflushed;

use ferrotron::models::gpt::GptConfig;
use ferrotron::models::trainer::PrecisionConfig;
use ferrotron::nn::{AdafactorConfig, MuonConfig, OptimizerConfig, Sharding, StepSize};
use ferrotron::parallel::tensor_parallel::SequenceParallel;
use ferrotron::tensor::{DType, Result};
use heavy_ball::HeavyBall;
use orthogonalized::Orthogonalized;
use row_scaled::RowScaled;
use samples::Configuration;
use train::{Found, Layout, SEQ_LENGTH, Task, difference, load_errors, run};

/// GPT-2 style, tied.
fn tied() -> GptConfig {
    GptConfig {
        hidden_dropout: 0.1,
        attention_dropout: 0.1,
        init_method_std: 0.3,
        ffn_hidden_size: 21,
        ..GptConfig::gpt2(13, 9, 16, 8, SEQ_LENGTH)
    }
}

/// Llama style, with a head of its own and grouped queries.
fn untied() -> GptConfig {
    GptConfig {
        hidden_dropout: 0.1,
        attention_dropout: 0.1,
        init_method_std: 0.3,
        ffn_hidden_size: 21,
        ..GptConfig::llama(11, 9, 16, 8, 4, SEQ_LENGTH)
    }
}

fn task<C>(model: &C, layout: Layout) -> Task<'_, C> {
    Task {
        model,
        optimizer: OptimizerConfig::ADAMW,
        ema_decay: None,
        keep_in_fp32: &[],
        dtype: DType::F64,
        precision: PrecisionConfig::default(),
        learning_rate: 1e-2,
        distinct_samples: 1 << 32,
        layout,
        seed: 1234,
        load: None,
        steps: 0,
        between: None,
        save: None,
    }
}

/// Weights that are gathered when they are read are gathered for evaluations and checkpoints too. Doing that changes
/// nothing in the steps that follow.
#[test]
fn evaluating_and_saving_between_steps_change_nothing() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let between = Some(folder.path());
    for model in [tied(), untied()] {
        let serial = run(&Task { steps: 3, between, ..task(&model, Layout::SERIAL) })?;
        for sharding in Sharding::ALL {
            let task = Task { steps: 3, ..task(&model, Layout::data(2, sharding)) };
            let (with, without) = (run(&Task { between, ..task })?, run(&task)?);
            assert_eq!(with.losses, without.losses, "{sharding:?}");
            assert_eq!(difference(&with.tensors, &without.tensors), None, "{sharding:?}");
            for (got, want) in with.evaluations.iter().zip(&serial.evaluations) {
                let off = (got - want).abs();
                assert!(off <= 1e-10 * want, "{sharding:?}: validation loss {got}, want {want}");
            }
            let load = Task { steps: 0, load: between, seed: 4321, ..task };
            let loaded = run(&Task { layout: Layout::SERIAL, ..load })?;
            assert_eq!(difference(&loaded.tensors, &with.tensors), None, "{sharding:?}");
        }
    }
    Ok(())
}

/// Two steps in `a`, two more in `b` and, with what `b` had saved before them, in `a`.
fn round_trip<C: Configuration>(
    a: &Task<C>,
    b: Layout,
    serial: &Found,
) -> std::result::Result<(), String> {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    let text = |error: ferrotron::Error| error.to_string();
    let saved = run(&Task { steps: 2, save: Some(&first), ..*a }).map_err(text)?;
    let data = |found: &Found| (found.progress.step, found.progress.consumed_samples);
    let same = |what: &str, found: &Found| match difference(&found.tensors, &saved.tensors) {
        Some(difference) => Err(format!("{what}: {difference}")),
        None if data(found) != data(&saved) => {
            Err(format!("{what}: {:?} became {:?}", saved.progress, found.progress))
        }
        None => Ok(()),
    };
    // Other initial weights, so that what is not loaded shows.
    let other = Task { layout: b, seed: 4321, ..*a };
    let found = run(&Task { load: Some(&first), save: Some(&second), ..other }).map_err(text)?;
    same("loaded", &found)?;
    let back = Task { seed: 4321, load: Some(&second), ..*a };
    same("and back", &run(&back).map_err(text)?)?;

    for task in [Task { load: Some(&first), ..other }, back] {
        let found = run(&Task { steps: 2, ..task }).map_err(text)?;
        for (step, (got, want)) in found.losses.iter().zip(&serial.losses[2..]).enumerate() {
            let tolerance = 1e-10 * want.abs();
            if (got - want).abs() > tolerance || got.is_nan() {
                let (layout, step) = (task.layout, step + 3);
                return Err(format!("loss of step {step} in {layout}: got {got}, want {want}"));
            }
        }
        if found.samples != serial.samples[2..] {
            return Err(format!("samples: got {:?}, want {:?}", found.samples, serial.samples));
        }
    }
    Ok(())
}

/// Tries pairs of layouts in both directions, as far as `model` allows; returns how many.
fn try_all<C: Configuration>(model: &C, pairs: &[(Layout, Layout)]) -> usize {
    try_all_of(&task(model, Layout::SERIAL), pairs)
}

/// Runs a task's other result like [`try_all`].
fn try_all_of<C: Configuration>(task: &Task<C>, pairs: &[(Layout, Layout)]) -> usize {
    let model = task.model.sizes();
    let serial = run(&Task { steps: 4, ..*task }).unwrap();
    let allowed: Vec<_> =
        pairs.iter().filter(|(a, b)| a.allowed(model) && b.allowed(model)).collect();
    let mut failures = Vec::new();
    for &&(a, b) in &allowed {
        for (a, b) in [(a, b), (b, a)] {
            if let Err(failure) = round_trip(&Task { layout: a, ..*task }, b, &serial) {
                failures.push(format!("{a} -> {b}: {failure}"));
            }
        }
    }
    let count = failures.len();
    assert!(failures.is_empty(), "{count} changes of layout failed:\n{}", failures.join("\n"));
    allowed.len()
}

#[test]
fn between_tensor_and_pipeline_parallel() {
    let pairs: Vec<_> = [
        ((2, 4), (4, 2)),
        ((1, 8), (8, 1)),
        ((2, 1), (1, 8)),
        ((1, 1), (2, 2)),
        ((1, 1), (2, 4)),
        ((2, 4), (2, 4)),
    ]
    .map(|(a, b)| (Layout::model(a.0, a.1), Layout::model(b.0, b.1)))
    .to_vec();
    assert_eq!(try_all(&tied(), &pairs), 6);
    // Four key and value groups allow no eight ranks.
    assert_eq!(try_all(&untied(), &pairs), 5);
}

#[test]
fn between_data_parallel_sizes_and_zero_stages() {
    let mut pairs = Vec::new();
    for sharding in Sharding::ALL {
        for (a, b) in [(2, 2), (4, 2)] {
            pairs.push((Layout::data(a, sharding), Layout::data(b, sharding)));
        }
    }
    // From every stage to every other.
    for (i, a) in Sharding::ALL.into_iter().enumerate() {
        for b in Sharding::ALL.into_iter().skip(i + 1) {
            pairs.push((Layout::data(2, a), Layout::data(4, b)));
        }
    }
    assert_eq!(try_all(&tied(), &pairs), 14);
    assert_eq!(try_all(&untied(), &pairs[..8]), 8);
}

#[test]
fn between_layouts_of_every_axis() {
    let tp_sp = Layout { sequence: SequenceParallel::On, ..Layout::model(2, 1) };
    let sharded = Layout { dp: 2, sharding: Sharding::Weights, ..tp_sp };
    let pipeline = Layout { dp: 2, sharding: Sharding::Optimizer, ..Layout::model(2, 2) };
    let interleaved = Layout { chunks: 2, ..Layout::model(2, 2) };
    let context =
        Layout { cp: 2, sharding: Sharding::Gradients, ..Layout::data(2, Sharding::None) };
    let long = Layout { cp: 4, ..tp_sp };
    let pairs = [
        (sharded, context),
        (sharded, Layout::model(1, 8)),
        (pipeline, Layout::data(4, Sharding::Weights)),
        (pipeline, long),
        (interleaved, Layout::model(4, 1)),
        (Layout { sharding: Sharding::Weights, ..pipeline }, context),
        (Layout { dp: 2, sharding: Sharding::Weights, ..interleaved }, Layout::SERIAL),
    ];
    assert_eq!(try_all(&tied(), &pairs), 7);
    assert_eq!(try_all(&untied(), &pairs), 7);
}

/// Sums of rows and of columns have shards of their own. That of a sharded dim is sharded with it; the other is on all
/// ranks and written by one.
#[test]
fn with_adafactor() -> Result<()> {
    let relative = AdafactorConfig { beta1: 0.9, weight_decay: 0.1, ..AdafactorConfig::default() };
    let config = AdafactorConfig { beta1: 0.0, step_size: StepSize::Scheduled, ..relative };
    let tp_sp = Layout { sequence: SequenceParallel::On, ..Layout::model(2, 1) };
    let sharded = Layout { dp: 2, sharding: Sharding::Weights, ..tp_sp };
    let pipeline = Layout { dp: 2, sharding: Sharding::Optimizer, ..Layout::model(2, 2) };
    let context = Layout { cp: 2, ..Layout::data(2, Sharding::Gradients) };
    let pairs = [
        (Layout::model(2, 4), Layout::model(4, 2)),
        (Layout::data(2, Sharding::Optimizer), Layout::data(4, Sharding::Gradients)),
        (Layout::data(4, Sharding::Weights), Layout::data(2, Sharding::None)),
        (sharded, context),
        (pipeline, Layout::data(4, Sharding::Weights)),
        (Layout::SERIAL, sharded),
    ];
    for (model, config) in [(tied(), config), (untied(), relative)] {
        let serial = task(&model, Layout::SERIAL);
        let task = Task { optimizer: OptimizerConfig::Adafactor(config), ..serial };
        assert_eq!(try_all_of(&task, &pairs), pairs.len());
    }
    // Another optimizer's state is no state.
    let (model, folder) = (tied(), tempfile::tempdir().unwrap());
    let adamw = Task { steps: 1, save: Some(folder.path()), ..task(&model, Layout::SERIAL) };
    run(&adamw)?;
    let optimizer = OptimizerConfig::Adafactor(config);
    let load = Task { optimizer, load: adamw.save, ..task(&model, Layout::SERIAL) };
    let error = run(&load).unwrap_err().to_string();
    assert!(error.contains("was saved with another optimizer: it has exp_avg of '"), "{error}");
    Ok(())
}

/// Each state that a rule declares, be it a user's, goes with its weights, and so does a moving average of these.
#[test]
fn with_other_rules_and_a_moving_average() -> Result<()> {
    let tp_sp = Layout { sequence: SequenceParallel::On, ..Layout::model(2, 1) };
    let sharded = Layout { dp: 2, sharding: Sharding::Weights, ..tp_sp };
    let pipeline = Layout { dp: 2, sharding: Sharding::Optimizer, ..Layout::model(2, 2) };
    let pairs = [
        (Layout::model(2, 4), Layout::model(4, 2)),
        (Layout::data(4, Sharding::Weights), Layout::data(2, Sharding::None)),
        (pipeline, sharded),
        (Layout::SERIAL, sharded),
    ];
    let muon = OptimizerConfig::Muon(MuonConfig { extra_scale: 0.2, ..MuonConfig::default() });
    let lion = OptimizerConfig::Lion { beta1: 0.95, beta2: 0.98, weight_decay: 0.1 };
    for (model, optimizer) in [
        (tied(), muon),
        (untied(), muon),
        (untied(), lion),
        (tied(), OptimizerConfig::custom(&HeavyBall { weight_decay: 0.1 })),
        (untied(), OptimizerConfig::custom(&Orthogonalized)),
        (tied(), OptimizerConfig::custom(&RowScaled)),
    ] {
        let task = Task { optimizer, ema_decay: Some(0.9), ..task(&model, Layout::SERIAL) };
        assert_eq!(try_all_of(&task, &pairs), pairs.len());
    }
    // A run may begin to average: with the weights that it has.
    let (model, folder) = (tied(), tempfile::tempdir().unwrap());
    let plain = Task { steps: 2, save: Some(folder.path()), ..task(&model, Layout::SERIAL) };
    run(&plain)?;
    let load = Task { steps: 0, load: plain.save, save: None, ema_decay: Some(0.9), ..plain };
    let found = run(&load)?.tensors;
    let averages = found.iter().filter(|(name, _)| name.starts_with("optimizer.ema."));
    let mut count = 0;
    for (name, average) in averages {
        assert_eq!(average, &found[&name["optimizer.ema.".len()..]], "{name}");
        count += 1;
    }
    assert!(count > 10, "only {count} averages");
    Ok(())
}

/// Megatron-LM's "vocab padding change": here no rank pads, so every row of every size is exact.
#[test]
fn vocabularies_that_tensor_parallelism_does_not_divide() {
    for vocab in [13, 17, 127] {
        for style in [tied(), untied()] {
            let model = GptConfig { vocab_size: vocab, num_layers: 1, ..style };
            let pairs = [(1, 2), (2, 4), (1, 4)];
            let pairs = pairs.map(|(a, b)| (Layout::model(a, 1), Layout::model(b, 1)));
            assert_eq!(try_all(&model, &pairs), 3);
        }
    }
}

#[test]
fn in_f32_the_bits_are_the_same_too() -> Result<()> {
    let model = tied();
    let folder = tempfile::tempdir().unwrap();
    let save = Some(folder.path());
    let a = Task { dtype: DType::F32, ..task(&model, Layout::model(2, 4)) };
    let saved = run(&Task { steps: 2, save, ..a })?;
    for layout in [Layout::data(4, Sharding::Weights), Layout::model(4, 2), Layout::SERIAL] {
        let found = run(&Task { layout, load: save, seed: 4321, ..a })?;
        assert_eq!(difference(&found.tensors, &saved.tensors), None, "{layout}");
    }
    Ok(())
}

#[test]
fn parameters_in_f32_keep_their_bits_beside_those_in_16_bits() -> Result<()> {
    let tp_sp = Layout { sequence: SequenceParallel::On, ..Layout::model(2, 1) };
    let sharded = Layout { dp: 2, sharding: Sharding::Weights, ..tp_sp };
    for model in [tied(), untied()] {
        let folder = tempfile::tempdir().unwrap();
        let save = Some(folder.path());
        let keep_in_fp32 = &["*norm*", "wte", "blocks.3.mlp"][..];
        let base = Task { dtype: DType::BF16, keep_in_fp32, ..task(&model, Layout::model(2, 4)) };
        let saved = run(&Task { steps: 2, save, ..base })?;
        for layout in [Layout::data(4, Sharding::Optimizer), sharded, Layout::SERIAL] {
            let found = run(&Task { layout, load: save, seed: 4321, ..base })?;
            assert_eq!(difference(&found.tensors, &saved.tensors), None, "{layout}");
        }
    }
    Ok(())
}

/// The comparison notices: of two runs with other initial weights every tensor differs.
#[test]
fn another_seed_differs_everywhere() -> Result<()> {
    for model in [tied(), untied()] {
        let a = run(&Task { steps: 2, ..task(&model, Layout::model(2, 2)) })?;
        let b = run(&Task { steps: 2, seed: 4321, ..task(&model, Layout::model(2, 2)) })?;
        assert!(a.tensors.keys().eq(b.tensors.keys()));
        for (name, values) in &a.tensors {
            assert_ne!(values, &b.tensors[name], "{name}");
        }
    }
    Ok(())
}

/// A table of other rows belongs to another model: neither cut nor filled up in silence.
#[test]
fn another_vocabulary_is_refused() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let padded = GptConfig { vocab_size: 16, ..tied() };
    let save = Some(folder.path());
    run(&Task { steps: 1, save, ..task(&padded, Layout::model(2, 1)) })?;
    let error = run(&Task { load: save, ..task(&tied(), Layout::model(2, 1)) }).unwrap_err();
    assert!(error.to_string().contains("vocab_size 16 there, 13 here"), "{error}");
    Ok(())
}

/// Ranks verify a checkpoint together, each some of its files: a rank that finds damage tells all.
#[test]
fn damage_in_any_file_ends_every_rank_that_loads() -> Result<()> {
    let model = tied();
    let folder = tempfile::tempdir().unwrap();
    let save = Some(folder.path());
    let saved = Task { steps: 1, save, ..task(&model, Layout::model(2, 2)) };
    run(&saved)?;
    let files: Vec<_> = std::fs::read_dir(folder.path().join("iter_0000001")).unwrap().collect();
    let names = files.iter().map(|entry| entry.as_ref().unwrap().file_name());
    let names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
    assert_eq!(names.len(), 4 + 4 + 3, "{names:?}");
    for (name, entry) in names.iter().zip(files) {
        let path = entry.unwrap().path();
        let good = std::fs::read(&path).unwrap();
        let mut bad = good.clone();
        *bad.last_mut().unwrap() ^= 1;
        std::fs::write(&path, bad).unwrap();
        for layout in [Layout::SERIAL, Layout::data(4, Sharding::None), Layout::model(4, 2)] {
            let errors = load_errors(&Task { load: save, ..task(&model, layout) });
            assert_eq!(errors.len(), layout.ranks(), "{name} in {layout}");
            for error in errors {
                assert!(error.contains(name) && error.contains("is damaged"), "{name}: {error}");
            }
        }
        std::fs::write(&path, good).unwrap();
    }
    run(&Task { load: save, ..task(&model, Layout::model(4, 2)) }).map(drop)
}
