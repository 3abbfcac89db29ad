//! One piece of an AMX product: a panel of rows by a chunk of columns, as a list of microtiles.
//!
//! Between the k-blocks of a sum block the sums are in memory, as exact as in the registers. A finished sum block
//! is scaled and added to what is held: to nothing, to the target, or to the *held block* of the microtile, 32 rows
//! of 32 floats. The last one is rounded into the target. Where that has ragged edges, distant columns, a bias for
//! each row or a type that the microkernel does not know, it passes through the held block.

use super::blocking::Blocking;
use super::microkernel::{Conversion, Fetch, Kind, MICROTILE, Microtile, STEP_BYTES, SUMS_BYTES};
use super::pack::STEP;
use crate::DType;
use crate::gemm::Accum;
use crate::gemm::isa::avx512::F32;
use crate::gemm::pack_task::PackTask;
use crate::gemm::problem::{Bias, Problem};

/// The row that a conversion adds where there is no earlier sum, or no bias.
#[repr(align(64))]
pub(super) struct BiasRow([f32; MICROTILE]);
static ZEROS: BiasRow = BiasRow([0.0; MICROTILE]);
static NO_BIAS: BiasRow = BiasRow([-0.0; MICROTILE]);

/// Rows or columns of a cache block: first lane and number of lanes.
#[derive(Clone, Copy)]
pub(super) struct Lanes {
    pub first: usize,
    pub len: usize,
}

/// Reads a part of the target, of at most 32 columns, into rows of 32 floats.
///
/// # Safety
/// It lies within the target, and `to` has room.
pub(super) unsafe fn widen_target(problem: &Problem, rows: Lanes, columns: Lanes, to: *mut f32) {
    let (at, dims) = ([rows.first, columns.first], [rows.len, columns.len]);
    // SAFETY: the caller's promise, passed on.
    unsafe { F32.widen_target(&problem.target, at, dims, to, MICROTILE) };
}

/// Rounds rows of 32 floats, with the bias, into a part of the target of at most 32 columns.
///
/// # Safety
/// It lies within the target, whose bias is there, and `from` has the rows.
pub(super) unsafe fn round_to_target(
    problem: &Problem,
    rows: Lanes,
    columns: Lanes,
    from: *const f32,
) {
    let (at, dims) = ([rows.first, columns.first], [rows.len, columns.len]);
    // SAFETY: the caller's promise, passed on.
    unsafe { F32.round_to_target(problem, at, dims, from, MICROTILE as isize) };
}

/// A panel of rows by a chunk of columns, and the memory to compute it with.
pub(super) struct Piece<'a> {
    pub problem: &'a Problem,
    pub blocking: &'a Blocking,
    pub rows: Lanes,
    pub columns: Lanes,
    /// Whether the cache block is the first and the last along k.
    pub first: bool,
    pub last: bool,
    /// Packed rows and columns, and bytes from one panel of columns to the next.
    pub a: *const u8,
    pub b: *const u8,
    pub panel_bytes: usize,
    pub steps: usize,
    pub held: *mut u8,
    /// Sums between k-blocks; two blocks of sums to convert, the first of which also takes sums that nothing reads; the
    /// bias; the list.
    pub sums: *mut u8,
    pub finished: *mut u8,
    pub bias: *mut f32,
    pub list: *mut Microtile,
}

