//! The 15 products of a GPT-2 124M step (4 sequences of 256 tokens), one thread. They are y = x W^T + bias, dx = dy W
//! and dW += dy^T x for five linear layers. `benches/peers/torch_gemm.py` prints the same table for PyTorch.
//!
//! `states.rs` sorts the samples by the state of the core; in bf16 with AMX its loop multiplies tiles. Samples during which
//! the thread lost its core are dropped.

use super::states::{self, STATES, Sample, Watch, by_state, fast};
use ferrotron::tensor::gemm::{Accum, MatMut, MatRef, gemm, instruction_sets};
use ferrotron::tensor::{DType, Element, ThreadTeam, bf16};
use std::time::{Duration, Instant};

const ROWS: usize = 1024;
const LAYERS: f64 = 12.0;
/// k, n, times in a step.
const LINEARS: [(usize, usize, f64); 5] = [
    (768, 2304, LAYERS),
    (768, 768, LAYERS),
    (768, 3072, LAYERS),
    (3072, 768, LAYERS),
    (768, 50_304, 1.0),
];
const MEMORY: &str = "memory for packed operands";
const KINDS: [&str; 3] = ["y", "dx", "dw"];
const SECONDS_PER_PRODUCT: f64 = 1.0;
const LEAST_SAMPLES: usize = 5;

pub fn table() {
    rows::<f32>();
    rows::<bf16>();
}

fn rows<T: Element<Acc = f32>>() {
    let sets = instruction_sets();
    let tiles = T::DTYPE == DType::BF16 && sets.bf16 == "AMX";
    println!(
        "{:16}{:>32}{:>28}   GFLOP/s, {}, {}",
        "product",
        "alone: median / best (samples)",
        "shared",
        T::DTYPE,
        if T::DTYPE == DType::BF16 { sets.bf16 } else { sets.f32 }
    );
    let mut found = Vec::new();
    for kind in KINDS {
        for (k, n, times) in LINEARS {
            found.push((format!("{kind} {k} {n}"), k * n, times, sample::<T>(kind, k, n, tiles)));
        }
    }
    let fast = fast(found.iter().flat_map(|row| &row.3));
    let mut totals = [(0.0, 0.0); 2];
    for (name, size, times, samples) in found {
        let work = 2e-9 * (ROWS * size) as f64;
        let mut cells = [const { String::new() }; 2];
        for ((cell, total), taken) in
            cells.iter_mut().zip(&mut totals).zip(by_state(&samples, fast))
        {
            *cell = match taken.get(taken.len() / 2) {
                None => "-".to_string(),
                Some(median) => {
                    *total = (total.0 + times * work, total.1 + times * median);
                    format!("{:.0} / {:.0} ({})", work / median, work / taken[0], taken.len())
                }
            };
        }
        let [alone, shared] = cells;
        println!("{name:16}{alone:>32}{shared:>28}");
    }
    for (state, (work, seconds)) in STATES.iter().zip(totals) {
        if seconds > 0.0 {
            let speed = work / seconds;
            println!("a step's products, {state}: {speed:.0} GFLOP/s over {work:.0} GFLOP");
        }
    }
}

fn sample<T: Element<Acc = f32>>(kind: &str, k: usize, n: usize, tiles: bool) -> Vec<Sample> {
    let random = |len: usize| -> Vec<T> {
        let mut state = 1_u64;
        let next = |_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            T::from_acc((state >> 40) as f32 / (1 << 23) as f32 - 1.0)
        };
        (0..len).map(next).collect()
    };
    let (x, weight, dy, bias) = (random(ROWS * k), random(n * k), random(ROWS * n), random(n));
    let (mut y, mut dx, mut dw) = (random(ROWS * n), random(ROWS * k), vec![0.0_f32; n * k]);
    let mut run = || {
        let x = MatRef::row_major(x.as_ptr(), ROWS, k);
        let weight = MatRef::row_major(weight.as_ptr(), n, k);
        let dy = MatRef::row_major(dy.as_ptr(), ROWS, n);
        // SAFETY: the vectors hold the matrices, and no other code uses the results.
        unsafe {
            match kind {
                "y" => {
                    let y = MatMut::row_major(y.as_mut_ptr(), ROWS, n);
                    gemm(
                        ThreadTeam::alone(),
                        y,
                        Accum::Replace,
                        1.0,
                        x,
                        weight.transposed(),
                        Some(&bias),
                    )
                    .expect(MEMORY);
                }
                "dx" => {
                    let dx = MatMut::row_major(dx.as_mut_ptr(), ROWS, k);
                    gemm(ThreadTeam::alone(), dx, Accum::Replace, 1.0, dy, weight, None)
                        .expect(MEMORY);
                }
                _ => {
                    let dw = MatMut::row_major(dw.as_mut_ptr(), n, k);
                    gemm(ThreadTeam::alone(), dw, Accum::Add, 1.0, dy.transposed(), x, None)
                        .expect(MEMORY);
                }
            }
        }
    };
    run();
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    let probe = if tiles { probe_of_tiles } else { states::probe };
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    let (probe, _) = (states::probe, tiles);
    let mut samples = Vec::new();
    let start = Instant::now();
    while start.elapsed().as_secs_f64() < SECONDS_PER_PRODUCT || samples.len() < LEAST_SAMPLES {
        let (watch, cpu) = (Watch::start(probe), thread_time());
        run();
        let busy = (thread_time() - cpu).as_secs_f64();
        let sample = watch.stop();
        let late = start.elapsed().as_secs_f64() > 5.0 * SECONDS_PER_PRODUCT;
        if late || busy > 0.97 * sample.seconds {
            samples.push(sample);
        }
    }
    samples
}

/// Processor time of this thread.
fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Seconds of a loop over tiles, as long as that of [`states::probe`].
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn probe_of_tiles() -> f64 {
    let start = Instant::now();
    multiply_tiles(400);
    start.elapsed().as_secs_f64()
}

/// Loads and multiplies tiles, 4 `times` times. The process has been granted them by a product.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn multiply_tiles(times: usize) {
    #[repr(align(64))]
    struct Aligned<const N: usize>([u8; N]);
    let (mut shapes, tiles) = (Aligned([0; 64]), Aligned([0; 4096]));
    shapes.0[0] = 1;
    for register in 0..8 {
        (shapes.0[16 + 2 * register], shapes.0[48 + register]) = (64, 16);
    }
    // SAFETY: everything that is changed is named; shapes are whole tiles.
    unsafe {
        std::arch::asm!(
            "ldtilecfg [{shapes}]",
            "2:",
            "tileloadd tmm6, [{tiles} + {stride}]",
            "tileloadd tmm4, [{tiles} + {stride} + 1024]",
            "tileloadd tmm7, [{tiles} + {stride} + 2048]",
            "tileloadd tmm5, [{tiles} + {stride} + 3072]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "dec {times}",
            "jnz 2b",
            "tilerelease",
            shapes = in(reg) &shapes,
            tiles = in(reg) &tiles,
            stride = in(reg) 64_usize,
            times = inout(reg) times => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
            out("tmm6") _, out("tmm7") _,
            options(nostack)
        );
    }
}
