//! AMX products against a model of them in plain Rust, bit for bit.

use super::block::{STEP_FLOATS, SUMS_FLOATS, TileRegisters, Tiles, pack_panels, steps};
use super::blocking::Blocking;
use super::{Permission, product};
use crate::gemm::isa::Isa;
use crate::gemm::problem::{Bias, Operand, Problem, Target};
use crate::gemm::{Accum, MatMut, MatRef, gemm_at};
use crate::{DType, Element, ThreadTeam, bf16};

/// Set in a process whose tile instructions are all emulated.
const TRACED: &str = "FERROTRON_TEST_AMX_TRACED";

pub(super) fn is_traced() -> bool {
    std::env::var_os(TRACED).is_some()
}

/// Runs the named test again in a process whose tile instructions are all emulated; true in that process.
pub(super) fn trace_in_child(test: &str) -> bool {
    if !is_available() || is_traced() {
        return is_traced(); // in the child, the emulator is installed now
    }
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let output = child.args([test, "--exact"]).env(TRACED, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("1 passed"), "no test {test}: {text}");
    false
}

/// Whether the instructions can be tested here.
pub(super) fn is_available() -> bool {
    let available = Isa::available().any(|level| level == Isa::Amx);
    if !available {
        println!("not on this processor: AMX is emulated with AVX-512, which it lacks");
    }
    available
}

/// Seeded numbers in -1..1 (Knuth's MMIX constants).
pub(super) fn numbers<T: Element<Acc = f32>>(len: usize, seed: u64) -> Vec<T> {
    let mut state = seed;
    let next = |_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        T::from_acc((state >> 33) as f32 / (1_u64 << 30) as f32 - 1.0)
    };
    (0..len).map(next).collect()
}

#[test]
fn a_request_that_the_system_refuses_is_a_line_for_the_user() {
    let features = 1 << 22 | 1 << 24; // AMX-BF16 and AMX-TILE
    let refused =
        |error| Permission::from_system(features, || Err(std::io::Error::from_raw_os_error(error)));
    let permission = refused(libc::EPERM);
    assert_eq!(permission, Permission::Refused(libc::EPERM));
    let want = "this processor has AMX, but Linux refuses it to this process (Operation not permitted (os error 1)): Linux \
                5.16 or later grants it, unless a container's seccomp profile denies arch_prctl; products of bf16 are \
                slower and have other bits";
    assert_eq!(permission.refusal().as_deref(), Some(want));
    // An older kernel.
    assert_eq!(refused(libc::EINVAL), Permission::Refused(libc::EINVAL));

    let granted = Permission::from_system(features, || Ok(()));
    assert_eq!((granted, granted.refusal()), (Permission::Granted, None));
    for features in [0, 1 << 22, 1 << 24] {
        let absent = Permission::from_system(features, || panic!("nobody is asked"));
        assert_eq!((absent, absent.refusal()), (Permission::Absent, None));
    }
}

/// One element of a product: sums over blocks of k, in groups of 16 pairs whose two halves are summed apart.
fn model(lhs: &[bf16], rhs: &[bf16], alpha: f32, held: f32, bias: f32) -> f32 {
    let pairs = lhs.len().div_ceil(2);
    let block = pairs.div_ceil(pairs.div_ceil(512)).next_multiple_of(16);
    let mut value = held;
    for (lhs, rhs) in lhs.chunks(2 * block).zip(rhs.chunks(2 * block)) {
        let mut sum = 0.0_f32;
        for (lhs, rhs) in lhs.chunks(32).zip(rhs.chunks(32)) {
            let mut parts = [0.0_f32; 2];
            for (i, (a, b)) in lhs.iter().zip(rhs).enumerate() {
                parts[i % 2] = a.to_f32().mul_add(b.to_f32(), parts[i % 2]);
            }
            sum += parts[0] + parts[1];
        }
        value = alpha.mul_add(sum, value);
    }
    value + bias
}

/// Compares a product into `D` with the model: (m, k, n), threads, accumulation, alpha, bias.
fn check<D: Element<Acc = f32>>(
    [m, k, n]: [usize; 3],
    threads: usize,
    accum: Accum,
    alpha: f32,
    has_bias: bool,
) {
    let (lhs, rhs) = (numbers::<bf16>(m * k, 1), numbers::<bf16>(n * k, 2));
    let (mut dst, bias) = (numbers::<D>(m * n, 3), numbers::<D>(n, 4));
    let before = dst.clone();
    let team = ThreadTeam::new(threads).unwrap();
    let to = MatMut::row_major(dst.as_mut_ptr(), m, n);
    let (a, b) = (MatRef::row_major(lhs.as_ptr(), m, k), MatRef::row_major(rhs.as_ptr(), n, k));
    // SAFETY: the vectors hold the matrices; the level is available.
    unsafe {
        let bias = has_bias.then_some(&bias[..]);
        gemm_at(Isa::Amx, &team, to, accum, alpha, a, b.transposed(), bias).unwrap();
    }
    // Every element of a small product, some of a large one.
    for at in (0..m * n).step_by(1 + m * n * k / 40_000_000) {
        let (i, j) = (at / n, at % n);
        let held = if accum == Accum::Add { before[at].acc() } else { 0.0 };
        let bias = if has_bias { bias[j].acc() } else { -0.0 };
        let want = model(&lhs[i * k..][..k], &rhs[j * k..][..k], alpha, held, bias);
        let (got, want) = (dst[at].acc(), D::from_acc(want).acc());
        assert_eq!(
            got.to_bits(),
            want.to_bits(),
            "({m}, {k}, {n}) {} {accum:?} alpha {alpha} bias {has_bias}: ({i}, {j}) got {got}, want {want}",
            D::DTYPE
        );
    }
}

