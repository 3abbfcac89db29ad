//! The microkernel: a small tile of the product, held in registers while k runs.

use super::isa::vector::{Steps, TileLoop, Vector};
use super::pack::Epilogue;
use super::pack_task::PackTask;
use super::problem::{Bias, Problem, Target};
use crate::numeric::prefetch;
use crate::{DType, Element, Real, bf16, f16};

/// One call of the microkernel. Row i, step p of the left operand is at `a + i * a_row + p * a_step`;
/// the right operand's step p is a contiguous row at `b + p * b_step`; row i of the sums so far is
/// contiguous at `c + i * c_row`, row i of the result at `to + i * to_row`, which may be the same place.
pub(super) struct MicroTile<T> {
    /// Steps of the sum, at least 1.
    pub depth: usize,
    pub a: *const T,
    pub a_row: isize,
    pub a_step: isize,
    pub b: *const T,
    pub b_step: isize,
    pub c: *const T,
    pub c_row: isize,
    /// Add the sums so far; otherwise they are not read.
    pub add: bool,
    /// First element of the result, of type `dtype`: the sums' own, or one that they are rounded to.
    pub to: *mut u8,
    pub to_row: isize,
    pub dtype: DType,
    /// Valid lanes of the last vector of columns, 1 to LANES.
    pub last_lanes: usize,
    pub alpha: T,
    /// A row of `dtype` to add to every row of the result, or null.
    pub bias: *const u8,
}

/// Columns of a storage type as they lie in memory, the steps of each together.
pub(super) struct StoredColumns {
    /// The first step of the first column.
    pub data: *const u8,
    /// Elements from one column to the next.
    pub stride: isize,
    /// What is read after the last step of the first column; others are as far apart.
    pub next: *const u8,
}

/// The microkernel's operation on one step of both operands.
pub(super) trait Multiply<V: Vector> {
    /// The loops of microtiles for which the compiler's is slower.
    const LOOPS: &'static [TileLoop<V>] = &[];
    /// sum + factor * column, lane by lane.
    unsafe fn multiply_add(factor: V, column: V, sum: V) -> V;
}

/// Steps are accumulators.
pub(super) struct Single;

impl<V: Vector> Multiply<V> for Single {
    const LOOPS: &'static [TileLoop<V>] = V::LOOPS;

    #[inline(always)]
    unsafe fn multiply_add(factor: V, column: V, sum: V) -> V {
        // SAFETY: the caller's promise, passed on.
        unsafe { factor.mul_add(column, sum) }
    }
}

/// to = round([c +] alpha * a b [+ bias]) for `R` rows and `N` vectors of columns.
///
/// Every element is one chain of fused multiply-adds in the order of k, from zero: it depends
/// neither on `R` nor on `N`.
///
/// # Safety
/// The pointers of `tile` hold what its documentation says, for `R` rows and the columns that
/// `N` and `last_lanes` give; `b` holds whole vectors unless `V::FREE_MASKS`.
#[inline(always)]
pub(super) unsafe fn tile<
    V: Vector<Scalar: Compute>,
    M: Multiply<V>,
    const R: usize,
    const N: usize,
>(
    tile: &MicroTile<V::Scalar>,
) {
    let MicroTile { depth, a_row, a_step, b_step, c, c_row, to, to_row, .. } = *tile;
    let (mut a, mut b) = (tile.a, tile.b);
    // SAFETY: as promised by the caller; prefetching has no effect but on caches.
    unsafe {
        if tile.add {
            fetch_rows::<R, N>(c.cast(), c_row, size_of::<V::Scalar>(), V::LANES);
        }
        if !tile.add || to.cast_const() != c.cast() {
            fetch_rows::<R, N>(to, to_row, tile.dtype.size(), V::LANES);
        }
        let mask = V::first(tile.last_lanes);
        let mut sums = [[V::splat(V::Scalar::ZERO); N]; R];
        let whole = !V::FREE_MASKS || tile.last_lanes == V::LANES;
        let steps = Steps { depth, a, a_row, a_step, b, b_step };
        match M::LOOPS.iter().find(|found| [R, N] == [found.rows, found.vectors]) {
            Some(found) if whole && depth > 0 && steps.are_dense() => {
                // R rows of N vectors lie row by row, as the loop expects.
                (found.run)(&steps, (&raw mut sums).cast());
            }
            _ if !whole => {
                for _ in 0..depth {
                    let last = b.add((N - 1) * V::LANES);
                    let columns = std::array::from_fn(|v| match v + 1 == N {
                        true => V::load_first(last, mask),
                        false => V::load(b.add(v * V::LANES)),
                    });
                    add_step::<V, M, R, N>(a, a_row, columns, &mut sums);
                    a = a.wrapping_offset(a_step);
                    b = b.wrapping_offset(b_step);
                }
            }
            _ => {
                for _ in 0..depth {
                    let columns = std::array::from_fn(|v| V::load(b.add(v * V::LANES)));
                    add_step::<V, M, R, N>(a, a_row, columns, &mut sums);
                    a = a.wrapping_offset(a_step);
                    b = b.wrapping_offset(b_step);
                }
            }
        }
        V::Scalar::put(tile, sums.into_iter());
    }
}

