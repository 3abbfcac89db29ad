//! Kernels at the shapes of GPT-2 124M (4 sequences of 256 tokens) and of the char model, as tables of
//! named shapes. Throughput is in elements: floating-point operations for products and attention, bytes
//! for what memory bounds. `cargo bench --bench kernels -- gemm` prints products alone, `-- elementwise` all else beside
//! its floor.

#[path = "kernels/elementwise.rs"]
mod elementwise;
#[path = "kernels/gemm.rs"]
mod gemm;
#[path = "common/states.rs"]
mod states;

use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, measurement::WallTime};
use ferrotron::tensor::ops::adamw::{AdamW, adamw};
use ferrotron::tensor::ops::attention::{
    AttentionConfig, attention, attention_backward_packed, split_packed,
};
use ferrotron::tensor::ops::cross_entropy::{
    CrossEntropyConfig, cross_entropy, cross_entropy_backward,
};
use ferrotron::tensor::ops::layer_norm::{layer_norm, layer_norm_backward};
use ferrotron::tensor::ops::matmul::{Accum, matmul_into};
use ferrotron::tensor::ops::random::normal;
use ferrotron::tensor::ops::step::{DeviceStepParams, StepParams};
use ferrotron::tensor::{RandomKey, ShardSpec};
use ferrotron::{DType, Device, Result, Tensor};
use std::time::Duration;

/// A product of the char model: name, rows, inner dim, columns, and whether lhs and rhs are stored transposed.
type Product = (&'static str, usize, usize, usize, bool, bool);

const PRODUCTS: &[Product] = &[
    ("char fc forward", 768, 128, 512, false, true),
    ("char fc dgrad", 768, 512, 128, false, false),
    ("char fc wgrad", 512, 768, 128, true, false),
];

/// Attention: name, B, T, H, D.
const ATTENTION: &[(&str, usize, usize, usize, usize)] =
    &[("gpt2", 4, 256, 12, 64), ("gpt2 long", 1, 1024, 12, 64), ("char", 12, 64, 4, 32)];

fn device() -> Device {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    Device::cpu(cores).expect("threads start")
}

fn random(device: &Device, dims: &[usize]) -> Result<Tensor> {
    normal(
        device,
        DType::F32,
        &ShardSpec::unsharded(dims),
        &RandomKey::new(0, 0, "bench"),
        0.0,
        1.0,
    )
}

fn group<'a>(c: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = c.benchmark_group(name);
    group
        .sample_size(10)
        .measurement_time(Duration::from_secs(2))
        .warm_up_time(Duration::from_millis(500));
    group
}

fn products(c: &mut Criterion) {
    let device = device();
    let mut group = group(c, "gemm");
    let products =
        PRODUCTS.iter().flat_map(|row| [DType::F32, DType::BF16].map(|dtype| (dtype, row)));
    for (dtype, &(name, m, k, n, lhs_transposed, rhs_transposed)) in products {
        let stored = |rows, cols, transposed: bool| {
            if transposed {
                random(&device, &[cols, rows])?.cast(dtype)?.transpose(0, 1)
            } else {
                random(&device, &[rows, cols])?.cast(dtype)
            }
        };
        let (lhs, rhs) =
            (stored(m, k, lhs_transposed).unwrap(), stored(k, n, rhs_transposed).unwrap());
        let mut out = Tensor::zeros(&device, DType::F32, &[m, n]).unwrap();
        group.throughput(Throughput::Elements(2 * (m * k * n) as u64));
        group.bench_function(format!("{name} {dtype}"), |b| {
            b.iter(|| matmul_into(&mut out, Accum::Replace, &lhs, &rhs).unwrap());
        });
    }
}

