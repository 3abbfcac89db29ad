//! GFLOP/s of the CPU matrix product, for the shapes of a GPT-2 training step.
//!
//! `cargo run --release -p ferrotron-tensor --example gemm_bench [-- FILTER]` with 2 threads; the
//! numbers are the best and the median of several runs.

use ferrotron_tensor::ThreadTeam;
use ferrotron_tensor::gemm::{Accum, MatMut, MatRef, gemm};
use std::time::Instant;

/// Group, (m, k, n), whether lhs and rhs are stored transposed, mode, threads.
type Row = (&'static str, (usize, usize, usize), [bool; 2], Accum, usize);

const N: bool = false;
const T: bool = true;
use Accum::{Add, Replace};

const ROWS: &[Row] = &[
    ("forward", (1024, 768, 2304), [N, T], Replace, 2),
    ("forward", (1024, 768, 768), [N, T], Replace, 2),
    ("forward", (1024, 768, 3072), [N, T], Replace, 2),
    ("forward", (1024, 3072, 768), [N, T], Replace, 2),
    ("forward", (1024, 768, 50304), [N, T], Replace, 2),
    ("dgrad", (1024, 2304, 768), [N, N], Replace, 2),
    ("dgrad", (1024, 3072, 768), [N, N], Replace, 2),
    ("dgrad", (1024, 768, 3072), [N, N], Replace, 2),
    ("dgrad", (1024, 50304, 768), [N, N], Replace, 2),
    ("wgrad", (2304, 1024, 768), [T, N], Add, 2),
    ("wgrad", (768, 1024, 3072), [T, N], Add, 2),
    ("wgrad", (3072, 1024, 768), [T, N], Add, 2),
    ("wgrad", (50304, 1024, 768), [T, N], Add, 2),
    ("wgrad", (3072, 1024, 768), [T, N], Replace, 2),
    ("wgrad", (50304, 1024, 768), [T, N], Replace, 2),
    ("small", (768, 128, 384), [N, T], Replace, 2),
    ("small", (768, 128, 512), [N, T], Replace, 2),
    ("small", (768, 512, 128), [N, T], Replace, 2),
    ("small", (768, 384, 128), [N, N], Replace, 2),
    ("small", (384, 768, 128), [T, N], Add, 2),
    ("small", (128, 768, 512), [T, N], Add, 2),
    ("small", (512, 768, 128), [T, N], Add, 2),
    ("attention", (64, 64, 64), [N, T], Replace, 1),
    ("attention", (64, 32, 64), [N, T], Replace, 1),
    ("attention", (64, 64, 64), [N, N], Replace, 1),
    ("attention", (64, 64, 32), [N, N], Replace, 1),
    ("attention", (64, 64, 64), [T, N], Add, 1),
    ("vector", (1, 768, 3072), [N, T], Replace, 2),
    ("vector", (1, 768, 50304), [N, T], Replace, 2),
    ("vector", (1, 3072, 768), [N, N], Replace, 2),
    ("vector", (1, 4096, 8192), [N, N], Replace, 2),
];

fn main() {
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let team = ThreadTeam::new(2).expect("two threads");
    println!(
        "{:<10} {:>16}  {:<3} {:<8} {:>8} {:>8}",
        "group", "m x k x n", "", "", "best", "median"
    );
    for row in ROWS {
        if filter.as_ref().is_none_or(|filter| row.0.contains(filter.as_str())) {
            measure(row, &team);
        }
    }
}

fn measure(&(group, (m, k, n), [lhs_t, rhs_t], accum, threads): &Row, team: &ThreadTeam) {
    let team = if threads == 1 { ThreadTeam::alone() } else { team };
    let noise = |len: usize| (0..len).map(|i| (i % 17) as f32 / 17.0 - 0.4).collect::<Vec<_>>();
    let (lhs, rhs, mut dst) = (noise(m * k), noise(k * n), noise(m * n));
    let view = |data: &[f32], rows, cols, transposed| match transposed {
        false => MatRef::row_major(data.as_ptr(), rows, cols),
        true => MatRef::row_major(data.as_ptr(), cols, rows).transposed(),
    };
    let (a, b) = (view(&lhs, m, k, lhs_t), view(&rhs, k, n, rhs_t));
    let operations = 2.0 * m as f64 * k as f64 * n as f64;
    // Samples of 5 ms or one product, whichever is longer.
    let calls = (1e9 / operations).ceil() as usize;
    let mut rates: Vec<f64> = (0..12)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..calls {
                let c = MatMut::row_major(dst.as_mut_ptr(), m, n);
                // SAFETY: the three vectors have the sizes of the matrices.
                unsafe {
                    gemm(team, c, accum, 1.0, a, b, None).expect("memory for packed operands")
                };
            }
            operations * calls as f64 / start.elapsed().as_secs_f64() / 1e9
        })
        .skip(2)
        .collect();
    rates.sort_by(f64::total_cmp);
    let letters = [lhs_t, rhs_t].map(|t| if t { 'T' } else { 'N' }).iter().collect::<String>();
    let (best, median) = (rates[rates.len() - 1], rates[rates.len() / 2]);
    let (size, accum) = (format!("{m}x{k}x{n}"), format!("{accum:?}"));
    println!("{group:<10} {size:>16}  {letters:<3} {accum:<8} {best:>8.1} {median:>8.1}");
}
