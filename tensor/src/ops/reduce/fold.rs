//! The passes of a reduction: over the elements of each block, then over the values of the blocks.

use super::view::ReduceView;
use crate::kernel_span::kernel_span;
use crate::numeric::simd::vectorized;
use crate::ops::rows::{CHEAP, for_rows};
use crate::{Element, Real, Result, Scalar, Tensor};

const LANES: usize = 32;
const ROW_BLOCK: usize = 4096;
/// 768 rows, a batch of the character model, make an even number: each of two threads sums its own tokens.
const COLUMN_BLOCK: usize = 128;

/// A reduction: `step` adds an element to an accumulator, `join` combines two accumulators.
pub(super) trait Fold {
    const START: f64;
    const PER_NANOSECOND: usize = CHEAP;
    fn step<A: Real>(acc: A, x: A, shift: A) -> A;
    fn join<A: Real>(acc: A, other: A) -> A;
}

pub(super) struct Sum;
impl Fold for Sum {
    const START: f64 = 0.0;
    #[inline(always)]
    fn step<A: Real>(acc: A, x: A, _: A) -> A {
        acc + x
    }
    #[inline(always)]
    fn join<A: Real>(acc: A, other: A) -> A {
        acc + other
    }
}

pub(super) struct Max;
impl Fold for Max {
    const START: f64 = f64::NEG_INFINITY;
    #[inline(always)]
    #[allow(clippy::eq_op)]
    fn step<A: Real>(acc: A, x: A, _: A) -> A {
        if x > acc || x != x { x } else { acc }
    }
    #[inline(always)]
    fn join<A: Real>(acc: A, other: A) -> A {
        Self::step(acc, other, other)
    }
}

/// Sum of e^(x - shift).
pub(super) struct SumExp;
impl Fold for SumExp {
    const START: f64 = 0.0;
    const PER_NANOSECOND: usize = 1;
    #[inline(always)]
    fn step<A: Real>(acc: A, x: A, shift: A) -> A {
        acc + (x - shift).exp()
    }
    #[inline(always)]
    fn join<A: Real>(acc: A, other: A) -> A {
        acc + other
    }
}

vectorized! {
    /// Reduces consecutive elements to one value.
    pub(super) fn fold_row<F: Fold, T: Element>(x: &[T], shift: T::Acc) -> T::Acc {
        if x.len() < LANES {
            return x.iter().fold(T::Acc::from_f64(F::START), |acc, x| F::step(acc, x.acc(), shift));
        }
        let mut lanes = [T::Acc::from_f64(F::START); LANES];
        let chunks = x.chunks_exact(LANES);
        let rest = chunks.remainder();
        for chunk in chunks {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                *lane = F::step(*lane, x.acc(), shift);
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            *lane = F::step(*lane, x.acc(), shift);
        }
        lanes.into_iter().fold(T::Acc::from_f64(F::START), F::join)
    }

    /// Reduces each column of consecutive rows to one value.
    fn fold_columns<F: Fold, T: Element>(x: &[T], out: &mut [T::Acc]) {
        let width = out.len();
        let zero = T::Acc::ZERO;
        out.fill(T::Acc::from_f64(F::START));
        let fours = x.chunks_exact(4 * width);
        let rest = fours.remainder();
        for four in fours {
            let (a, b) = four.split_at(2 * width);
            let ((a, b), (c, d)) = (a.split_at(width), b.split_at(width));
            for ((((out, a), b), c), d) in out.iter_mut().zip(a).zip(b).zip(c).zip(d) {
                let ab = F::step(F::step(*out, a.acc(), zero), b.acc(), zero);
                *out = F::step(F::step(ab, c.acc(), zero), d.acc(), zero);
            }
        }
        for row in rest.chunks_exact(width) {
            for (out, x) in out.iter_mut().zip(row) {
                *out = F::step(*out, x.acc(), zero);
            }
        }
    }

    /// Joins the values of blocks, rows of `width`, for the columns from `column` on: in f64, in order. Divides them by `n`.
    fn join_columns<F: Fold, T: Element>(values: &[T::Acc], width: usize, column: usize, n: T::Acc, out: &mut [T]) {
        for (i, out) in out.chunks_mut(LANES).enumerate() {
            let columns = column + i * LANES..column + i * LANES + out.len();
            let mut lanes = [F::START; LANES];
            for row in values.chunks_exact(width) {
                for (lane, x) in lanes.iter_mut().zip(&row[columns.clone()]) {
                    *lane = F::join(*lane, x.f64());
                }
            }
            for (y, lane) in out.iter_mut().zip(lanes) {
                *y = T::from_acc(T::Acc::from_f64(lane) / n);
            }
        }
    }
}