fn attentions(c: &mut Criterion) {
    let device = device();
    let mut group = group(c, "attention");
    let calls =
        ATTENTION.iter().flat_map(|row| [DType::F32, DType::BF16].map(|dtype| (dtype, row)));
    for (dtype, &(name, b, t, h, d)) in calls {
        let packed = random(&device, &[b, t, 3 * h * d]).unwrap().cast(dtype).unwrap();
        let (q, k, v) = split_packed(&packed, h, h).unwrap();
        let config = AttentionConfig::causal(d);
        let (out, lse) = attention(&q, &k, &v, &config).unwrap();
        // Two products of T x T / 2 x D a head forward, five backward.
        let product = (b * h * t * t * d) as u64;
        group.throughput(Throughput::Elements(2 * product));
        group.bench_function(format!("{name} {dtype} forward"), |bench| {
            bench.iter(|| attention(&q, &k, &v, &config).unwrap());
        });
        group.throughput(Throughput::Elements(5 * product));
        group.bench_function(format!("{name} {dtype} backward"), |bench| {
            bench.iter(|| {
                attention_backward_packed(&out, (&q, &k, &v), (&out, &lse), &config).unwrap()
            });
        });
    }
}

fn memory_bound(c: &mut Criterion) {
    let device = device();
    let mut group = group(c, "memory bound");
    let x = random(&device, &[1024, 768]).unwrap();
    let weight = Tensor::full(&device, DType::F32, &[768], 1.0).unwrap();
    let (y, mean, rstd) = layer_norm(&x, &weight, Some(&weight), 1e-5).unwrap();
    let bytes = (x.numel() * 4) as u64;
    group.throughput(Throughput::Bytes(2 * bytes));
    group.bench_function("layer_norm forward", |b| {
        b.iter(|| layer_norm(&x, &weight, Some(&weight), 1e-5).unwrap());
    });
    group.throughput(Throughput::Bytes(3 * bytes));
    group.bench_function("layer_norm backward", |b| {
        b.iter(|| layer_norm_backward(&y, &x, &mean, &rstd, &weight, None).unwrap());
    });
    let hidden = random(&device, &[1024, 3072]).unwrap();
    group.throughput(Throughput::Bytes(2 * (hidden.numel() * 4) as u64));
    group.bench_function("gelu forward", |b| b.iter(|| hidden.gelu_tanh().unwrap()));

    let logits = random(&device, &[1024, 50_304]).unwrap();
    let targets = Tensor::from_slice(&device, &[7_i64; 1024], &[1024]).unwrap();
    let config = CrossEntropyConfig::default();
    let found = cross_entropy(&logits, &targets, &config).unwrap();
    let one = Tensor::full(&device, DType::F32, &[], 1.0).unwrap();
    group.throughput(Throughput::Bytes((logits.numel() * 4) as u64));
    group.bench_function("cross_entropy forward", |b| {
        b.iter(|| cross_entropy(&logits, &targets, &config).unwrap());
    });
    group.throughput(Throughput::Bytes(2 * (logits.numel() * 4) as u64));
    group.bench_function("cross_entropy backward", |b| {
        b.iter_batched(
            || logits.copy().unwrap(),
            |logits| cross_entropy_backward(logits, &targets, &found.lse, &config, &one).unwrap(),
            criterion::BatchSize::PerIteration,
        );
    });

    let n = 32 << 20;
    let full = |x| Tensor::full(&device, DType::F32, &[n], x).unwrap();
    let (mut w, g, mut m, mut v) = (full(0.1), full(0.01), full(0.0), full(0.0));
    let step = StepParams { update: 1, lr: 1e-3, grad_scale: 1.0 };
    let step = DeviceStepParams::new(&device, &step).unwrap();
    group.throughput(Throughput::Bytes(7 * 4 * n as u64));
    group.bench_function("adamw", |b| {
        b.iter(|| adamw(&AdamW::default(), &step, &mut w, &g, &mut m, &mut v, None).unwrap());
    });
}

criterion_group!(benches, products, attentions, memory_bound);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let all = arguments.iter().all(|argument| argument.starts_with('-'));
    let filters = arguments.iter().filter(|argument| !argument.starts_with('-'));
    let wants = |name: &str| all || filters.clone().any(|filter| name.contains(&filter[..]));
    if wants("gemm") {
        gemm::table();
    }
    if wants("elementwise") {
        elementwise::table();
    }
    benches();
    Criterion::default().configure_from_args().final_summary();
}
