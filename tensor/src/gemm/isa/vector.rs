//! One SIMD register of accumulators, as the generic kernels see it.

use crate::{Element, Real, Scalar};

/// Steps of a sum that a microkernel runs through: row i, step p of the left operand is at `a + i * a_row + p * a_step`,
/// the right operand's step p at `b + p * b_step`.
pub(in crate::gemm) struct Steps<T> {
    /// At least 1.
    pub depth: usize,
    pub a: *const T,
    pub a_row: isize,
    pub a_step: isize,
    pub b: *const T,
    pub b_step: isize,
}

impl<T> Steps<T> {
    /// Whether the rows of a step of the left operand lie together, or the steps of a row.
    pub(in crate::gemm) fn are_dense(&self) -> bool {
        self.a_row == 1 || self.a_step == 1
    }
}

/// The loop over k of a microtile.
pub(in crate::gemm) struct TileLoop<V: Vector> {
    /// Rows of the microtile.
    pub rows: usize,
    /// Vectors of columns of the microtile.
    pub vectors: usize,
    /// Adds the products of all steps to the `rows` times `vectors` sums, which lie row by row. The operands must hold
    /// the steps, and these must be dense ([`Steps::are_dense`]).
    pub run: unsafe fn(&Steps<V::Scalar>, *mut V),
}