#[test]
fn products_have_the_bits_of_the_model() {
    if !is_available() {
        return;
    }
    for (dims, threads) in [
        ([64, 64, 64], 1),
        ([33, 70, 65], 1),
        ([1, 301, 97], 1),
        ([96, 768, 160], 2),
        ([40, 1000, 96], 1),
        ([64, 1026, 64], 1),
        ([70, 2304, 130], 3),
        ([64, 5000, 96], 2),
        // At most one panel of rows: columns where they lie, and panels in which columns or elements end.
        ([32, 768, 2100], 3),
        ([17, 2080, 64], 1),
        ([7, 5000, 200], 2),
        // Few rows of more elements than are packed for all columns.
        ([3, 33_000, 40], 2),
    ] {
        for accum in [Accum::Replace, Accum::Add] {
            for (alpha, bias) in [(1.0, true), (0.3, false)] {
                check::<bf16>(dims, threads, accum, alpha, bias);
                check::<f32>(dims, threads, accum, alpha, bias);
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_k_block() {
    if !is_available() {
        return;
    }
    let [m, k, n] = [64, 2080, 160];
    let (lhs, rhs) = (numbers::<bf16>(m * k, 1), numbers::<bf16>(n * k, 2));
    let product = |k_block| {
        let mut dst = vec![0.0_f32; m * n];
        let problem = problem(&lhs, &rhs, &mut dst, [m, k, n]);
        let blocking = Blocking { k_block, ..Blocking::new([m, n, k], 1) };
        // SAFETY: the vectors hold the matrices; the instructions are available.
        unsafe { product::run_with(blocking, ThreadTeam::alone(), 1, problem, 1.0) }.unwrap();
        dst.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
    };
    let want = product(16);
    for k_block in [1, 8, 12] {
        assert!(product(k_block) == want, "k-blocks of {k_block} steps");
    }
}

/// The sums of a block, in one part or two, in the order of their tiles.
#[test]
fn blocks_have_the_bits_of_the_model() {
    if !is_available() {
        return;
    }
    for [rows, k, columns] in [[32, 64, 32], [7, 33, 20], [32, 200, 31], [1, 5, 1]] {
        let (lhs, rhs) = (numbers::<bf16>(rows * k, 1), numbers::<bf16>(columns * k, 2));
        let panel = || vec![f32::NAN; steps(k) * STEP_FLOATS];
        let (mut a, mut b) = (panel(), panel());
        let mut sums = [vec![f32::NAN; SUMS_FLOATS], vec![f32::NAN; SUMS_FLOATS]];
        // SAFETY: the vectors hold the matrices and whole panels; the instructions are available.
        unsafe {
            pack_panels(Tiles::Rows, lhs.as_ptr(), [k, 1], [rows, k], a.as_mut_ptr());
            pack_panels(Tiles::Columns, rhs.as_ptr(), [k, 1], [columns, k], b.as_mut_ptr());
            let registers = TileRegisters::configure();
            let [whole, parts] = sums.each_mut().map(|sums| sums.as_mut_ptr());
            registers.product(a.as_ptr(), b.as_ptr(), steps(k), whole, false);
            registers.product(a.as_ptr(), b.as_ptr(), 1, parts, false);
            if steps(k) > 1 {
                let rest = [&a, &b].map(|panel| panel[STEP_FLOATS..].as_ptr());
                registers.product(rest[0], rest[1], steps(k) - 1, parts, true);
            }
        }
        for (i, j) in (0..rows).flat_map(|i| (0..columns).map(move |j| (i, j))) {
            let want = model(&lhs[i * k..][..k], &rhs[j * k..][..k], 1.0, 0.0, -0.0);
            let at = (i / 16 * 2 + j / 16) * 256 + i % 16 * 16 + j % 16;
            for sums in &sums {
                assert_eq!(
                    sums[at].to_bits(),
                    want.to_bits(),
                    "({rows}, {k}, {columns}): ({i}, {j})"
                );
            }
        }
    }
}

/// dst = lhs rhs^T of row-major matrices.
pub(super) fn problem(
    lhs: &[bf16],
    rhs: &[bf16],
    dst: &mut [f32],
    [m, k, n]: [usize; 3],
) -> Problem {
    let operand = |data: &[bf16], lanes| Operand {
        data: data.as_ptr().cast(),
        dtype: DType::BF16,
        lanes,
        lane_stride: k as isize,
        step_stride: 1,
        elements: k,
        per_step: 1,
    };
    Problem {
        k,
        lhs: operand(lhs, m),
        rhs: operand(rhs, n),
        target: Target {
            data: dst.as_mut_ptr().cast(),
            dtype: DType::F32,
            row_stride: n as isize,
            column_stride: 1,
        },
        accum: Accum::Replace,
        bias: Bias::None,
    }
}
