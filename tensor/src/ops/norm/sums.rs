//! Sums of norms over a row, and over rows for the weight gradients.

use crate::numeric::lanes::sum_lanes;
use crate::{Element, Real};

/// Partial sums of a row: four AVX-512 registers of f32, the same on every machine.
const LANES: usize = 64;

/// Adds `dy h` and `dy` of R rows, with their means and reciprocal deviations, to the sums.
#[inline(always)]
pub(super) fn add_rows<T: Element, const R: usize>(
    dy: &[T],
    x: &[T],
    stats: [(T::Acc, T::Acc); R],
    dweight: &mut [T::Acc],
    dbias: &mut [T::Acc],
) {
    let width = dweight.len();
    let dy: [&[T]; R] = std::array::from_fn(|i| &dy[i * width..][..width]);
    let x: [&[T]; R] = std::array::from_fn(|i| &x[i * width..][..width]);
    // Whole registers first: the compiler computes 16 columns singly in a loop over all columns, which may end at any.
    let (dweights, dweight) = dweight.as_chunks_mut::<16>();
    let (dbiases, dbias) = dbias[..width].as_chunks_mut::<16>();
    for (chunk, (dw, db)) in dweights.iter_mut().zip(dbiases).enumerate() {
        let (mut along, mut total) = (*dw, *db);
        for (i, (m, r)) in stats.into_iter().enumerate() {
            let (dy, x) = (&dy[i][16 * chunk..][..16], &x[i][16 * chunk..][..16]);
            for l in 0..16 {
                let dy = dy[l].acc();
                along[l] += dy * ((x[l].acc() - m) * r);
                total[l] += dy;
            }
        }
        (*dw, *db) = (along, total);
    }
    let first = width - dweight.len();
    for (column, (dw, db)) in (first..).zip(dweight.iter_mut().zip(dbias)) {
        for (i, (m, r)) in stats.into_iter().enumerate() {
            let dy = dy[i][column].acc();
            *dw += dy * ((x[i][column].acc() - m) * r);
            *db += dy;
        }
    }
}

/// Sums of `dy w` and `dy w h` over a row.
#[inline(always)]
pub(super) fn row_means<T: Element>(
    dy: &[T],
    x: &[T],
    weight: &[T::Acc],
    m: T::Acc,
    r: T::Acc,
) -> (T::Acc, T::Acc) {
    let mut total = [T::Acc::ZERO; LANES];
    let mut along = [T::Acc::ZERO; LANES];
    let (dys, xs, ws) = (dy.chunks_exact(LANES), x.chunks_exact(LANES), weight.chunks_exact(LANES));
    let rest = dys.remainder().iter().zip(xs.remainder()).zip(ws.remainder());
    for ((dy, x), w) in dys.zip(xs).zip(ws) {
        for i in 0..LANES {
            let g = dy[i].acc() * w[i];
            total[i] += g;
            along[i] += g * ((x[i].acc() - m) * r);
        }
    }
    let sums = (fold(total), fold(along));
    if rest.len() == 0 {
        return sums;
    }
    // Separate lanes: arrays indexed by a variable are in memory, the others in registers.
    let mut total = [T::Acc::ZERO; LANES];
    let mut along = [T::Acc::ZERO; LANES];
    for (i, ((dy, x), &w)) in rest.enumerate() {
        total[i] = dy.acc() * w;
        along[i] = total[i] * ((x.acc() - m) * r);
    }
    (sums.0 + fold(total), sums.1 + fold(along))
}

/// Sum of `f` over a row.
#[inline(always)]
pub(super) fn sum<T: Element>(row: &[T], f: impl Fn(T) -> T::Acc) -> T::Acc {
    let mut lanes = [T::Acc::ZERO; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] += f(chunk[i]);
        }
    }
    let total = fold(lanes);
    if rest.is_empty() {
        return total;
    }
    // Separate lanes: arrays indexed by a variable are in memory, the others in registers.
    let mut lanes = [T::Acc::ZERO; LANES];
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = f(x);
    }
    total + fold(lanes)
}

/// Adds the first 16 to the second and the third to the fourth, then both, then halves.
#[inline(always)]
fn fold<A: Real>(mut lanes: [A; LANES]) -> A {
    let (fours, _) = lanes.as_chunks_mut::<4>();
    for i in 0..4 {
        let pairs =
            [A::add_fours(fours[i], fours[i + 4]), A::add_fours(fours[i + 8], fours[i + 12])];
        fours[i] = A::add_fours(pairs[0], pairs[1]);
    }
    let (sixteens, _) = lanes.as_chunks::<16>();
    sum_lanes(sixteens[0])
}