/// A register of `LANES` f32 or f64 values.
///
/// Every function must be inlined into one that enables the instruction set (see `isa!`); all are
/// unsafe because the processor must have that instruction set.
pub(in crate::gemm) trait Vector: Copy + 'static {
    /// The type of a lane.
    type Scalar: Real + Element<Acc = Self::Scalar>;
    /// Selects the first lanes.
    type Mask: Copy;
    /// `LANES` registers: a square block to transpose.
    type Square: AsMut<[Self]>;
    /// Lanes of a register; at most 16.
    const LANES: usize;
    /// Masked loads and stores need no other instructions than plain ones.
    const FREE_MASKS: bool;
    /// The loops of microtiles for which the compiler's is slower.
    const LOOPS: &'static [TileLoop<Self>] = &[];

    /// All lanes `value`.
    unsafe fn splat(value: Self::Scalar) -> Self;
    /// `LANES` consecutive values, no alignment needed.
    unsafe fn load(from: *const Self::Scalar) -> Self;
    /// `LANES` consecutive values, no alignment needed.
    unsafe fn store(self, to: *mut Self::Scalar);
    /// The mask of the first `count` lanes, 1 to `LANES`.
    unsafe fn first(count: usize) -> Self::Mask;
    /// The masked lanes; the others are zero and their memory is not touched.
    unsafe fn load_first(from: *const Self::Scalar, mask: Self::Mask) -> Self;
    /// The masked lanes; other memory is not touched.
    unsafe fn store_first(self, to: *mut Self::Scalar, mask: Self::Mask);
    /// The lower half of the lanes to `low`, the upper half to `high`.
    unsafe fn store_halves(self, low: *mut Self::Scalar, high: *mut Self::Scalar);
    /// self * factor + addend; fused where the instruction set has it.
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// Lanewise sum.
    unsafe fn add(self, other: Self) -> Self;
    /// `LANES` zero registers.
    unsafe fn square() -> Self::Square;
    /// Lane j of register i becomes lane i of register j.
    unsafe fn transpose(square: &mut Self::Square);

    /// A square block of a storage type, widened and transposed. Register j of the result holds element j of each of
    /// the `LANES` rows, which are `stride` elements apart.
    #[inline(always)]
    unsafe fn transposed<S: Element<Acc = Self::Scalar>>(
        from: *const S,
        stride: isize,
    ) -> Self::Square {
        // SAFETY: the caller vouches for LANES rows of LANES elements.
        unsafe {
            let mut square = Self::square();
            for (i, row) in square.as_mut().iter_mut().enumerate() {
                *row = Self::widen(from.offset(i as isize * stride));
            }
            Self::transpose(&mut square);
            square
        }
    }

    /// The lower halves of the lanes of this and another register, and their upper halves.
    #[inline(always)]
    unsafe fn join_halves(self, other: Self) -> [Self; 2] {
        let mut halves = [[Self::Scalar::ZERO; 16]; 2];
        let [low, high] = halves.each_mut().map(|half| half.as_mut_ptr());
        let middle = Self::LANES / 2;
        // SAFETY: 16 lanes are there and LANES is at most 16.
        unsafe {
            self.store_halves(low, high);
            other.store_halves(low.add(middle), high.add(middle));
            halves.map(|half| Self::load(half.as_ptr()))
        }
    }

    /// `LANES` consecutive values of a storage type, widened.
    #[inline(always)]
    unsafe fn widen<S: Element<Acc = Self::Scalar>>(from: *const S) -> Self {
        if S::DTYPE == Self::Scalar::DTYPE {
            // SAFETY: as below.
            return unsafe { Self::load(from.cast()) };
        }
        let mut lanes = [Self::Scalar::ZERO; 16];
        for (lane, value) in lanes[..Self::LANES].iter_mut().enumerate() {
            // SAFETY: the caller vouches for LANES elements.
            *value = unsafe { from.add(lane).read_unaligned() }.acc();
        }
        // SAFETY: 16 lanes are there and LANES is at most 16.
        unsafe { Self::load(lanes.as_ptr()) }
    }

    /// Rounds to a storage type and writes `LANES` consecutive values.
    #[inline(always)]
    unsafe fn narrow<D: Element<Acc = Self::Scalar>>(self, to: *mut D) {
        if D::DTYPE == Self::Scalar::DTYPE {
            // SAFETY: as below.
            return unsafe { self.store(to.cast()) };
        }
        let mut lanes = [Self::Scalar::ZERO; 16];
        // SAFETY: 16 lanes are there and LANES is at most 16.
        unsafe { self.store(lanes.as_mut_ptr()) };
        for (lane, &value) in lanes[..Self::LANES].iter().enumerate() {
            // SAFETY: the caller vouches for LANES elements.
            unsafe { to.add(lane).write_unaligned(D::from_acc(value)) };
        }
    }

    /// The first `count` values of a storage type, widened; the other lanes are zero.
    #[inline(always)]
    unsafe fn widen_first<S: Element<Acc = Self::Scalar>>(from: *const S, count: usize) -> Self {
        if S::DTYPE == Self::Scalar::DTYPE {
            // SAFETY: as below.
            return unsafe { Self::load_first(from.cast(), Self::first(count)) };
        }
        let mut lanes = [S::from_acc(Self::Scalar::ZERO); 16];
        // SAFETY: the caller vouches for `count` elements, at most LANES, which is at most 16.
        unsafe {
            std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), count);
            Self::widen(lanes.as_ptr())
        }
    }

    /// Rounds to a storage type and writes the first `count` values.
    #[inline(always)]
    unsafe fn narrow_first<D: Element<Acc = Self::Scalar>>(self, to: *mut D, count: usize) {
        if D::DTYPE == Self::Scalar::DTYPE {
            // SAFETY: as below.
            return unsafe { self.store_first(to.cast(), Self::first(count)) };
        }
        let mut lanes = [D::from_acc(Self::Scalar::ZERO); 16];
        // SAFETY: the caller vouches for `count` elements, at most LANES, which is at most 16.
        unsafe {
            self.narrow(lanes.as_mut_ptr());
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), to, count);
        }
    }
}

