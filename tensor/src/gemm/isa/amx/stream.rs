//! AMX products of few rows: columns go into tile registers from where they lie, each element once.
//!
//! A tile has 16 rows of 32 elements. If a lane's elements lie together, as in the weight (N, K) of a linear layer, a row is
//! loaded from the operand itself. So the columns of the product become rows of tiles, and the few rows are packed as columns
//! of tiles. The sums of 32 columns by 32 rows are transposed before they are converted. A panel in which lanes or elements end
//! is copied, with zeros. Every element has the bits that [`super::product`] gives it.

use super::blocking::sum_block;
use super::config;
use super::microkernel::{MICROTILE, STEP_BYTES, SUMS_BYTES, TILE_BYTES};
use super::pack::{Panels, STEP, Tiles, pack};
use super::piece::{Lanes, round_to_target, widen_target};
use crate::gemm::Accum;
use crate::gemm::isa::avx512::F32x16;
use crate::gemm::isa::vector::Vector;
use crate::gemm::problem::Problem;
use crate::gemm::scheduler::{self, CacheBlock, Work};
use crate::gemm::workspace::with_workspace;
use crate::numeric::prefetch::LINE;
use crate::numeric::simd::with_avx512;
use crate::{Result, ThreadTeam};
use std::arch::asm;

/// Steps of a panel that are on their way from memory, 2 KiB each.
const AHEAD: usize = 8;
/// Elements of k, at most: the packed rows take 2 MiB then, and every panel of columns reads them again.
const MOST_ELEMENTS: usize = 32 << 10;
/// Lanes of a tile.
const LANES: usize = MICROTILE / 2;

/// A product and its memory.
struct Stream {
    problem: Problem,
    alpha: f32,
    steps: usize,
    /// The packed rows.
    rows: *mut u8,
    /// The threads' own memory: sums, 32 rows of 32 results, a copied panel.
    private: *mut u8,
    private_bytes: usize,
}

// SAFETY: one thread writes the packed rows before others read them. Threads write disjoint columns of the target, and each its
// own private memory.
unsafe impl Sync for Stream {}

/// Whether [`run`] computes the oriented problem: at most 32 rows, and columns whose elements lie together.
pub(super) fn fits(problem: &Problem) -> bool {
    problem.lhs.lanes <= MICROTILE && problem.rhs.step_stride == 1 && problem.k <= MOST_ELEMENTS
}

/// Whether the first `lanes` columns make whole tiles.
fn whole(problem: &Problem, lanes: usize) -> bool {
    lanes.is_multiple_of(MICROTILE) && problem.k.is_multiple_of(STEP)
}

/// Computes an oriented problem that [`fits`] with a team. Errors if there is no memory for what is packed.
///
/// # Safety
/// The conditions of [`super::product::run`].
pub(super) unsafe fn run(
    team: &ThreadTeam,
    threads: usize,
    problem: Problem,
    alpha: f32,
) -> Result<()> {
    let steps = problem.k.div_ceil(STEP);
    let panel_bytes = steps * STEP_BYTES;
    let copy_bytes = if whole(&problem, problem.rhs.lanes) { 0 } else { panel_bytes };
    let private_bytes = 2 * SUMS_BYTES + copy_bytes;
    with_workspace(panel_bytes + threads * private_bytes, |rows| {
        let private = rows.wrapping_add(panel_bytes);
        let work = Stream { problem, alpha, steps, rows, private, private_bytes };
        // SAFETY: pieces of one phase touch different memory.
        unsafe { scheduler::run(team, threads, &work) };
    })
}

impl Work for Stream {
    fn cache_blocks(&self) -> [usize; 3] {
        [1; 3]
    }

    fn packing_pieces(&self, _: CacheBlock) -> usize {
        1
    }

    fn computing_pieces(&self, _: CacheBlock) -> usize {
        self.problem.rhs.lanes.div_ceil(MICROTILE)
    }

    unsafe fn pack(&self, _: CacheBlock, _: usize) {
        // SAFETY: the panel has room for all rows.
        unsafe { pack(&self.panel(Tiles::Columns, self.all_rows(), self.rows)) };
    }

