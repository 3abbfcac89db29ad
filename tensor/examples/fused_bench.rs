//! Times the fused operations: `cargo run --release --example fused_bench [threads]`.
//!
//! Prints the median and the best of 30 runs in milliseconds, and what the best means in GB/s (every operand and result
//! counted once) or GFLOP/s (causal pairs only).

use ferrotron_tensor::ops::attention::{
    AttentionConfig, AttentionDropout, attention, attention_backward_packed, split_packed,
};
use ferrotron_tensor::ops::layer_norm::{layer_norm, layer_norm_backward};
use ferrotron_tensor::ops::rms_norm::{rms_norm, rms_norm_backward};
use ferrotron_tensor::ops::rotary::{Direction, RotaryTable, rotary};
use ferrotron_tensor::{DType, Device, Place, RandomKey, Result, Tensor};
use std::time::Instant;

fn main() -> Result<()> {
    let threads = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(2);
    let device = Device::cpu(threads)?;
    println!("{threads} threads");
    println!("{:<42} {:<5} {:>8} {:>8} {:>8}", "op", "dtype", "median", "best", "rate");
    for dtype in [DType::F32, DType::BF16] {
        for (rows, width) in [(1024, 768), (768, 128)] {
            norms(&device, dtype, rows, width)?;
        }
        rotation(&device, dtype, &[4, 256, 36, 64])?;
        for sizes in
            [[4, 256, 12, 12, 64], [12, 64, 4, 4, 32], [1, 1024, 12, 12, 64], [1, 1024, 12, 2, 64]]
        {
            causal_attention(&device, dtype, sizes, 0.0)?;
        }
    }
    causal_attention(&device, DType::F32, [4, 256, 12, 12, 64], 0.1)
}

/// Sizes are B, T, H, G, D.
fn causal_attention(device: &Device, dtype: DType, sizes: [usize; 5], p: f64) -> Result<()> {
    let [b, t, h, g, d] = sizes;
    let packed = normal(device, dtype, &[b, t, (h + 2 * g) * d], "packed")?;
    let dout = normal(device, dtype, &[b, t, h, d], "dout")?;
    let (q, k, v) = split_packed(&packed, h, g)?;
    let mut config = AttentionConfig::causal(d);
    if p > 0.0 {
        let place = Place::whole(&[b, h, t, t]);
        config.dropout = Some(AttentionDropout::new(p, RandomKey::new(1, 0, "p"), place)?);
    }
    let (out, lse) = attention(&q, &k, &v, &config)?;
    // Two products forward, five backward, of 2 D flops for each pair that the mask lets through.
    let product = (2 * b * h * d * t * (t + 1) / 2) as f64 * 1e-9;
    let name = format!("{sizes:?}{}", if p > 0.0 { " dropout" } else { "" });
    report(&format!("attention {name}"), dtype, 2.0 * product, "GFLOP/s", &|| {
        attention(&q, &k, &v, &config).map(drop)
    })?;
    report(&format!("  backward {name}"), dtype, 5.0 * product, "GFLOP/s", &|| {
        attention_backward_packed(&dout, (&q, &k, &v), (&out, &lse), &config).map(drop)
    })
}

fn norms(device: &Device, dtype: DType, rows: usize, width: usize) -> Result<()> {
    let x = normal(device, dtype, &[rows, width], "x")?;
    let dy = normal(device, dtype, &[rows, width], "dy")?;
    let weight = normal(device, dtype, &[width], "weight")?;
    let (_, mean, rstd) = layer_norm(&x, &weight, Some(&weight), 1e-5)?;
    let bytes = (rows * width * dtype.size()) as f64 * 1e-9;
    let shape = format!("({rows}, {width})");
    let row = |op: &str, passes: f64, f: &dyn Fn() -> Result<()>| {
        report(&format!("{op} {shape}"), dtype, passes * bytes, "GB/s", f)
    };
    row("layer_norm", 2.0, &|| layer_norm(&x, &weight, Some(&weight), 1e-5).map(drop))?;
    row("layer_norm_backward", 3.0, &|| {
        layer_norm_backward(&dy, &x, &mean, &rstd, &weight).map(drop)
    })?;
    row("rms_norm", 2.0, &|| rms_norm(&x, &weight, 1e-5).map(drop))?;
    row("rms_norm_backward", 3.0, &|| rms_norm_backward(&dy, &x, &rstd, &weight).map(drop))
}

fn rotation(device: &Device, dtype: DType, dims: &[usize; 4]) -> Result<()> {
    let x = normal(device, dtype, dims, "x")?;
    let table = RotaryTable::new(device, dtype, 0..dims[1], dims[3], 10_000.0)?;
    let bytes = (2 * x.numel() * dtype.size()) as f64 * 1e-9;
    report(&format!("rotary {dims:?}"), dtype, bytes, "GB/s", &|| {
        rotary(&x, &table, dims[2] * 2 / 3, Direction::Forward).map(drop)
    })
}

fn normal(device: &Device, dtype: DType, dims: &[usize], site: &str) -> Result<Tensor> {
    let key = RandomKey::new(1, 0, site);
    let values = (0..dims.iter().product::<usize>() as u64).map(|i| key.normal(i) as f32);
    if dtype == DType::BF16 {
        let values: Vec<_> = values.map(ferrotron_tensor::bf16::from_f32).collect();
        return Tensor::from_slice(device, &values, dims);
    }
    Tensor::from_slice(device, &values.collect::<Vec<_>>(), dims)
}

fn report(
    name: &str,
    dtype: DType,
    work: f64,
    unit: &str,
    f: &dyn Fn() -> Result<()>,
) -> Result<()> {
    for _ in 0..3 {
        f()?;
    }
    let mut times = Vec::new();
    for _ in 0..30 {
        let start = Instant::now();
        f()?;
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    let (best, median) = (times[0], times[times.len() / 2]);
    let rate = work / best;
    println!("{name:<42} {dtype:<5} {:>8.3} {:>8.3} {rate:>8.1} {unit}", median * 1e3, best * 1e3);
    Ok(())
}
