//! The AMX microkernel for small blocks that a fused kernel keeps in cache (see [`crate::gemm::small`]).
//!
//! Operands stay as they are: of the left one the instruction reads 16 steps of a row at once, rows any distance
//! apart; the right one's panels of words are laid out as it wants them. Shapes follow the operands, so nothing
//! beside them is read.

use super::config::{SIDE, Shapes};
use crate::gemm::isa::avx512::{F32, F32x16};
use crate::gemm::isa::avx512_bf16;
use crate::gemm::isa::vector::Vector;
use crate::gemm::kernel::{Compute, GemmKernels, MicroTile, TileFn};
use crate::gemm::pack::PackTask;
use crate::gemm::vnni;
use std::arch::asm;
use std::mem::MaybeUninit;

/// Tiles of rows, and of columns, that are computed together.
const TILES: usize = 2;
/// Floats of a row of the sums.
const PITCH: usize = TILES * SIDE;

/// Shapes for sums of so many rows in registers 0 to 3, over `steps` steps at a time of rows in 4 and 5 and of
/// columns in 6 and 7.
fn shapes(rows: usize, columns: usize, steps: usize) -> Shapes {
    let (upper, lower) = (rows.min(SIDE), rows.saturating_sub(SIDE));
    let (left, right) = (columns.min(SIDE), columns.saturating_sub(SIDE));
    Shapes::new([
        (upper, left),
        (upper, right),
        (lower, left),
        (lower, right),
        (upper, steps),
        (lower, steps),
        (steps, left),
        (steps, right),
    ])
}

/// One step of all tiles; what begins with `$right` or `$lower` is a comment where there are none.
macro_rules! step {
    ($right:literal, $lower:literal) => {
        concat!(
            "tileloadd tmm6, [{b} + {b_row}]
             tileloadd tmm4, [{a} + {a_row}]
             tdpbf16ps tmm0, tmm4, tmm6
             ",
            $right,
            "tileloadd tmm7, [{b} + {b_row} + 64]
             ",
            $right,
            "tdpbf16ps tmm1, tmm4, tmm7
             ",
            $lower,
            "tileloadd tmm5, [{lower} + {a_row}]
             ",
            $lower,
            "tdpbf16ps tmm2, tmm5, tmm6
             ",
            $right,
            $lower,
            "tdpbf16ps tmm3, tmm5, tmm7
             "
        )
    };
}

/// Loads or stores all sums.
macro_rules! sums {
    ($move:ident, $right:literal, $lower:literal) => {
        concat!(
            $move!("0", ""),
            "\n",
            $right,
            $move!("1", " + 64"),
            "\n",
            $lower,
            $move!("2", " + 2048"),
            "\n",
            $right,
            $lower,
            $move!("3", " + 2112"),
            "\n"
        )
    };
}

macro_rules! load {
    ($tile:literal, $offset:literal) => {
        concat!("tileloadd tmm", $tile, ", [{sums} + {pitch}", $offset, "]")
    };
}

macro_rules! store {
    ($tile:literal, $offset:literal) => {
        concat!("tilestored [{sums} + {pitch}", $offset, "], tmm", $tile)
    };
}