#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod tests {
    use crate::gemm::isa::Isa;
    use crate::gemm::{Accum, MatMut, MatRef, gemm_at};
    use crate::numeric::instructions::instructions;
    use crate::{Element, Real, ThreadTeam};

    /// The elements of the left operand that lie together.
    #[derive(Clone, Copy)]
    enum Together {
        Steps,
        Rows,
    }

    /// Instructions of a step of a microtile.
    fn per_step<T: Element<Acc = T> + Real>(
        isa: Isa,
        [m, n]: [usize; 2],
        together: Together,
    ) -> f64 {
        let count = |k: usize| {
            let (a, b) = (vec![T::ONE; m * k], vec![T::ONE; k * n]);
            let mut c = vec![T::ZERO; m * n];
            let mut run = || {
                let a = match together {
                    Together::Steps => MatRef::row_major(a.as_ptr(), m, k),
                    Together::Rows => MatRef::row_major(a.as_ptr(), k, m).transposed(),
                };
                let b = MatRef::row_major(b.as_ptr(), k, n);
                let c = MatMut::row_major(c.as_mut_ptr(), m, n);
                // SAFETY: the vectors hold the matrices, and the instruction set is there.
                unsafe { gemm_at(isa, ThreadTeam::alone(), c, Accum::Replace, T::ONE, a, b, None) }
                    .unwrap();
            };
            run();
            instructions(run) as f64
        };
        (count(240) - count(120)) / 120.0
    }

    #[test]
    fn steps_of_large_microtiles_take_few_instructions() {
        // Multiply-adds, vectors of columns, a factor for each row, and the loop: of each step, or of four. AVX2 packs
        // operands whose rows lie together.
        let cases = [
            (Isa::Avx2, [4, 24], Together::Steps, 23.5),
            (Isa::Avx512, [8, 48], Together::Steps, 36.5),
            (Isa::Avx512, [8, 48], Together::Rows, 36.5),
            (Isa::Avx512, [8, 32], Together::Steps, 27.5),
            (Isa::Avx512, [8, 32], Together::Rows, 27.5),
        ];
        for (isa, [m, n], together, most) in cases {
            if !Isa::available().any(|available| available == isa) {
                println!("not on this processor: it lacks {isa:?}");
                continue;
            }
            let found = [
                per_step::<f32>(isa, [m, n], together),
                per_step::<f64>(isa, [m, n / 2], together),
            ];
            assert!(
                found.iter().all(|&found| found <= most),
                "{isa:?}: {found:?} instructions a step in f32 and f64"
            );
        }
    }

    /// Microtiles with loops of their own beside rows one by one, which take the compiled loop.
    fn check_bits<T: Real + Element<Acc = T>>(isa: Isa, [m, k, n]: [usize; 3]) {
        let number = |i: usize| T::from_f64(((i * 7919) % 1013) as f64 / 1013.0 - 0.5);
        let a: Vec<T> = (0..m * k).map(number).collect();
        let turned: Vec<T> = (0..m * k).map(|i| a[i % m * k + i / m]).collect();
        let b: Vec<T> = (0..k * n).map(|i| number(i + 31)).collect();
        let product = |a: MatRef<T>, rows: usize, c: &mut [T]| {
            let b = MatRef::row_major(b.as_ptr(), k, n);
            let c = MatMut::row_major(c.as_mut_ptr(), rows, n);
            // SAFETY: the vectors hold the matrices, and the instruction set is there.
            unsafe { gemm_at(isa, ThreadTeam::alone(), c, Accum::Replace, T::ONE, a, b, None) }
                .unwrap();
        };
        let mut want = vec![T::ZERO; m * n];
        for (row, c) in want.chunks_exact_mut(n).enumerate() {
            product(MatRef::row_major(a[row * k..].as_ptr(), 1, k), 1, c);
        }
        let together = [
            MatRef::row_major(a.as_ptr(), m, k),
            MatRef::row_major(turned.as_ptr(), k, m).transposed(),
        ];
        for a in together {
            let mut got = vec![T::ZERO; m * n];
            product(a, m, &mut got);
            assert_eq!(got, want, "{isa:?}, {}, k {k}, n {n}", T::DTYPE);
        }
    }

    #[test]
    fn large_microtiles_have_the_bits_of_single_rows() {
        for isa in Isa::available() {
            for (k, n) in (1..=13).flat_map(|k| [(k, 32), (k, 48)]) {
                check_bits::<f32>(isa, [8, k, n]);
                check_bits::<f64>(isa, [8, k, n / 2]);
            }
        }
    }
}