    unsafe fn compute(&self, _: CacheBlock, number: usize, thread: usize) {
        let first = number * MICROTILE;
        let columns = Lanes { first, len: MICROTILE.min(self.problem.rhs.lanes - first) };
        let rows = self.all_rows();
        let sums = self.private.wrapping_add(thread * self.private_bytes);
        let held = sums.wrapping_add(SUMS_BYTES).cast::<f32>();
        // SAFETY: the columns lie within operand and target, private memory has room for whole panels, and shapes have
        // been loaded by `enter`.
        unsafe {
            let panel = self.columns(columns, sums.wrapping_add(2 * SUMS_BYTES));
            match self.problem.accum {
                Accum::Replace => held.write_bytes(0, rows.len * MICROTILE),
                Accum::Add => widen_target(&self.problem, rows, columns, held),
            }
            let block = sum_block(self.problem.k) / STEP;
            for start in (0..self.steps).step_by(block) {
                let steps = block.min(self.steps - start);
                multiply(&panel.part(start, steps, self.rows), sums);
                add_sums(sums.cast(), self.alpha, rows.len, held);
            }
            round_to_target(&self.problem, rows, columns, held);
        }
    }

    fn enter(&self) {
        // SAFETY: the process may use tile registers.
        unsafe { config::load() };
    }

    fn leave(&self) {
        // SAFETY: as above.
        unsafe { config::release() };
    }
}

/// Tiles of 32 columns, in the operand or copied.
struct ColumnTiles {
    from: *const u8,
    /// Bytes from lane to lane of a tile.
    lane: isize,
    /// Bytes to the second tile of a step.
    second: isize,
    /// Bytes to the next step.
    step: isize,
    steps: usize,
    /// The panel that is read next.
    next: *const u8,
    /// Bytes from lane to lane of what is fetched. If 0, one line of a copied panel is fetched again and again.
    fetched_lane: isize,
}

/// The steps of a sum block, as the assembly reads them.
#[repr(C)]
struct Part {
    from: *const u8,
    second: *const u8,
    lane: isize,
    step: isize,
    rows: *const u8,
    steps: usize,
    /// Lines that are fetched at the first step, of lanes so many bytes apart. After `before` steps those of `next` follow.
    fetched: *const u8,
    fetched_lane: isize,
    before: usize,
    next: *const u8,
}

impl ColumnTiles {
    /// The steps from `start` on, against the packed rows.
    fn part(&self, start: usize, steps: usize, rows: *const u8) -> Part {
        let from = self.from.wrapping_offset(start as isize * self.step);
        let ahead = start + AHEAD;
        let (fetched, before) = match self.steps.checked_sub(ahead) {
            Some(left @ 1..) => (self.from.wrapping_add(ahead * LINE), left),
            _ => (self.next.wrapping_add((ahead - self.steps) * LINE), usize::MAX),
        };
        Part {
            from,
            second: from.wrapping_offset(self.second),
            lane: self.lane,
            step: self.step,
            rows: rows.wrapping_add(start * STEP_BYTES),
            steps,
            fetched,
            fetched_lane: self.fetched_lane,
            before,
            next: self.next,
        }
    }
}

impl Stream {
    fn all_rows(&self) -> Lanes {
        Lanes { first: 0, len: self.problem.lhs.lanes }
    }

