//! An operand and how the microkernel gets to it.

use super::blocking::GemmShape;
use super::kernel::{Compute, GemmKernels, PackFn, StoredColumns};
use super::pack_task::PackTask;
use super::problem::Operand;
use super::stream::FEW;

/// Elements that a thread packs at a time.
const PACK_ELEMENTS: usize = 16 << 10;
/// Steps that are copied together, at least: runs of that length are written to each panel.
const PACK_STEPS: usize = 16;
/// Bytes of an operand that is used in place wherever its steps are.
const NEAR_BYTES: usize = 64 << 10;
/// Bytes of an operand that is used in place when several of its steps share a page, and the
/// stride up to which they do.
const CLOSE_BYTES: usize = 2 << 20;
const CLOSE_STRIDE: usize = 2048;
/// Sums of a microtile that takes long enough for L2 to deliver operands in place, which L1 seldom keeps: their steps share
/// few of its sets. The 24 of AVX-512 use four lines in 12 to 24 cycles, the 12 of AVX2 three or four in 6.
const SLOW_TILE: usize = 24;

/// The place from which the microkernel reads an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// Read in the operand itself.
    Unpacked,
    /// Read in the operand itself, a few rows at a time, and transposed in registers.
    Streamed,
    /// Packed in panels that all threads pack together, a cache block at a time.
    PackedShared,
    /// Packed in one panel, by a thread just before its only use.
    PackedPerThread,
    /// Packed in panels of its own by each thread, for the lanes of a tile, and kept for its next tiles of these lanes: they
    /// stay in its L2, and no thread waits for another one's.
    PackedPerTile,
}

impl Access {
    /// Chooses the access to rows. The kernel broadcasts them element by element, so it is enough that a row's steps
    /// lie together. They are also used in place where a step's rows lie together and all is near.
    pub(super) fn for_rows<T: Compute>(operand: &Operand, size: &GemmShape) -> Access {
        let steps = operand.step_stride == operand.per_step as isize;
        let near = near(operand, size, size.columns);
        let in_place = operand.has_steps_of::<T>() && (steps || near);
        if in_place { Access::Unpacked } else { Access::PackedShared }
    }

    /// Columns are loaded as vectors, so those of a step must lie together, or are transposed in registers for few rows.
    /// Where there are so few rows that every element is used once, packing them for later is of no use.
    pub(super) fn for_columns<T: Compute>(
        operand: &Operand,
        size: &GemmShape,
        kernels: &GemmKernels<T>,
    ) -> Access {
        let once = size.rows <= kernels.tiles.len();
        let whole = kernels.free_masks || operand.lanes.is_multiple_of(kernels.lanes);
        let vectors = operand.has_steps_of::<T>() && operand.lane_stride == 1 && whole;
        if vectors && (once || near(operand, size, size.rows)) {
            Access::Unpacked
        } else if size.rows <= FEW && operand.has_steps_together::<T>() {
            Access::Streamed
        } else if once {
            Access::PackedPerThread
        } else {
            Access::PackedShared
        }
    }
}

/// Whether the lanes of a step lie together, and the steps near enough for caches and TLB. If the microtile is not slow, that
/// helps operands with few `uses`: lanes of the other one.
fn near(operand: &Operand, size: &GemmShape, uses: usize) -> bool {
    let total = operand.lanes.saturating_mul(size.k).saturating_mul(size.bytes);
    let close = operand.step_stride.unsigned_abs() * size.bytes <= CLOSE_STRIDE;
    let small = total <= NEAR_BYTES || close && total <= CLOSE_BYTES;
    let in_time = size.mr * size.vectors >= SLOW_TILE || uses <= FEW;
    operand.lane_stride == 1 && small && in_time
}

/// A part of a cache block that one thread packs: `lanes` by `steps`, within kc steps.
#[derive(Debug, Clone, Copy)]
struct Chunk {
    lanes: usize,
    steps: usize,
    /// The number of chunks in kc steps.
    count: usize,
}

/// A range of lanes by a range of steps.
#[derive(Debug, Clone, Copy)]
pub(super) struct Range {
    pub lane: usize,
    pub lanes: usize,
    pub step: usize,
    pub steps: usize,
}

