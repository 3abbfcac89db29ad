//! Packing an operand in which the lanes of a step lie together: its rows are copied to the panels.

use super::isa::vector::Vector;
use super::pack_task::{PackTask, is_far};
use crate::Element;
use crate::numeric::prefetch::{self, LINE};

/// Steps that are copied together: runs of them are written to each panel, and as many rows of memory are read at once.
const COPIED_STEPS: usize = 8;

/// Copies some steps of a panel at a time, so that memory is read in the order in which it lies.
///
/// # Safety
/// That of [`super::pack::pack`].
#[inline(always)]
pub(super) unsafe fn copy_rows<V: Vector, S: Element<Acc = V::Scalar>>(task: &PackTask<V::Scalar>) {
    let PackTask { step_stride, depth, count, to, width, panel_stride, .. } = *task;
    // One panel, or two of half a register.
    let group = width.max(V::LANES);
    let group_stride = if width < V::LANES { 2 * panel_stride } else { panel_stride };
    let far = is_far::<S>(depth, step_stride);
    let together = if far { COPIED_STEPS } else { depth.max(1) };
    for first in (0..depth).step_by(together) {
        let steps = together.min(depth - first);
        let from = task.from.cast::<S>().wrapping_offset(first as isize * step_stride);
        let next = far.then_some(together as isize * step_stride);
        let mut to = to.wrapping_add(first * width);
        for lane in (0..count).step_by(group) {
            let lanes = group.min(count - lane);
            let from = from.wrapping_add(lane);
            let part = PanelPart { from, step_stride, next, to, width, steps };
            let whole = lanes.is_multiple_of(V::LANES);
            // SAFETY: source and panels hold `count` lanes, the panels rounded up to registers.
            unsafe {
                match lanes / V::LANES {
                    1 if whole && width < V::LANES => part.copy_halves::<V>(panel_stride),
                    1 if whole => part.copy_registers::<V, 1>(),
                    2 if whole => part.copy_registers::<V, 2>(),
                    3 if whole => part.copy_registers::<V, 3>(),
                    _ => part.copy_lanes::<V>(lanes, panel_stride),
                }
            }
            to = to.wrapping_add(group_stride);
        }
    }
}

/// Some steps of a panel, or of two of half a register, and the rows that they are copied from.
struct PanelPart<S, T> {
    from: *const S,
    step_stride: isize,
    /// Elements from a row to the one that is fetched while it is copied.
    next: Option<isize>,
    to: *mut T,
    width: usize,
    steps: usize,
}

impl<S: Element> PanelPart<S, S::Acc> {
    /// Copies panels of `N` registers.
    #[inline(always)]
    unsafe fn copy_registers<V: Vector<Scalar = S::Acc>, const N: usize>(self) {
        let PanelPart { mut from, mut to, .. } = self;
        for _ in 0..self.steps {
            self.fetch_next(from, N * V::LANES);
            // SAFETY: the caller's promise.
            unsafe {
                for i in 0..N {
                    V::widen(from.add(i * V::LANES)).store(to.add(i * V::LANES));
                }
            }
            from = from.wrapping_offset(self.step_stride);
            to = to.wrapping_add(self.width);
        }
    }

    /// Copies two panels of half a register, two steps at a time, which fill a register of each.
    #[inline(always)]
    unsafe fn copy_halves<V: Vector<Scalar = S::Acc>>(self, panel_stride: usize) {
        let PanelPart { mut from, mut to, .. } = self;
        for _ in 0..self.steps / 2 {
            let second = from.wrapping_offset(self.step_stride);
            self.fetch_next(from, V::LANES);
            self.fetch_next(second, V::LANES);
            // SAFETY: the caller's promise.
            unsafe {
                let [low, high] = V::widen(from).join_halves(V::widen(second));
                low.store(to);
                high.store(to.add(panel_stride));
            }
            from = second.wrapping_offset(self.step_stride);
            to = to.wrapping_add(V::LANES);
        }
        if self.steps % 2 == 1 {
            // SAFETY: the caller's promise.
            unsafe { V::widen(from).store_halves(to, to.add(panel_stride)) };
        }
    }

    /// Copies `lanes` lanes, of which the last register may have few.
    #[inline(always)]
    unsafe fn copy_lanes<V: Vector<Scalar = S::Acc>>(self, lanes: usize, panel_stride: usize) {
        let PanelPart { mut from, mut to, width, .. } = self;
        let whole = lanes / V::LANES * V::LANES;
        for _ in 0..self.steps {
            self.fetch_next(from, lanes);
            // SAFETY: the caller's promise.
            unsafe {
                for lane in (0..whole).step_by(V::LANES) {
                    V::widen(from.add(lane)).store(to.add(lane));
                }
                if whole < lanes {
                    let rest = V::widen_first(from.add(whole), lanes - whole);
                    if width < V::LANES {
                        rest.store_halves(to, to.add(panel_stride));
                    } else {
                        rest.store(to.add(whole));
                    }
                }
            }
            from = from.wrapping_offset(self.step_stride);
            to = to.wrapping_add(width);
        }
    }

    /// Fetches so many lanes of the row that is to be fetched while the one at `from` is copied.
    #[inline(always)]
    fn fetch_next(&self, from: *const S, lanes: usize) {
        if let Some(next) = self.next {
            for lane in (0..lanes).step_by(LINE / size_of::<S>()) {
                prefetch::to_l2(from.wrapping_offset(next).wrapping_add(lane));
            }
        }
    }
}