    /// A panel of all steps of an operand's lanes.
    fn panel(&self, tiles: Tiles, lanes: Lanes, to: *mut u8) -> Panels<'_> {
        let operand = if tiles == Tiles::Rows { &self.problem.rhs } else { &self.problem.lhs };
        let (lane, lanes) = (lanes.first, lanes.len);
        let panel_bytes = self.steps * STEP_BYTES;
        Panels { operand, tiles, lane, lanes, element: 0, steps: self.steps, to, panel_bytes }
    }

    /// The tiles of a panel of columns; `copy` has room for one.
    unsafe fn columns(&self, columns: Lanes, copy: *mut u8) -> ColumnTiles {
        let rhs = &self.problem.rhs;
        let steps = self.steps;
        if whole(&self.problem, columns.len) {
            let lane = rhs.lane_stride * rhs.dtype.size() as isize;
            return ColumnTiles {
                from: rhs.at(columns.first, 0),
                lane,
                second: LANES as isize * lane,
                step: LINE as isize,
                steps,
                next: rhs.at(columns.first + MICROTILE, 0),
                fetched_lane: lane,
            };
        }
        // SAFETY: the lanes lie within the operand, and the copy has room.
        unsafe { pack(&self.panel(Tiles::Rows, columns, copy)) };
        ColumnTiles {
            from: copy,
            lane: LINE as isize,
            second: TILE_BYTES as isize,
            step: STEP_BYTES as isize,
            steps,
            next: copy,
            fetched_lane: 0,
        }
    }
}

/// The sums of 32 columns by 32 rows over the steps of a part, as four tiles.
///
/// # Safety
/// The part's tiles are there, `sums` have room, and the thread's tile registers have the shape of whole tiles.
unsafe fn multiply(part: &Part, sums: *mut u8) {
    debug_assert!(part.steps > 0);
    // SAFETY: the caller's promise; prefetches have no effect but on caches, and all that is changed is named.
    unsafe {
        asm!(
            "mov rax, [rdi]",
            "mov rcx, [rdi + 8]",
            "mov r8, [rdi + 16]",
            "mov r9, [rdi + 32]",
            "mov r10, [rdi + 40]",
            "mov r11, [rdi + 48]",
            "mov r12, [rdi + 56]",
            "mov r13, [rdi + 64]",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            "mov r14, r11",
            "tileloadd tmm6, [r9 + rdx]",
            "tileloadd tmm4, [rax + r8]",
            ".rept 8",
            "prefetcht1 [r14]",
            "prefetcht1 [r14 + r12]",
            "lea r14, [r14 + 2*r12]",
            ".endr",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [r9 + rdx + 1024]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [rcx + r8]",
            ".rept 8",
            "prefetcht1 [r14]",
            "prefetcht1 [r14 + r12]",
            "lea r14, [r14 + 2*r12]",
            ".endr",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add rax, [rdi + 24]",
            "add rcx, [rdi + 24]",
            "add r9, 2048",
            "add r11, 64",
            "dec r13",
            "cmovz r11, [rdi + 72]",
            "dec r10",
            "jnz 2b",
            "tilestored [rsi + rdx], tmm0",
            "tilestored [rsi + rdx + 1024], tmm1",
            "tilestored [rsi + rdx + 2048], tmm2",
            "tilestored [rsi + rdx + 3072], tmm3",
            in("rdi") part,
            in("rsi") sums,
            in("rdx") LINE,
            out("rax") _, out("rcx") _, out("r8") _, out("r9") _, out("r10") _, out("r11") _, out("r12") _, out("r13") _,
            out("r14") _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
            out("tmm6") _, out("tmm7") _,
            options(nostack)
        );
    }
}

with_avx512! { enabled!
    /// held = held + alpha * the transposed sums, in `rows` rows of 32.
    ///
    /// # Safety
    /// There are four tiles of sums and so many rows.
    unsafe fn add_sums(sums: *const f32, alpha: f32, rows: usize, held: *mut f32) {
        // SAFETY: the caller's promise; the processor has AVX-512.
        unsafe {
            let alpha = F32x16::splat(alpha);
            for first in (0..rows).step_by(LANES) {
                for column in (0..MICROTILE).step_by(LANES) {
                    let tile = sums.add((column / LANES * 2 + first / LANES) * LANES * LANES);
                    let mut square = std::array::from_fn(|i| F32x16::load(tile.add(i * LANES)));
                    F32x16::transpose(&mut square);
                    for (i, sum) in square.into_iter().enumerate().take(rows - first) {
                        let held = held.add((first + i) * MICROTILE + column);
                        alpha.mul_add(sum, F32x16::load(held)).store(held);
                    }
                }
            }
        }
    }
}
