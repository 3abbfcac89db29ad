//! Times kernels of a GPU at sizes that fill it: one JSON line each, with the share of the hardware's limit.
//! `scripts/gpu-check` runs it; without a GPU it says so and ends.
//!
//! Sizes are those of GPT-2 124M with 32 sequences of 1024 tokens, 8192 for the product, and of three more models for attention.
//! Words are kinds of kernels, such as `attentions`; all without one.
//! `cargo bench --bench gpu -- algorithms NAME WIDTH TOKENS VOCABULARY` times the algorithms for products of a model instead.

#[path = "gpu/algorithms.rs"]
mod algorithms;

use ferrotron::cuda::gpu::{Gpu, GpuConfig};
use ferrotron::tensor::ops::adamw::{AdamW, adamw};
use ferrotron::tensor::ops::attention::{
    AttentionConfig, attention, attention_backward_packed, split_packed,
};
use ferrotron::tensor::ops::layer_norm::{layer_norm, layer_norm_backward};
use ferrotron::tensor::ops::matmul::{Accum, matmul_into};
use ferrotron::tensor::ops::random::normal;
use ferrotron::tensor::ops::rounded::Rounded;
use ferrotron::tensor::ops::step::{DeviceStepParams, StepParams};
use ferrotron::tensor::{RandomKey, ShardSpec};
use ferrotron::{DType, Device, Error, Result, Tensor};
use std::time::Instant;

/// Measures the kernels of a kind.
type Measure = fn(&Device) -> Result<()>;

/// Seconds that a measurement takes at least.
const ENOUGH: f64 = 0.2;

fn main() -> Result<()> {
    let device = match Device::cuda(&GpuConfig::new(0)) {
        Ok(device) => device,
        Err(error) => {
            println!("no GPU to measure: {error}");
            return Ok(());
        }
    };
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    if let [what, model, numbers @ ..] = &words[..]
        && what == "algorithms"
    {
        let number = |i: usize| numbers.get(i).and_then(|word| word.parse().ok());
        let (Some(width), Some(tokens), Some(vocabulary)) = (number(0), number(1), number(2))
        else {
            return Err(Error::config("gpu", "algorithms needs NAME WIDTH TOKENS VOCABULARY"));
        };
        return algorithms::algorithms(model, width, tokens, vocabulary);
    }
    let groups: [(&str, Measure); 5] = [
        ("copies", copies),
        ("products", products),
        ("attentions", attentions),
        ("norms", norms),
        ("optimizer", optimizer),
    ];
    let is_wanted = |name: &&str| words.is_empty() || words.iter().any(|word| word == name);
    let mut wanted = groups.iter().filter(|(name, _)| is_wanted(name));
    wanted.try_for_each(|(_, measure)| measure(&device))
}

fn random(device: &Device, dims: &[usize]) -> Result<Tensor> {
    normal(
        device,
        DType::BF16,
        &ShardSpec::unsharded(dims),
        &RandomKey::new(0, 0, "bench"),
        0.0,
        1.0,
    )
}

/// Prints what `f` does in a second, where a call does `work` of `unit` x 10^9 or 10^12.
fn report(
    device: &Device,
    name: &str,
    (work, unit): (f64, &str),
    mut f: impl FnMut() -> Result<()>,
) -> Result<()> {
    f()?; // compiles the kernel, fills the plan cache
    let mut calls = 1;
    let seconds = loop {
        device.synchronize()?;
        let start = Instant::now();
        (0..calls).try_for_each(|_| f())?;
        device.synchronize()?;
        let seconds = start.elapsed().as_secs_f64();
        if seconds > ENOUGH {
            break seconds / calls as f64;
        }
        calls *= 2;
    };
    let value = work / seconds;
    println!(
        r#"{{"name": "{name}", "value": {value:.1}, "unit": "{unit}", "seconds": {seconds:e}}}"#
    );
    Ok(())
}

fn gigabytes(bytes: usize) -> (f64, &'static str) {
    (bytes as f64 / 1e9, "GB/s")
}

fn teraflops(operations: f64) -> (f64, &'static str) {
    (operations / 1e12, "TFLOP/s")
}

