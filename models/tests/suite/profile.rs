//! The profile of a benchmark: its rows add up to the step, and count the work that the model's shapes give.

use ferrotron_models::bench::{BenchConfig, bench};
use ferrotron_models::gpt::GptConfig;
use ferrotron_models::profile::{OperationProfile, Profile, profile};
use ferrotron_tensor::ceilings::Ceilings;
use ferrotron_tensor::{DType, Device, Result};
use std::cell::Cell;

const LAYERS: usize = 2;
const WIDTH: usize = 32;
const VOCAB: usize = 96;
const LENGTH: usize = 16;
const BATCH: usize = 3;

/// Rates of 1, where a test does not look at what they are.
const CEILINGS: Ceilings =
    Ceilings { f32: 1.0, f64: 1.0, bf16: 1.0, f16: 1.0, read: 1.0, update: 1.0, cache: 1.0 };

fn config(steps: usize) -> BenchConfig {
    BenchConfig {
        micro_batch_size: BATCH,
        steps,
        ..BenchConfig::new(GptConfig::gpt2(VOCAB, LAYERS, WIDTH, 4, LENGTH))
    }
}

fn profiled(dtype: DType, threads: usize) -> Result<Profile> {
    let config = BenchConfig { dtype, profile: true, ..config(4) };
    Ok(bench(&config, &Device::cpu(threads)?)?.profile.expect("it was asked for"))
}

fn row<'a>(found: &'a Profile, pass: &str, name: &str) -> &'a OperationProfile {
    let mut rows = found.operations.iter();
    let named = |row: &&OperationProfile| row.pass == pass && row.operation == name;
    rows.find(named).unwrap_or_else(|| panic!("no {pass} {name} in {found:?}"))
}

/// The times of rows are parts of the steps' own time, so the sum is that of numbers in nanoseconds: only their rounding
/// to f64 can differ.
#[test]
fn rows_and_the_rest_add_up_to_the_step() -> Result<()> {
    for threads in [1, 2] {
        let found = profiled(DType::F32, threads)?;
        let sum = found.operations.iter().map(|row| row.ms).sum::<f64>() + found.other_ms;
        let step = 1e3 * found.s_per_step;
        assert!((sum - step).abs() <= 1e-9 * step, "{sum} of {step} ms");
        assert_eq!(found.steps, 4);
        assert!(found.operations.is_sorted_by(|a, b| a.ms >= b.ms));
    }
    Ok(())
}

#[test]
fn calls_and_work_are_those_of_the_shapes() -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        let found = profiled(dtype, 2)?;
        let tokens = (BATCH * LENGTH) as f64;
        // Weights of the linear layers of a block: 3 + 1 of attention, 4 + 4 of the MLP.
        let (blocks, head) = ((LAYERS * 12 * WIDTH * WIDTH) as f64, (VOCAB * WIDTH) as f64);
        // Query i sees i + 1 keys; 4 heads of width 8.
        let seen = (BATCH * LENGTH * (LENGTH + 1) / 2) as f64;
        let scores = (LAYERS * WIDTH) as f64 * 2.0 * seen;
        for (pass, name, calls, flops) in [
            ("forward", "linear", 4 * LAYERS + 1, 2.0 * tokens * (blocks + head)),
            ("backward", "linear_input_gradient", 4 * LAYERS, 2.0 * tokens * blocks),
            ("backward", "linear_weight_gradient", 4 * LAYERS, 2.0 * tokens * blocks),
            ("backward", "matmul", 2, 4.0 * tokens * head),
            ("forward", "attention", LAYERS, 2.0 * scores),
            ("backward", "attention_backward", LAYERS, 5.0 * scores),
        ] {
            let row = row(&found, pass, name);
            let counted = row.gflops.expect("products") * row.ms * 1e6;
            assert!((counted / flops - 1.0).abs() < 1e-9, "{name}: {counted}, not {flops}");
            assert_eq!(row.calls, calls as f64, "{name}");
            assert!(row.of_ceiling.is_some_and(|share| share > 0.0), "{row:?}");
        }
        // Weights, gradients and two moments are read, all but the gradients written.
        let params = 12 * LAYERS * WIDTH * WIDTH // matrices
            + (VOCAB + LENGTH) * WIDTH // embeddings
            + LAYERS * (9 + 4) * WIDTH + 2 * WIDTH; // biases and norms
        let copies = if dtype == DType::BF16 { 2 } else { 0 };
        let adamw = row(&found, "update", "adamw");
        let bytes = adamw.gb_per_s.expect("memory") * adamw.ms * 1e6;
        assert!((bytes / (params * (28 + copies)) as f64 - 1.0).abs() < 1e-9, "{bytes}");
        let norm = row(&found, "step", "sq_norm");
        let bytes = norm.gb_per_s.expect("memory") * norm.ms * 1e6;
        assert!((bytes / (4 * params) as f64 - 1.0).abs() < 1e-9, "{bytes}");
        for (pass, name) in [
            ("forward", "embedding"),
            ("forward", "gelu_tanh"),
            ("forward", "layer_norm"),
            ("forward", "cross_entropy"),
            ("backward", "gelu_tanh"),
            ("backward", "cross_entropy"),
            ("backward", "embedding_backward"),
        ] {
            assert!(row(&found, pass, name).gb_per_s.is_some(), "{pass} {name}");
        }
    }
    Ok(())
}

/// `bench` also computes the products of a step by themselves.
#[test]
fn work_outside_of_steps_is_left_out() -> Result<()> {
    let steps = || bench(&config(2), &Device::cpu(1)?).map(drop);
    let found = profile(|| Ok(CEILINGS), &Device::cpu(1)?, steps)?;
    let sum = found.operations.iter().map(|row| row.ms).sum::<f64>() + found.other_ms;
    let step = 1e3 * found.s_per_step;
    assert!((sum - step).abs() <= 1e-9 * step, "{sum} of {step} ms");
    Ok(())
}

/// Another program may slow the machine before the steps or behind them.
#[test]
fn the_higher_rates_of_two_measurements_count() -> Result<()> {
    let times = Cell::new(0);
    let ceilings = || {
        let (slow, fast) = (1e9, 2e9);
        let [f32, read] =
            if times.replace(times.get() + 1) == 0 { [fast, slow] } else { [slow, fast] };
        Ok(Ceilings { f32, read, f64: slow, update: slow, ..CEILINGS })
    };
    let steps = || bench(&config(1), &Device::cpu(1)?).map(drop);
    let found = profile(ceilings, &Device::cpu(1)?, steps)?.ceilings;
    assert_eq!((times.get(), found.f32_gflops, found.read_gb_per_s), (2, 2.0, 2.0));
    assert_eq!((found.f64_gflops, found.update_gb_per_s), (1.0, 1.0));
    Ok(())
}

#[test]
fn without_a_step_there_is_no_profile() -> Result<()> {
    let error = profile(|| Ok(CEILINGS), &Device::cpu(1)?, || Ok(())).unwrap_err().to_string();
    assert!(error.contains("no step"), "{error}");
    Ok(())
}
