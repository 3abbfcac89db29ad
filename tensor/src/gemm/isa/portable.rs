//! Kernels in plain Rust, for processors without the other instruction sets.

use crate::gemm::isa::vector::Vector;
use crate::gemm::kernel::Compute;

/// Four lanes, left to the compiler.
#[derive(Clone, Copy)]
struct Lanes<T>([T; 4]);

impl<T: Compute> Vector for Lanes<T> {
    type Scalar = T;
    type Mask = usize;
    type Square = [Self; 4];
    const LANES: usize = 4;
    const FREE_MASKS: bool = false;

    #[inline(always)]
    unsafe fn splat(value: T) -> Self {
        Lanes([value; 4])
    }
    #[inline(always)]
    unsafe fn load(from: *const T) -> Self {
        // SAFETY: the caller vouches for four elements.
        Lanes(unsafe { from.cast::<[T; 4]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut T) {
        // SAFETY: the caller vouches for four elements.
        unsafe { to.cast::<[T; 4]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn first(count: usize) -> usize {
        count
    }
    #[inline(always)]
    unsafe fn load_first(from: *const T, mask: usize) -> Self {
        let mut lanes = Lanes([T::ZERO; 4]);
        // SAFETY: the caller vouches for the masked elements.
        unsafe { std::ptr::copy_nonoverlapping(from, lanes.0.as_mut_ptr(), mask) };
        lanes
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut T, mask: usize) {
        // SAFETY: the caller vouches for the masked elements.
        unsafe { std::ptr::copy_nonoverlapping(self.0.as_ptr(), to, mask) }
    }
    #[inline(always)]
    unsafe fn store_halves(self, low: *mut T, high: *mut T) {
        // SAFETY: the caller vouches for two elements each.
        unsafe {
            low.cast::<[T; 2]>().write_unaligned([self.0[0], self.0[1]]);
            high.cast::<[T; 2]>().write_unaligned([self.0[2], self.0[3]]);
        }
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // Not fused: without the instruction a fused one is a slow library call.
        Lanes(std::array::from_fn(|lane| self.0[lane] * factor.0[lane] + addend.0[lane]))
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Lanes(std::array::from_fn(|lane| self.0[lane] + other.0[lane]))
    }
    #[inline(always)]
    unsafe fn square() -> [Self; 4] {
        [Lanes([T::ZERO; 4]); 4]
    }
    #[inline(always)]
    unsafe fn transpose(square: &mut [Self; 4]) {
        let old = *square;
        *square = std::array::from_fn(|row| Lanes(std::array::from_fn(|lane| old[lane].0[row])));
    }
}

crate::gemm::compile::isa!(Lanes<f32>, Lanes<f64>, [1, 2, 3, 4], with_portable);

/// The kernels of [`crate::gemm::vnni`] in plain Rust: the tests run them on every machine.
#[cfg(test)]
pub(in crate::gemm) static PAIRS: crate::gemm::kernel::GemmKernels<f32> = {
    use crate::gemm::kernel::{GemmKernels, Multiply, TileFn, tile};
    use crate::gemm::pack_task::PackTask;
    use crate::gemm::stream::stream;
    use crate::gemm::vnni::{gather, pack};

    struct Pairs;
    impl Multiply<Lanes<f32>> for Pairs {
        unsafe fn multiply_add(
            factor: Lanes<f32>,
            column: Lanes<f32>,
            sum: Lanes<f32>,
        ) -> Lanes<f32> {
            let halves = |word: f32| {
                [word.to_bits() << 16, word.to_bits() & 0xffff_0000].map(f32::from_bits)
            };
            Lanes(std::array::from_fn(|lane| {
                let ([a, b], [c, d]) = (halves(factor.0[lane]), halves(column.0[lane]));
                sum.0[lane] + a * c + b * d
            }))
        }
    }
    const fn row<const R: usize>() -> &'static [TileFn<f32>] {
        type Word = Lanes<f32>;
        &[tile::<Word, Pairs, R, 1>, tile::<Word, Pairs, R, 2>, tile::<Word, Pairs, R, 3>]
    }
    unsafe fn pack_pairs(task: &PackTask<f32>) {
        // SAFETY: the caller's promise, passed on.
        unsafe { pack::<Lanes<f32>>(task, gather_all) }
    }
    unsafe fn gather_all(task: &PackTask<f32>) {
        // SAFETY: the caller's promise, passed on.
        unsafe { gather(task, 0, <Lanes<f32>>::LANES) }
    }
    GemmKernels {
        tiles: &[row::<1>(), row::<2>(), row::<3>(), row::<4>()],
        stream: |_| {
            type Word = Lanes<f32>;
            &[
                stream::<Word, Pairs, f32, 1>,
                stream::<Word, Pairs, f32, 2>,
                stream::<Word, Pairs, f32, 3>,
                stream::<Word, Pairs, f32, 4>,
            ]
        },
        pack: |_| pack_pairs,
        ..F32
    }
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_joined_as_they_are_stored() {
        // SAFETY: every processor has plain Rust.
        let [low, high] =
            unsafe { Lanes([1.0_f32, 2.0, 3.0, 4.0]).join_halves(Lanes([5.0, 6.0, 7.0, 8.0])) };
        assert_eq!([low.0, high.0], [[1.0, 2.0, 5.0, 6.0], [3.0, 4.0, 7.0, 8.0]]);
    }
}
