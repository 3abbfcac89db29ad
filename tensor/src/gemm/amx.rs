//! AMX: products of bf16 pairs in tile registers of 16 rows by 16 words.
//!
//! Eight registers hold 32 x 32 sums, two tiles of rows and two of columns. The right operand's panels of words
//! (see [`super::pairs`]) are laid out as the instruction wants them; of the left operand it reads 16 steps of a
//! row at once, so rows are used in place or packed with their steps together.
//!
//! Instructions, encodings and the rules of their configuration: Intel, "Architecture Instruction Set Extensions
//! Programming Reference", chapter 3. The operating system saves tile registers only of a process that has asked
//! for them: Linux, Documentation/arch/x86/xstate.rst.

#[cfg(test)]
pub(super) mod emulator;
#[cfg(test)]
mod tests;

use super::avx512::{F32, F32x16};
use super::kernel::{Compute, Kernels, Tile, TileFn};
use super::pack::Strip;
use super::vector::Vector;
use super::{avx512_bf16, pairs};
use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::mem::MaybeUninit;
use std::sync::OnceLock;

/// Rows of a tile register, and words of a row.
const SIDE: usize = 16;

/// Tiles of rows, and of columns, that are computed together.
const TILES: usize = 2;

/// Floats of a row of the sums.
const PITCH: usize = TILES * SIDE;

/// Whether the processor has the instructions and the system lets this process use them.
pub(super) fn granted() -> bool {
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    static GRANTED: OnceLock<bool> = OnceLock::new();
    *GRANTED.get_or_init(|| {
        let features = __cpuid_count(7, 0).edx;
        // SAFETY: this call takes two numbers and touches no memory.
        let ask = || unsafe {
            libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
        };
        features & AMX_BF16 != 0 && features & AMX_TILE != 0 && ask() == 0
    })
}

/// Shapes of the tile registers, as `ldtilecfg` reads them.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Registers: sums of rows i and columns j in `TILES * i + j`, rows i in `ROWS + i`, columns j in `COLUMNS + j`.
const ROWS: usize = 4;
const COLUMNS: usize = 6;

impl Shapes {
    /// For sums of so many rows and columns, over `steps` steps at a time. Tiles without rows or columns must not
    /// be used.
    fn new(rows: usize, columns: usize, steps: usize) -> Shapes {
        let part = |whole: usize, i: usize| whole.saturating_sub(i * SIDE).min(SIDE);
        let (mut row_bytes, mut tile_rows) = ([0; 16], [0; 16]);
        let mut set = |register: usize, rows: usize, words: usize| {
            if rows > 0 && words > 0 {
                tile_rows[register] = rows as u8;
                row_bytes[register] = (size_of::<f32>() * words) as u16;
            }
        };
        for i in 0..TILES {
            for j in 0..TILES {
                set(TILES * i + j, part(rows, i), part(columns, j));
            }
            set(ROWS + i, part(rows, i), steps);
            set(COLUMNS + i, steps, part(columns, i));
        }
        Shapes { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows: tile_rows }
    }

    /// Gives the registers these shapes, and zeros them.
    ///
    /// # Safety
    /// The process may use tile registers.
    unsafe fn load(&self) {
        // SAFETY: the 64 bytes are there; otherwise the caller's promise.
        unsafe { asm!("ldtilecfg [{}]", in(reg) self, options(nostack, readonly, preserves_flags)) }
    }
}

/// Fills register `T` with rows `stride` words apart.
///
/// # Safety
/// The registers have shapes, and memory holds that of `T`.
#[inline(always)]
unsafe fn load<const T: usize>(from: *const f32, stride: isize) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tileloadd tmm{t}, [{from} + {stride} * 4]",
            t = const T, from = in(reg) from, stride = in(reg) stride,
            options(nostack, readonly, preserves_flags)
        )
    }
}

/// Writes register `T` to a row of tiles.
///
/// # Safety
/// As [`load`], for writes.
#[inline(always)]
unsafe fn store<const T: usize>(to: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tilestored [{to} + {stride} * 4], tmm{t}",
            t = const T, to = in(reg) to, stride = in(reg) PITCH,
            options(nostack, preserves_flags)
        )
    }
}

/// Adds to the sums in register `S` the products of rows in `A` and columns in `B`.
///
/// # Safety
/// The registers' shapes fit together.
#[inline(always)]
unsafe fn multiply_add<const S: usize, const A: usize, const B: usize>() {
    // SAFETY: the caller's promise; no memory is touched.
    unsafe {
        asm!(
            "tdpbf16ps tmm{s}, tmm{a}, tmm{b}",
            s = const S, a = const A, b = const B,
            options(nostack, nomem, preserves_flags)
        )
    }
}