/// The reduced values, divided by `n`, in dtype D with the given dims. `shift` has one value per row.
pub(super) fn reduce<F: Fold, T: Element, D: Element<Acc = T::Acc>>(
    view: &ReduceView,
    shift: Option<&[T::Acc]>,
    dims: &[usize],
    n: T::Acc,
) -> Result<Tensor> {
    let block = if view.inner == 1 { ROW_BLOCK } else { COLUMN_BLOCK };
    let blocks = view.reduced.div_ceil(block).max(1);
    let sizes = [view.outer, blocks, view.inner];
    let mut parts = Tensor::empty(view.x.device(), T::Acc::DTYPE, &sizes)?;
    let _span = kernel_span!("reduce", view.x.dtype(), 0, [&view.x] => [&parts]);
    fold::<F, T>(view, shift, block, &mut parts)?;
    join::<F, D>(parts, dims, n)
}

/// Fills `parts` (outer, blocks, inner) with the reduced values of each block in the accumulator dtype.
fn fold<F: Fold, T: Element>(
    view: &ReduceView,
    shift: Option<&[T::Acc]>,
    block: usize,
    parts: &mut Tensor,
) -> Result<()> {
    let ReduceView { x, reduced, inner, .. } = view;
    let (reduced, inner, blocks) = (*reduced, *inner, parts.dims()[1]);
    let elements = x.as_slice::<T>()?;
    let out = parts.as_mut_slice::<T::Acc>()?;
    let work = elements.len() / F::PER_NANOSECOND;
    for_rows(x.device(), (out, inner), work, |first, rows| {
        for (i, row) in rows.chunks_exact_mut(inner).enumerate() {
            let (at, block_at) = ((first + i) / blocks, (first + i) % blocks * block);
            let end = reduced.min(block_at + block);
            let x = &elements[(at * reduced + block_at) * inner..(at * reduced + end) * inner];
            match row {
                [one] => {
                    let shift = shift.map_or(T::Acc::ZERO, |shift| shift[at]);
                    *one = fold_row::<F, T>(x, shift);
                }
                row => fold_columns::<F, T>(x, row),
            }
        }
    });
    Ok(())
}

/// Joins the values of the blocks, divides them by `n`, and returns them in dtype T with the given dims.
fn join<F: Fold, T: Element>(parts: Tensor, dims: &[usize], n: T::Acc) -> Result<Tensor> {
    let &[_, blocks, inner] = parts.dims() else { unreachable!("parts have three dims") };
    if blocks == 1 && T::DTYPE == T::Acc::DTYPE && n == T::Acc::ONE {
        return parts.reshape(dims);
    }
    let mut out = Tensor::empty(parts.device(), T::DTYPE, dims)?;
    let values = parts.as_slice::<T::Acc>()?;
    // The values of one block are a single row of columns.
    let inner = if blocks == 1 { values.len() } else { inner };
    for_rows(parts.device(), (out.as_mut_slice::<T>()?, 1), values.len() / CHEAP, |first, out| {
        let (mut first, mut rest) = (first, out);
        while !rest.is_empty() {
            let (at, column) = (first / inner, first % inner);
            let (out, later) = rest.split_at_mut(rest.len().min(inner - column));
            first += out.len();
            let values = &values[at * blocks * inner..][..blocks * inner];
            join_columns::<F, T>(values, inner, column, n, out);
            rest = later;
        }
    });
    Ok(out)
}