impl Piece<'_> {
    /// Whether the microkernel writes results of a panel of columns to the target.
    fn is_direct(&self, panel: usize) -> bool {
        let target = self.problem.target;
        self.rows.len == MICROTILE
            && (panel + 1) * MICROTILE <= self.columns.len
            && target.column_stride == 1
            && matches!(target.dtype, DType::F32 | DType::BF16)
            && !matches!(self.problem.bias, Bias::Rows(_))
    }

    /// Whether what the target holds is read into the held block of a panel.
    fn is_fetched(&self, panel: usize) -> bool {
        let direct = self.is_direct(panel) && self.problem.target.dtype == DType::F32;
        self.first && self.problem.accum == Accum::Add && !direct
    }

    /// Reads what the conversions of a piece need besides sums: the bias, and 16-bit or ragged parts of the target.
    pub(super) unsafe fn prepare(&self) {
        let target = self.problem.target;
        let task = PackTask {
            from: std::ptr::null(),
            step_stride: target.row_stride,
            lane_stride: target.column_stride,
            depth: 1,
            elements: 1,
            count: self.columns.len,
            to: self.bias,
            width: MICROTILE,
            panel_stride: MICROTILE,
        };
        // SAFETY: the piece lies within the target and the bias; private memory has whole panels.
        unsafe {
            if let (true, Bias::Columns(bias)) = (self.last, self.problem.bias) {
                let from = bias.wrapping_add(self.columns.first * target.dtype.size());
                (F32.widen)(target.dtype)(&PackTask { from, lane_stride: 1, ..task });
            }
            for panel in 0..self.panels() {
                if self.is_fetched(panel) {
                    let held = self.held_block(panel);
                    widen_target(self.problem, self.rows, self.columns_of(panel), held);
                }
            }
        }
    }

    /// Writes the list of a piece's microtiles.
    pub(super) unsafe fn microtiles(&self) -> &[Microtile] {
        let mut len = 0;
        let mut push = |microtile| {
            // SAFETY: the list has room for as many as `Piece::private_bytes` counts.
            unsafe { self.list.add(len).write(microtile) };
            len += 1;
        };
        let block = self.blocking.sum_block / STEP;
        let mut conversion = Conversion::NOTHING;
        let mut finished = 0;
        for start in (0..self.steps).step_by(block) {
            let block = block.min(self.steps - start);
            let k_block = self.blocking.k_block_of(block, self.panels());
            let ends = [self.first && start == 0, self.last && start + block == self.steps];
            for step in (0..block).step_by(k_block) {
                let steps = k_block.min(block - step);
                for panel in 0..self.panels() {
                    let offset = (start + step) * STEP_BYTES;
                    let sums = self.sums.wrapping_add(panel * SUMS_BYTES);
                    let is_done = step + steps == block;
                    let sums_out = if is_done {
                        finished += 1;
                        self.finished.wrapping_add(finished % 2 * SUMS_BYTES)
                    } else {
                        sums
                    };
                    push(Microtile {
                        a: self.a.wrapping_add(offset),
                        b: self.b.wrapping_add(panel * self.panel_bytes + offset),
                        steps,
                        sums_in: if step == 0 { std::ptr::null() } else { sums.cast_const() },
                        sums_out,
                        conversion,
                        fetch: self.fetch((start, step), steps, panel),
                    });
                    conversion = match is_done {
                        true => self.conversion(panel, ends, sums_out),
                        false => Conversion::NOTHING,
                    };
                }
            }
        }
        push(Microtile {
            a: std::ptr::null(),
            b: std::ptr::null(),
            steps: 0,
            sums_in: std::ptr::null(),
            sums_out: std::ptr::null_mut(),
            conversion,
            fetch: Fetch::NOTHING,
        });
        // SAFETY: so many have just been written.
        unsafe { std::slice::from_raw_parts(self.list, len) }
    }

    /// The prefetches of a microtile of `steps` steps: a part of the rows' next k-block. In the first k-block of the
    /// last sum block also a part of the target.
    fn fetch(&self, (start, step): (usize, usize), steps: usize, panel: usize) -> Fetch {
        let target = self.problem.target;
        let here = self.a.wrapping_add((start + step) * STEP_BYTES);
        // What follows the last k-block of a panel of rows is the first of the next panel.
        let next = here.wrapping_add(steps * STEP_BYTES);
        let part = panel * steps * 256;
        let mut fetch = Fetch { rows: here, rows_step: 0, target: here, target_step: 0 };
        if part < steps * STEP_BYTES {
            fetch.rows = next.wrapping_add(part);
            fetch.rows_step = 256;
        }
        let size = target.dtype.size();
        let column = panel / 2 * 256;
        if target.dtype == DType::F32 && step == 0 && self.last && column < self.columns.len * size
        {
            let row = self.rows.first + panel % 2 * MICROTILE / 2;
            fetch.target = target.at(row, self.columns.first).wrapping_add(column);
            fetch.target_step = (target.row_stride * size as isize) as usize;
        }
        fetch
    }

    /// The conversion of a sum block's sums; `first` and `last` say whether it is the first and the last along k.
    fn conversion(&self, panel: usize, [first, last]: [bool; 2], from: *const u8) -> Conversion {
        let target = self.problem.target;
        let block = self.held_block(panel).cast::<u8>();
        let block_row = size_of::<BiasRow>();
        let at = target.at(self.rows.first, self.columns.first + panel * MICROTILE);
        let at_row = (target.row_stride * target.dtype.size() as isize) as usize;
        let to_target = last && self.is_direct(panel);
        let (held, held_row) = if !first || self.is_fetched(panel) {
            (block.cast_const(), block_row)
        } else if self.problem.accum == Accum::Add {
            (at.cast_const(), at_row)
        } else {
            (ZEROS.0.as_ptr().cast(), 0)
        };
        let (to, to_row) = if to_target { (at, at_row) } else { (block, block_row) };
        let bias = match self.problem.bias {
            Bias::Columns(_) if to_target => self.bias.wrapping_add(panel * MICROTILE),
            _ => NO_BIAS.0.as_ptr(),
        };
        let kind = if to_target && target.dtype == DType::BF16 { Kind::Bf16 } else { Kind::F32 };
        Conversion { kind, from, held, held_row, to, to_row, bias }
    }

    /// Rounds held blocks to the parts of the target that the microkernel does not write.
    pub(super) unsafe fn epilogue(&self) {
        for panel in 0..self.panels() {
            if !self.last || self.is_direct(panel) {
                continue;
            }
            let columns = self.columns_of(panel);
            // SAFETY: the panel lies within the target.
            unsafe { round_to_target(self.problem, self.rows, columns, self.held_block(panel)) };
        }
    }

    /// Bytes that a thread needs for pieces of so many panels of columns and steps.
    pub(super) fn private_bytes(panels: usize, steps: usize) -> usize {
        // A k-block has at least one step.
        let list = (panels * steps + 1) * size_of::<Microtile>();
        let bytes = (2 * panels + 2) * SUMS_BYTES + panels * size_of::<BiasRow>() + list;
        bytes.next_multiple_of(SUMS_BYTES)
    }

    fn panels(&self) -> usize {
        self.columns.len.div_ceil(MICROTILE)
    }

    /// The columns of a panel.
    fn columns_of(&self, panel: usize) -> Lanes {
        let first = panel * MICROTILE;
        Lanes { first: self.columns.first + first, len: MICROTILE.min(self.columns.len - first) }
    }

    fn held_block(&self, panel: usize) -> *mut f32 {
        self.held.wrapping_add(panel * SUMS_BYTES).cast()
    }
}