/// Adds the products of one step.
///
/// # Safety
/// The conditions of [`tile`].
#[inline(always)]
unsafe fn add_step<V: Vector, M: Multiply<V>, const R: usize, const N: usize>(
    a: *const V::Scalar,
    a_row: isize,
    columns: [V; N],
    sums: &mut [[V; N]; R],
) {
    for (i, row) in sums.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let factor = V::splat(a.offset(i as isize * a_row).read_unaligned());
            for (sum, column) in row.iter_mut().zip(columns) {
                *sum = M::multiply_add(factor, column, *sum);
            }
        }
    }
}

/// to = round([c +] alpha * sums [+ bias]) for rows of sums in `N` vectors of columns, `D` being the result's type.
///
/// # Safety
/// The conditions of [`tile`].
#[inline(always)]
unsafe fn put<V: Vector, D: Element<Acc = V::Scalar>, const N: usize>(
    tile: &MicroTile<V::Scalar>,
    rows: impl Iterator<Item = [V; N]>,
) {
    // SAFETY: as promised by the caller.
    unsafe {
        let (mut c, mut to, bias) = (tile.c, tile.to.cast::<D>(), tile.bias.cast::<D>());
        let alpha = V::splat(tile.alpha);
        for row in rows {
            for (v, sum) in row.into_iter().enumerate() {
                let column = v * V::LANES;
                let lanes = if v + 1 == N { tile.last_lanes } else { V::LANES };
                let held = match tile.add {
                    true => widen_lanes(c.add(column), lanes),
                    false => V::splat(V::Scalar::ZERO),
                };
                let mut value = alpha.mul_add(sum, held);
                if !bias.is_null() {
                    value = value.add(widen_lanes(bias.add(column), lanes));
                }
                let to = to.add(column);
                if lanes == V::LANES { value.narrow(to) } else { value.narrow_first(to, lanes) }
            }
            c = c.wrapping_offset(tile.c_row);
            to = to.wrapping_offset(tile.to_row);
        }
    }
}

/// The first `lanes` values of a storage type, widened.
///
/// # Safety
/// They are there.
#[inline(always)]
unsafe fn widen_lanes<V: Vector, S: Element<Acc = V::Scalar>>(from: *const S, lanes: usize) -> V {
    // SAFETY: the caller's promise.
    unsafe { if lanes == V::LANES { V::widen(from) } else { V::widen_first(from, lanes) } }
}

/// Fetches `R` rows of `N` times `lanes` elements, `row` elements of `size` bytes apart, which are written next.
#[inline(always)]
fn fetch_rows<const R: usize, const N: usize>(
    from: *const u8,
    row: isize,
    size: usize,
    lanes: usize,
) {
    for i in 0..R {
        let from = from.wrapping_offset(i as isize * (row * size as isize));
        (0..N).for_each(|v| prefetch::to_l1(from.wrapping_add(v * (lanes * size))));
    }
}

/// Independent sums of [`multiply`], which hide the latency of a multiplication and fit the registers of AVX2.
pub(super) const SUMS: usize = 12;

/// Adds a product to each of some sums in registers, `times` times; returns the floating-point operations of single
/// accumulators.
///
/// # Safety
/// The processor has the instruction set.
#[inline(always)]
pub(super) unsafe fn multiply<V: Vector, M: Multiply<V>>(times: usize) -> usize {
    // SAFETY: the caller's promise; the arrays hold a register.
    unsafe {
        let number = |x: f64| V::splat(std::hint::black_box(V::Scalar::from_f64(x)));
        let (factor, column) = (number(0.5), number(1.0));
        let mut sums: [V; SUMS] = std::array::from_fn(|_| number(0.0));
        for _ in 0..times {
            for sum in &mut sums {
                *sum = M::multiply_add(factor, column, *sum);
            }
        }
        for sum in sums {
            let mut lanes = [V::Scalar::ZERO; 16];
            sum.store(lanes.as_mut_ptr());
            std::hint::black_box(lanes);
        }
    }
    2 * V::LANES * SUMS * times
}