/// A view of kc steps for the microkernel: the address of the first lane and step, and the strides, in elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct OperandView<T> {
    pub data: *const T,
    pub panel: isize,
    pub lane: isize,
    pub step: isize,
}

/// An operand with its panels.
pub(super) struct PackedOperand<T> {
    pub operand: Operand,
    pub access: Access,
    pub pack: PackFn<T>,
    /// Steps of k that the microkernel runs through in one go.
    pub kc: usize,
    /// Lanes of a panel.
    pub width: usize,
    /// Lanes that are packed together, at least: whole panels and whole registers.
    pub unit: usize,
    /// Lanes of a cache block's panels, padding included.
    pub padded: usize,
    pub panels: *mut T,
}

impl<T: Compute> PackedOperand<T> {
    /// Elements that the panels take, for cache blocks of `depth` steps.
    pub(super) fn panel_elements(&self, depth: usize, threads: usize) -> usize {
        match self.access {
            Access::Unpacked | Access::Streamed => 0,
            Access::PackedShared => self.padded * depth,
            Access::PackedPerThread => self.width * self.kc * threads,
            Access::PackedPerTile => self.padded * depth * threads,
        }
    }

    fn chunk(&self, lanes: usize) -> Chunk {
        let kc = self.kc;
        if self.operand.lane_stride == 1 {
            let steps = (PACK_ELEMENTS / lanes).max(PACK_STEPS);
            Chunk { lanes, steps, count: kc.div_ceil(steps) }
        } else {
            let chunk = (PACK_ELEMENTS / (self.unit * kc)).max(1) * self.unit;
            Chunk { lanes: chunk, steps: kc, count: lanes.div_ceil(chunk) }
        }
    }

    /// Number of parts in which a cache block is packed.
    pub(super) fn chunks(&self, block: Range) -> usize {
        match self.access {
            Access::PackedShared => block.steps.div_ceil(self.kc) * self.chunk(block.lanes).count,
            _ => 0,
        }
    }

    /// Packs part number `part` of a cache block.
    ///
    /// # Safety
    /// The cache block lies within the operand, and no other thread uses the panels of the part.
    pub(super) unsafe fn pack_chunk(&self, block: Range, part: usize) {
        let chunk = self.chunk(block.lanes);
        let (sum, part) = (part / chunk.count, part % chunk.count);
        let start = sum * self.kc;
        let depth = self.kc.min(block.steps - start);
        let (lane, step) =
            if chunk.steps < self.kc { (0, part * chunk.steps) } else { (part * chunk.lanes, 0) };
        // The last steps are fewer than what the parts are counted by.
        if step < depth {
            let range = Range {
                lane: block.lane + lane,
                lanes: chunk.lanes.min(block.lanes - lane),
                step: block.step + start + step,
                steps: chunk.steps.min(depth - step),
            };
            let to = start * self.padded + lane * depth + step * self.width;
            // SAFETY: the range lies within the operand, and its panels within those of the
            // cache block, where lanes are padded to whole registers.
            unsafe { self.pack_range(range, self.panels.wrapping_add(to), self.width * depth) };
        }
    }

    /// Packs the lanes of a tile of a cache block into the panels of a thread: `lanes` from the block's `lane` on.
    ///
    /// # Safety
    /// The lanes lie within the operand, are at most `padded`, and `thread` is below the number of threads.
    pub(super) unsafe fn pack_tile(&self, block: Range, [lane, lanes]: [usize; 2], thread: usize) {
        let panels = self.tile_panels(block, thread);
        for start in (0..block.steps).step_by(self.kc) {
            let steps = self.kc.min(block.steps - start);
            let range = Range { lane: block.lane + lane, lanes, step: block.step + start, steps };
            let to = panels.wrapping_add(start * self.padded);
            // SAFETY: the caller's promise, and the panels have whole registers.
            unsafe { self.pack_range(range, to, self.width * steps) };
        }
    }

    /// The panels of a thread for a tile's lanes in a cache block.
    fn tile_panels(&self, block: Range, thread: usize) -> *mut T {
        self.panels.wrapping_add(thread * self.padded * block.steps)
    }