/// [`crate::gemm::kernel::tile`] for `rows` rows and `N` vectors of columns.
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c")]
unsafe fn tile_rows<const N: usize>(tile: &MicroTile<f32>, rows: usize) {
    #[repr(align(64))]
    struct Sums([MaybeUninit<f32>; TILES * SIDE * PITCH]);
    debug_assert_eq!(tile.last_lanes, SIDE, "blocks have whole registers of columns");
    let mut sums = Sums([MaybeUninit::uninit(); TILES * SIDE * PITCH]);
    let sums = sums.0.as_mut_ptr().cast::<f32>();
    let (times, rest) = (tile.depth / SIDE, tile.depth % SIDE);
    let whole = shapes(rows, N * SIDE, SIDE);
    let torn = shapes(rows, N * SIDE, rest);
    let row_bytes = tile.a_row * size_of::<f32>() as isize;
    // All sums of whole steps; then, where steps are left, once more with the shapes of those.
    macro_rules! compute {
        ($right:literal, $lower:literal) => {
            asm!(
                "ldtilecfg [{whole}]",
                "test {times}, {times}",
                "jz 3f",
                "2:",
                step!($right, $lower),
                "add {a}, 64",
                "add {lower}, 64",
                "add {b}, {b_step}",
                "dec {times}",
                "jnz 2b",
                "3:",
                sums!(store, $right, $lower),
                "test {torn}, {torn}",
                "jz 4f",
                "ldtilecfg [{torn}]",
                sums!(load, $right, $lower),
                step!($right, $lower),
                sums!(store, $right, $lower),
                "4:",
                "tilerelease",
                whole = in(reg) &whole,
                torn = in(reg) if rest > 0 { &raw const torn } else { std::ptr::null() },
                times = inout(reg) times => _,
                a = inout(reg) tile.a => _,
                lower = inout(reg) tile.a.wrapping_offset(SIDE as isize * tile.a_row) => _,
                a_row = in(reg) row_bytes,
                b = inout(reg) tile.b => _,
                b_row = in(reg) tile.b_step * size_of::<f32>() as isize,
                b_step = in(reg) tile.b_step * (SIDE * size_of::<f32>()) as isize,
                sums = in(reg) sums,
                pitch = in(reg) PITCH * size_of::<f32>(),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
                out("tmm6") _, out("tmm7") _,
                options(nostack)
            )
        };
    }
    // SAFETY: the caller's promise; only tiles that have rows and columns are touched, and of the sums only what
    // has been written is read.
    unsafe {
        match (N == TILES, rows > SIDE) {
            (true, true) => compute!("", ""),
            (true, false) => compute!("", "#"),
            (false, true) => compute!("#", ""),
            (false, false) => compute!("#", "#"),
        }
        let row = |i| std::array::from_fn(|v| F32x16::load(sums.add(i * PITCH + v * SIDE)));
        f32::put::<F32x16, N>(tile, (0..rows).map(row));
    }
}

unsafe fn tile<const R: usize, const N: usize>(tile: &MicroTile<f32>) {
    // SAFETY: the caller's promise, passed on.
    unsafe { tile_rows::<N>(tile, R) }
}

/// Packs words with the steps of a row together.
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c")]
unsafe fn pack_rows(strip: &PackTask<f32>) {
    // SAFETY: the caller's promise, passed on: parts lie within the strip.
    unsafe {
        if strip.lane_stride != 1 {
            vnni::pack_rows(strip);
            return;
        }
        // The rows of a step lie together: turn square blocks of words.
        let pitch = strip.panel_stride / strip.width;
        for lane in (0..strip.count).step_by(SIDE) {
            for step in (0..strip.depth).step_by(SIDE) {
                let (lanes, steps) =
                    ((strip.count - lane).min(SIDE), (strip.depth - step).min(SIDE));
                let mut block = [F32x16::splat(0.0); SIDE];
                let from = strip.from.cast::<u16>().add(lane);
                avx512_bf16::interleave(&PackTask {
                    from: from.offset(step as isize * strip.step_stride).cast(),
                    depth: steps,
                    elements: (strip.elements - vnni::PAIR * step).min(vnni::PAIR * steps),
                    count: lanes,
                    to: block.as_mut_ptr().cast(),
                    width: SIDE,
                    panel_stride: 0,
                    ..*strip
                });
                F32x16::transpose(&mut block);
                let to = strip.to.add(lane * pitch + step);
                for (i, row) in block.into_iter().enumerate().take(lanes) {
                    row.store_first(to.add(i * pitch), F32x16::first(steps));
                }
            }
        }
    }
}

macro_rules! heights {
    ($($rows:literal)*) => { &[$(&[tile::<$rows, 1>, tile::<$rows, 2>] as &[TileFn<f32>]),*] };
}

/// Kernels for words of two bf16 elements.
pub(in crate::gemm) static PAIRS: GemmKernels<f32> = GemmKernels {
    tiles: heights!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32),
    pack: |_| avx512_bf16::pack,
    pack_rows: Some(pack_rows),
    ..F32
};
