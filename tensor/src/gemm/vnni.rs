//! Products of bf16 matrices by instructions that multiply pairs: sum += a0 b0 + a1 b1.
//!
//! Two consecutive steps of k make one *word* of 32 bits, the size of the accumulator. In words such a product is
//! cut up, packed and computed like one of f32 matrices, with half as many steps; what differs is how a word
//! is made and what the microkernel does with two of them. Where k is odd, the last word's upper half is zero.

use super::isa::vector::Vector;
use super::pack_task::PackTask;
use crate::bf16;

/// Elements of a word.
pub(super) const PAIR: usize = 2;

/// The word of two steps, the earlier one in the lower half.
#[inline(always)]
fn word(low: bf16, high: bf16) -> f32 {
    f32::from_bits(u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16)
}

/// Packs a part of an operand of bf16 as words, by `interleave` where the lanes of a step lie together.
///
/// # Safety
/// The conditions of [`super::pack::pack`], with steps of two elements each.
#[inline(always)]
pub(super) unsafe fn pack<V: Vector<Scalar = f32>>(
    task: &PackTask<f32>,
    interleave: unsafe fn(&PackTask<f32>),
) {
    let PackTask { step_stride, lane_stride, elements, .. } = *task;
    let whole = elements / PAIR;
    // SAFETY: the caller's promise, passed on: both parts lie within the operand.
    unsafe {
        if lane_stride == 1 {
            interleave(task);
            return;
        }
        let mut done = 0;
        if step_stride == PAIR as isize && lane_stride % PAIR as isize == 0 && whole > 0 {
            // Words lie in memory as they should: move them as if they were f32.
            let words = PackTask {
                step_stride: 1,
                lane_stride: lane_stride / PAIR as isize,
                depth: whole,
                ..*task
            };
            super::pack::pack::<V, f32>(&words);
            done = whole;
        }
        gather(task, done, V::LANES);
    }
}

/// Packs the steps from `first` on, word by word.
///
/// # Safety
/// The conditions of [`pack`].
pub(super) unsafe fn gather(task: &PackTask<f32>, first: usize, lanes: usize) {
    let PackTask { depth, count, to, width, panel_stride, .. } = *task;
    for step in first..depth {
        for lane in 0..count.next_multiple_of(lanes) {
            let place = lane / width * panel_stride + lane % width + step * width;
            // SAFETY: the elements lie within the operand, and panels have room for whole registers.
            unsafe {
                let value = if lane < count { word_of(task, lane, step) } else { 0.0 };
                to.add(place).write(value);
            }
        }
    }
}

/// # Safety
/// The operand holds its elements, and `lane` and `step` are within it.
unsafe fn word_of(task: &PackTask<f32>, lane: usize, step: usize) -> f32 {
    let PackTask { step_stride, lane_stride, elements, .. } = *task;
    let offset = step as isize * step_stride + lane as isize * lane_stride;
    let at = task.from.cast::<bf16>().wrapping_offset(offset);
    // SAFETY: the caller's promise; where k is odd, the last upper half is not looked at.
    unsafe {
        let odd = PAIR * step + 1 == elements;
        let high = if odd { bf16::ZERO } else { *at.wrapping_offset(step_stride / PAIR as isize) };
        word(*at, high)
    }
}