/// A compiled [`tile`].
pub(super) type TileFn<T> = unsafe fn(&MicroTile<T>);
/// A compiled microkernel of few rows ([`super::stream`]), its storage type erased.
pub(super) type StreamFn<T> = unsafe fn(&MicroTile<T>, &StoredColumns);
/// A compiled [`super::pack::pack`], its source type erased.
pub(super) type PackFn<T> = unsafe fn(&super::pack_task::PackTask<T>);
/// A compiled [`super::pack::epilogue`], its destination type erased.
pub(super) type EpilogueFn<T> = unsafe fn(&Epilogue<T>);

/// Everything compiled for one instruction set and accumulator.
pub(super) struct GemmKernels<T: 'static> {
    /// Lanes of a register.
    pub lanes: usize,
    /// [`Vector::FREE_MASKS`].
    pub free_masks: bool,
    /// `tiles[rows - 1][vectors - 1]`.
    pub tiles: &'static [&'static [TileFn<T>]],
    /// The microkernels of few rows for columns of a storage type: one for each number of rows, as in `tiles`.
    pub stream: fn(DType) -> &'static [StreamFn<T>],
    /// The packing routine for operands of a storage type.
    pub pack: fn(DType) -> PackFn<T>,
    /// The same for values that are accumulators, whatever the operands' steps are.
    pub widen: fn(DType) -> PackFn<T>,
    /// The epilogue for a storage type.
    pub epilogue: fn(DType) -> EpilogueFn<T>,
    /// [`multiply`].
    pub multiply: unsafe fn(usize) -> usize,
}

impl<T> GemmKernels<T> {
    /// Vectors of columns that the widest tile holds.
    pub(super) fn vectors(&self) -> usize {
        self.tiles[0].len()
    }

    /// Reads a part of the target, of rows by columns from `row` and `column` on, into rows of `width` sums.
    ///
    /// # Safety
    /// It lies within the target, and `to` has room for rows of whole registers.
    pub(super) unsafe fn widen_target(
        &self,
        target: &Target,
        [row, column]: [usize; 2],
        [rows, columns]: [usize; 2],
        to: *mut T,
        width: usize,
    ) {
        // A matter of packing one wide panel.
        let task = PackTask {
            from: target.at(row, column).cast_const(),
            step_stride: target.row_stride,
            lane_stride: target.column_stride,
            depth: rows,
            elements: rows,
            count: columns,
            to,
            width,
            panel_stride: 0,
        };
        // SAFETY: the caller's promise, passed on.
        unsafe { (self.widen)(target.dtype)(&task) };
    }

    /// Rounds rows of sums, `from_row` apart, with the bias, to a part of the target: see [`Self::widen_target`].
    ///
    /// # Safety
    /// It lies within the target, whose bias is there, and `from` has the rows.
    pub(super) unsafe fn round_to_target(
        &self,
        problem: &Problem,
        [row, column]: [usize; 2],
        [rows, columns]: [usize; 2],
        from: *const T,
        from_row: isize,
    ) {
        let target = problem.target;
        let size = target.dtype.size();
        let (bias, bias_row, bias_column) = match problem.bias {
            Bias::None => (std::ptr::null(), 0, 0),
            Bias::Rows(bias) => (bias.wrapping_add(row * size), 1, 0),
            Bias::Columns(bias) => (bias.wrapping_add(column * size), 0, 1),
        };
        let epilogue = Epilogue {
            from,
            from_row,
            rows,
            columns,
            to: target.at(row, column),
            row_stride: target.row_stride,
            column_stride: target.column_stride,
            bias,
            bias_row,
            bias_column,
        };
        // SAFETY: the caller's promise, passed on.
        unsafe { (self.epilogue)(target.dtype)(&epilogue) };
    }
}

/// f32 and f64: the accumulators that kernels exist for.
pub(super) trait Compute: Real + Element<Acc = Self> {
    /// [`put`] for the type that the tile names.
    ///
    /// # Safety
    /// The conditions of [`put`].
    unsafe fn put<V: Vector<Scalar = Self>, const N: usize>(
        tile: &MicroTile<Self>,
        rows: impl Iterator<Item = [V; N]>,
    );
}

macro_rules! compute {
    ($type:ty, [$($dtype:ident $storage:ty),*]) => {
        impl Compute for $type {
            #[inline(always)]
            unsafe fn put<V: Vector<Scalar = Self>, const N: usize>(
                tile: &MicroTile<Self>,
                rows: impl Iterator<Item = [V; N]>,
            ) {
                // SAFETY: the caller's promise, passed on.
                unsafe {
                    match tile.dtype {
                        $(DType::$dtype => put::<V, $storage, N>(tile, rows),)*
                        _ => put::<V, Self, N>(tile, rows),
                    }
                }
            }
        }
    };
}
compute!(f32, [BF16 bf16, F16 f16]);
compute!(f64, []);