fn copies(device: &Device) -> Result<()> {
    let x = Tensor::zeros(device, DType::BF16, &[1 << 29])?;
    let mut y = Tensor::empty(device, DType::BF16, x.dims())?;
    report(device, "copy", gigabytes(2 * x.buffer_bytes()), || y.copy_from(&x))
}

fn products(device: &Device) -> Result<()> {
    for (name, m, k, n) in [
        ("product 8192^3", 8192, 8192, 8192),
        ("product qkv 124M", 32 * 1024, 768, 2304),
        ("product head 124M", 32 * 1024, 768, 50_304),
    ] {
        let (a, b) = (random(device, &[m, k])?, random(device, &[n, k])?.transpose(0, 1)?);
        let mut out = Tensor::empty(device, DType::BF16, &[m, n])?;
        let work = teraflops(2.0 * m as f64 * k as f64 * n as f64);
        report(device, name, work, || matmul_into(&mut out, Accum::Replace, &a, &b))?;
    }
    Ok(())
}

/// Measures attention; on Hopper also with the kernels of other GPUs, `mma.sync`.
fn attentions(device: &Device) -> Result<()> {
    attention_of(device, "attention")?;
    if device.gpu().is_some_and(Gpu::uses_warpgroups) {
        let other = Device::cuda(&GpuConfig { warpgroups: false, ..GpuConfig::new(0) })?;
        attention_of(&other, "attention, mma.sync")?;
    }
    Ok(())
}

fn attention_of(device: &Device, name: &str) -> Result<()> {
    for (batch, positions, heads, width) in
        [(32, 1024, 12, 64), (16, 1024, 25, 64), (8, 2048, 24, 96), (8, 2048, 16, 128)]
    {
        let packed = random(device, &[batch, positions, 3 * heads * width])?;
        let (q, k, v) = split_packed(&packed, heads, heads)?;
        let config = AttentionConfig::causal(width);
        let (out, lse) = attention(&q, &k, &v, &config)?;
        // Two products of the lower triangle; backward has five.
        let product = (batch * heads * positions * positions * width) as f64;
        let name = format!("{name} {batch} x {positions} x {heads} x {width}");
        report(device, &format!("{name} forward"), teraflops(2.0 * product), || {
            attention(&q, &k, &v, &config).map(drop)
        })?;
        report(device, &format!("{name} backward"), teraflops(5.0 * product), || {
            attention_backward_packed(&out, (&q, &k, &v), (&out, &lse), &config).map(drop)
        })?;
    }
    Ok(())
}

fn norms(device: &Device) -> Result<()> {
    let x = random(device, &[32 * 1024, 768])?;
    let weight = Tensor::full(device, DType::BF16, &[768], 1.0)?;
    let (y, mean, rstd) = layer_norm(&x, &weight, Some(&weight), 1e-5)?;
    let bytes = x.buffer_bytes();
    report(device, "layer norm forward", gigabytes(2 * bytes), || {
        layer_norm(&x, &weight, Some(&weight), 1e-5).map(drop)
    })?;
    report(device, "layer norm backward", gigabytes(3 * bytes), || {
        layer_norm_backward(&y, &x, &mean, &rstd, &weight, None).map(drop)
    })
}

/// Master weights with copies in bf16, gradients in f32.
fn optimizer(device: &Device) -> Result<()> {
    let numbers = |dtype, value| Tensor::full(device, dtype, &[124_000_000], value);
    let f32s = |value| numbers(DType::F32, value);
    let (mut w, g, mut m, mut v) = (f32s(0.1)?, f32s(0.01)?, f32s(0.0)?, f32s(0.0)?);
    let mut copy = numbers(DType::BF16, 0.1)?;
    let step = DeviceStepParams::new(device, &StepParams { update: 1, lr: 1e-4, grad_scale: 1.0 })?;
    // Weights and moments are read and written, gradients read, copies written.
    let work = gigabytes(7 * g.buffer_bytes() + copy.buffer_bytes());
    report(device, "adamw", work, || {
        adamw(
            &AdamW::default(),
            &step,
            &mut w,
            &g,
            &mut m,
            &mut v,
            Some(Rounded::nearest(&mut copy)),
        )
    })
}
