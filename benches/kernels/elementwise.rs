//! Operations besides products, on one thread: the best time of each, and the floor below which this processor cannot
//! bring it.
//!
//! The floor of an operation in memory is its bytes at the rate of a loop that only adds. That of one in the second-level
//! cache is its arithmetic at the rate of multiply-adds on registers, each instruction for a vector counted once, also a
//! division, which takes longer; that of a norm, which computes little, is its bytes at the cache's rate. All rates are measured
//! before and after each row, because machines change speed.

use ferrotron::tensor::ceilings::Ceilings;
use ferrotron::tensor::ops::adafactor::{
    Adafactor, MatrixBatch, RowColFactors, SquareSums, adafactor, square_sums, update_sq_norm,
};
use ferrotron::tensor::ops::adamw::{AdamW, adamw};
use ferrotron::tensor::ops::cross_entropy::{
    CrossEntropyConfig, cross_entropy, cross_entropy_backward,
};
use ferrotron::tensor::ops::layer_norm::{layer_norm, layer_norm_backward};
use ferrotron::tensor::ops::lion::{Lion, lion};
use ferrotron::tensor::ops::pointwise::{unary, unary_backward};
use ferrotron::tensor::ops::round::{Stochastic, round};
use ferrotron::tensor::ops::rounded::Rounded;
use ferrotron::tensor::ops::sgd::{Nesterov, Sgd, sgd};
use ferrotron::tensor::ops::sq_norm::add_sq_norm;
use ferrotron::tensor::ops::step::{DeviceStepParams, StepParams};
use ferrotron::tensor::ops::table::Unary;
use ferrotron::tensor::{RandomKey, ShardSpec};
use ferrotron::{DType, Device, Result, Tensor};
use std::time::Instant;

/// Elements of operations in memory: four operands take 400 MB.
const LARGE: usize = 24 << 20;
/// Elements of operations in the cache: as many as make the calls themselves a small part.
const SMALL: usize = 64 << 10;
/// Rows of logits.
const ROWS: usize = 4;
/// Width of normalised rows: that of GPT-2 124M.
const WIDTH: usize = 768;
const ROUNDS: usize = 15;

/// The least work of an operation for each element.
enum Floor {
    /// Instructions for a vector.
    Arithmetic(f64),
    /// Bytes read and written.
    Memory(f64, f64),
    /// Bytes read or written, all in the second-level cache.
    Cache(f64),
}

pub fn table() {
    rows().expect("kernels run");
}

fn rows() -> Result<()> {
    println!("{:40}{:>12}{:>12}{:>8}", "one thread, for 16 elements", "ns", "floor, ns", "ratio");
    let device = &Device::cpu(1)?;
    let full = |dtype, n: usize, x| Tensor::full(device, dtype, &[n], x);

    let (x, mut dx) = (full(DType::F32, SMALL, 0.7)?, Some(full(DType::F32, SMALL, 0.5)?));
    row(device, "gelu_tanh", SMALL, Floor::Arithmetic(17.0), || {
        unary(Unary::GeluTanh, 0.0, &x).map(drop)
    })?;
    row(device, "gelu_tanh backward", SMALL, Floor::Arithmetic(23.0), || {
        dx = Some(unary_backward(Unary::GeluTanh, 0.0, dx.take().expect("kept"), Some(&x))?);
        Ok(())
    })?;
    let (mut logits, targets) =
        (Some(full(DType::F32, SMALL, 0.5)?.reshape(&[ROWS, SMALL / ROWS])?), [7_i64; ROWS]);
    let targets = Tensor::from_slice(device, &targets, &[ROWS])?;
    let config = CrossEntropyConfig::default();
    row(device, "cross_entropy", SMALL, Floor::Arithmetic(16.0), || {
        cross_entropy(logits.as_ref().expect("kept"), &targets, &config).map(drop)
    })?;
    let lse = cross_entropy(logits.as_ref().expect("kept"), &targets, &config)?.lse;
    let one = Tensor::full(device, DType::F32, &[], 1.0)?;
    row(device, "cross_entropy backward", SMALL, Floor::Arithmetic(16.0), || {
        let x = logits.take().expect("kept");
        logits = Some(cross_entropy_backward(x, &targets, &lse, &config, &one)?);
        Ok(())
    })?;
    norms(device)?;
    optimizers(device)
}

fn norms(device: &Device) -> Result<()> {
    let full = |dims: &[usize], x| Tensor::full(device, DType::F32, dims, x);
    let (x, dy) = (full(&[SMALL / WIDTH, WIDTH], 0.7)?, full(&[SMALL / WIDTH, WIDTH], 0.5)?);
    let elements = x.numel();
    let (weight, bias) = (full(&[WIDTH], 1.0)?, full(&[WIDTH], 0.0)?);
    row(device, "layer_norm", elements, Floor::Cache(8.0), || {
        layer_norm(&x, &weight, Some(&bias), 1e-5).map(drop)
    })?;
    let (_, mean, rstd) = layer_norm(&x, &weight, Some(&bias), 1e-5)?;
    row(device, "layer_norm backward", elements, Floor::Cache(12.0), || {
        layer_norm_backward(&dy, &x, &mean, &rstd, &weight, None).map(drop)
    })
}