    /// Packs kc steps of one panel into the panel of a thread.
    ///
    /// # Safety
    /// The range lies within the operand, and `thread` is below the number of threads.
    pub(super) unsafe fn pack_panel(&self, range: Range, thread: usize) {
        let to = self.panels.wrapping_add(thread * self.width * self.kc);
        // SAFETY: the caller's promise, and a panel has whole registers.
        unsafe { self.pack_range(range, to, 0) }
    }

    unsafe fn pack_range(&self, range: Range, to: *mut T, panel_stride: usize) {
        let Operand { per_step, elements, .. } = self.operand;
        let task = PackTask {
            from: self.operand.at(range.lane, range.step),
            step_stride: self.operand.step_stride,
            lane_stride: self.operand.lane_stride,
            depth: range.steps,
            elements: (per_step * range.steps).min(elements - per_step * range.step),
            count: range.lanes,
            to,
            width: self.width,
            panel_stride,
        };
        // SAFETY: the caller's promise.
        unsafe { (self.pack)(&task) }
    }

    /// Lanes that are streamed from `lane` on, a panel of them: `depth` steps of a cache block from its step `start` on.
    pub(super) fn stored(
        &self,
        block: Range,
        lane: usize,
        start: usize,
        depth: usize,
    ) -> StoredColumns {
        let operand = &self.operand;
        let next = match start + depth < block.steps {
            true => operand.at(lane, block.step + start + depth),
            false => operand.at(lane + self.width, block.step),
        };
        StoredColumns {
            data: operand.at(lane, block.step + start),
            stride: operand.lane_stride / operand.per_step as isize,
            next,
        }
    }

    /// A view of lanes from `lane` on, in the `depth` steps of a cache block from
    /// its step `start` on.
    pub(super) fn view(
        &self,
        block: Range,
        lane: usize,
        start: usize,
        depth: usize,
        thread: usize,
    ) -> OperandView<T> {
        let width = self.width as isize;
        match self.access {
            Access::Unpacked | Access::Streamed => {
                let per_step = self.operand.per_step as isize;
                let lane_stride = self.operand.lane_stride / per_step;
                let step_stride = self.operand.step_stride / per_step;
                let data = self.operand.at(block.lane + lane, block.step + start).cast();
                OperandView {
                    data,
                    panel: width * lane_stride,
                    lane: lane_stride,
                    step: step_stride,
                }
            }
            Access::PackedShared => {
                let data = self.panels.wrapping_add(start * self.padded + lane * depth);
                OperandView { data, panel: width * depth as isize, lane: 1, step: width }
            }
            Access::PackedPerThread => {
                let data = self.panels.wrapping_add(thread * self.width * self.kc);
                OperandView { data, panel: 0, lane: 1, step: width }
            }
            Access::PackedPerTile => {
                let data = self.tile_panels(block, thread).wrapping_add(start * self.padded);
                OperandView { data, panel: width * depth as isize, lane: 1, step: width }
            }
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use crate::DType;
    use crate::gemm::isa::Isa;
    use crate::gemm::kernel_table::KernelTable;

    /// Both sides' access to an operand of 128 lanes by 768 steps, 512 bytes apart.
    fn accesses(isa: Isa, others: usize) -> [Access; 2] {
        let kernels = f32::kernels(isa);
        let operand = Operand {
            data: std::ptr::null(),
            dtype: DType::F32,
            lanes: 128,
            lane_stride: 1,
            step_stride: 128,
            elements: 768,
            per_step: 1,
        };
        let size = |rows, columns| GemmShape {
            rows,
            columns,
            k: 768,
            threads: 1,
            bytes: size_of::<f32>(),
            lanes: kernels.lanes,
            mr: kernels.tiles.len(),
            vectors: kernels.vectors(),
        };
        [
            Access::for_rows::<f32>(&operand, &size(128, others)),
            Access::for_columns(&operand, &size(others, 128), kernels),
        ]
    }

    #[test]
    fn operands_with_steps_apart_are_packed_for_fast_microtiles() {
        assert_eq!(accesses(Isa::Avx2, 512), [Access::PackedShared; 2]);
        assert_eq!(accesses(Isa::Avx512, 512), [Access::Unpacked; 2]);
        // Elements of columns are used once or twice.
        for rows in [4, 8] {
            assert_eq!(accesses(Isa::Avx2, rows)[1], Access::Unpacked);
        }
    }
}