/// The sums over `times` times `steps` steps from step `first` on, added to `sums` if there are steps before.
///
/// # Safety
/// As [`super::kernel::tile`], with `rows` rows and `N` vectors of columns, rows whose steps lie together, and room
/// for the sums.
#[inline(always)]
unsafe fn accumulate<const N: usize>(
    tile: &Tile<f32>,
    rows: usize,
    (first, times, steps): (usize, usize, usize),
    sums: *mut f32,
) {
    let Tile { a_row, b_step, .. } = *tile;
    let mut a = tile.a.wrapping_add(first);
    let mut b = tile.b.wrapping_offset(first as isize * b_step);
    let two = rows > SIDE;
    let lower = sums.wrapping_add(SIDE * PITCH);
    // SAFETY: the caller's promise; only tiles that have rows and columns are touched.
    unsafe {
        Shapes::new(rows, (N - 1) * SIDE + tile.last_lanes, steps).load();
        if first > 0 {
            load::<0>(sums, PITCH as isize);
            if N == TILES {
                load::<1>(sums.add(SIDE), PITCH as isize);
            }
            if two {
                load::<2>(lower, PITCH as isize);
                if N == TILES {
                    load::<3>(lower.add(SIDE), PITCH as isize);
                }
            }
        }
        for _ in 0..times {
            load::<COLUMNS>(b, b_step);
            load::<ROWS>(a, a_row);
            multiply_add::<0, ROWS, COLUMNS>();
            if N == TILES {
                load::<{ COLUMNS + 1 }>(b.add(SIDE), b_step);
                multiply_add::<1, ROWS, { COLUMNS + 1 }>();
            }
            if two {
                load::<{ ROWS + 1 }>(a.offset(SIDE as isize * a_row), a_row);
                multiply_add::<2, { ROWS + 1 }, COLUMNS>();
                if N == TILES {
                    multiply_add::<3, { ROWS + 1 }, { COLUMNS + 1 }>();
                }
            }
            a = a.wrapping_add(steps);
            b = b.wrapping_offset(steps as isize * b_step);
        }
        store::<0>(sums);
        if N == TILES {
            store::<1>(sums.add(SIDE));
        }
        if two {
            store::<2>(lower);
            if N == TILES {
                store::<3>(lower.add(SIDE));
            }
        }
    }
}

/// [`super::kernel::tile`] for `rows` rows and `N` vectors of columns.
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c")]
unsafe fn rows<const N: usize>(tile: &Tile<f32>, rows: usize) {
    #[repr(align(64))]
    struct Sums([MaybeUninit<f32>; TILES * SIDE * PITCH]);
    let mut sums = Sums([MaybeUninit::uninit(); TILES * SIDE * PITCH]);
    let sums = sums.0.as_mut_ptr().cast::<f32>();
    let (times, rest) = (tile.depth / SIDE, tile.depth % SIDE);
    // SAFETY: the caller's promise, passed on; what is stored of the sums has been written.
    unsafe {
        if times > 0 {
            accumulate::<N>(tile, rows, (0, times, SIDE), sums);
        }
        if rest > 0 {
            accumulate::<N>(tile, rows, (times * SIDE, 1, rest), sums);
        }
        asm!("tilerelease", options(nostack, nomem, preserves_flags));
        let row = |i| std::array::from_fn(|v| F32x16::load(sums.add(i * PITCH + v * SIDE)));
        f32::put::<F32x16, N>(tile, (0..rows).map(row));
    }
}

unsafe fn tile<const R: usize, const N: usize>(tile: &Tile<f32>) {
    // SAFETY: the caller's promise, passed on.
    unsafe { rows::<N>(tile, R) }
}

/// Packs words with the steps of a row together.
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c")]
unsafe fn pack_rows(strip: &Strip<f32>) {
    // SAFETY: the caller's promise, passed on: parts lie within the strip.
    unsafe {
        if strip.lane_stride != 1 {
            pairs::pack_rows(strip);
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
                avx512_bf16::interleave(&Strip {
                    from: from.offset(step as isize * strip.step_stride).cast(),
                    depth: steps,
                    elements: (strip.elements - pairs::PAIR * step).min(pairs::PAIR * steps),
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
pub(super) static PAIRS: Kernels<f32> = Kernels {
    tiles: heights!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32),
    pack: |_| avx512_bf16::pack,
    pack_rows: Some(pack_rows),
    ..F32
};