fn optimizers(device: &Device) -> Result<()> {
    let full = |dtype, x| Tensor::full(device, dtype, &[LARGE], x);
    let (mut w, g) = (full(DType::F32, 0.1)?, full(DType::F32, 0.01)?);
    let (mut m, mut v, mut copy) =
        (full(DType::F32, 0.0)?, full(DType::F32, 0.0)?, full(DType::BF16, 0.1)?);
    let step =
        &DeviceStepParams::new(device, &StepParams { update: 1, lr: 1e-3, grad_scale: 1.0 })?;
    let (key, place) = (&RandomKey::new(1, 1, "bench"), &ShardSpec::unsharded(&[LARGE]));
    let random = Some(Stochastic { key, place, step: Some(step) });
    let mut total = Tensor::zeros(device, DType::F64, &[1])?;
    row(device, "sq_norm", LARGE, Floor::Memory(4.0, 0.0), || add_sq_norm(&mut total, &g))?;
    let config = AdamW::default();
    row(device, "adamw", LARGE, Floor::Memory(16.0, 12.0), || {
        adamw(&config, step, &mut w, &g, &mut m, &mut v, None)
    })?;
    let roundings = [("nearest", None), ("stochastic", random)];
    for (name, stochastic) in roundings {
        row(device, &format!("adamw, bf16 {name}"), LARGE, Floor::Memory(16.0, 14.0), || {
            let copy = Some(Rounded { target: &mut copy, stochastic });
            adamw(&config, step, &mut w, &g, &mut m, &mut v, copy)
        })?;
    }
    let config = Sgd { momentum: 0.9, weight_decay: 0.1, nesterov: Nesterov::Off };
    row(device, "sgd", LARGE, Floor::Memory(12.0, 8.0), || {
        sgd(&config, step, &mut w, &g, &mut m, None)
    })?;
    for (name, stochastic) in roundings {
        row(device, &format!("sgd, bf16 {name}"), LARGE, Floor::Memory(12.0, 10.0), || {
            let copy = Some(Rounded { target: &mut copy, stochastic });
            sgd(&config, step, &mut w, &g, &mut m, copy)
        })?;
    }
    row(device, "sgd, bf16 stochastic, in two passes", LARGE, Floor::Memory(12.0, 10.0), || {
        sgd(&config, step, &mut w, &g, &mut m, None)?;
        round(&mut copy, &w, random)
    })?;
    row(device, "lion, bf16 nearest", LARGE, Floor::Memory(12.0, 10.0), || {
        let copy = Some(Rounded::nearest(&mut copy));
        lion(&Lion::default(), step, &mut w, &g, &mut m, copy)
    })?;

    let shape = MatrixBatch::from_dims(&[LARGE / 2048, 2048]);
    let (mut rows, mut columns) = (
        Tensor::zeros(device, DType::F64, &[shape.rows])?,
        Tensor::zeros(device, DType::F64, &[shape.columns])?,
    );
    row(device, "adafactor, sums", LARGE, Floor::Memory(4.0, 0.0), || {
        square_sums(&shape, &g, &mut rows, &mut columns)
    })?;
    let ones = |n: usize| Tensor::full(device, DType::F32, &[n], 1.0);
    let factors = RowColFactors { shape, rows: ones(shape.rows)?, columns: ones(shape.columns)? };
    row(device, "adafactor, norm of the update", LARGE, Floor::Memory(4.0, 0.0), || {
        update_sq_norm(step, &g, &factors).map(drop)
    })?;
    let update = Tensor::full(device, DType::F64, &[1], 1.0)?;
    let sums = SquareSums { weights: None, update, numel: LARGE };
    let config = Adafactor { eps2: 1e-3, clip_threshold: 1.0, beta1: 0.0, weight_decay: 0.0 };
    for (name, stochastic) in roundings {
        row(device, &format!("adafactor, bf16 {name}"), LARGE, Floor::Memory(8.0, 6.0), || {
            let copy = Some(Rounded { target: &mut copy, stochastic });
            adafactor(&config, step, &mut w, &g, (&factors, &sums), None, copy)
        })?;
    }
    Ok(())
}

fn row(
    device: &Device,
    name: &str,
    elements: usize,
    floor: Floor,
    mut run: impl FnMut() -> Result<()>,
) -> Result<()> {
    let calls = (LARGE / 16 / elements).max(1);
    let mut least = f64::INFINITY;
    let before = Ceilings::measure(device)?;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        (0..calls).try_for_each(|_| run())?;
        least = least.min(start.elapsed().as_secs_f64() / calls as f64);
    }
    let ceilings = before.max(&Ceilings::measure(device)?);
    let floor = match floor {
        Floor::Arithmetic(instructions) => 2.0 * instructions / ceilings.f32,
        Floor::Memory(read, written) => ceilings.least_seconds(DType::F32, 0.0, read, written),
        Floor::Cache(bytes) => bytes / ceilings.cache,
    };
    let (time, floor) = (16e9 * least / elements as f64, 16e9 * floor);
    println!("{name:40}{time:>12.2}{floor:>12.2}{:>8.2}", time / floor);
    Ok(())
}
