//! Sums of squares over rows and columns in one pass over the gradients.
//!
//! Matrices are cut into tiles by their shape alone. A task sums one tile, whose sums of columns stay in the cache; then the
//! parts of each row and column are added in order.

use crate::numeric::disjoint::Disjoint;
use crate::numeric::prefetch;
use crate::numeric::simd::vectorized;
use crate::ops::optim::adafactor::MatrixBatch;
use crate::ops::rows::for_rows;
use crate::{Device, Element, Real};

/// Rows and columns of a tile, at most. The sums of the columns take 16 KiB, half of the nearest cache. Rows that fit are
/// read from end to end, at more than twice the speed of rows in parts, since processors fetch ahead along memory.
const TILE: [usize; 2] = [128, 2048];

const LANES: usize = 16;

/// Rows whose squares are summed together.
const TOGETHER: usize = 4;

pub(super) fn sum_squares<G: Element>(
    device: &Device,
    shape: &MatrixBatch,
    grads: &[G],
    rows: &mut [f64],
    columns: &mut [f64],
) {
    let MatrixBatch { count, rows: height, columns: width } = *shape;
    if device.is_fake() {
        return; // the parts would take memory that grows with the model
    }
    if grads.is_empty() {
        rows.fill(0.0);
        return columns.fill(0.0);
    }
    let [down, across] = [height.div_ceil(TILE[0]), width.div_ceil(TILE[1])];
    let (tile_rows, tile_columns) = (height.div_ceil(down), width.div_ceil(across));
    let mut of_rows = vec![0.0; count * across * height];
    let mut of_columns = vec![0.0; count * down * width];
    let (row_parts, column_parts) = (Disjoint::new(&mut of_rows), Disjoint::new(&mut of_columns));
    device.for_each(count * down * across, grads.len(), &|task| {
        let (matrix, i, j) = (task / across / down, task / across % down, task % across);
        let (first, start) = (i * tile_rows, j * tile_columns);
        let [n_rows, n_columns] = [tile_rows.min(height - first), tile_columns.min(width - start)];
        // SAFETY: every tile has its own parts.
        let (rows, columns) = unsafe {
            (
                row_parts.part((matrix * across + j) * height + first, n_rows),
                column_parts.part((matrix * down + i) * width + start, n_columns),
            )
        };
        add_squares(&grads[(matrix * height + first) * width + start..], width, rows, columns);
    });
    add_parts(device, rows, &of_rows, height);
    add_parts(device, columns, &of_columns, width);
}

/// Adds the parts of each vector of `len` elements: as many for each as there are elements in `parts` for one in `sums`.
fn add_parts(device: &Device, sums: &mut [f64], parts: &[f64], len: usize) {
    let count = parts.len() / sums.len();
    for_rows(device, (sums, len), parts.len() / 8, |first, sums| {
        for (i, sums) in sums.chunks_exact_mut(len).enumerate() {
            let mut parts = parts[(first + i) * count * len..][..count * len].chunks_exact(len);
            sums.copy_from_slice(parts.next().expect("a part at least"));
            for part in parts {
                sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
            }
        }
    });
}

#[inline(always)]
fn add_square<G: Element>(lane: &mut f64, column: &mut f64, x: G) {
    let square = x.acc().f64() * x.acc().f64();
    *lane += square;
    *column += square;
}

#[inline(always)]
fn add_weighted<G: Element>(lanes: &mut [f64; LANES], grads: &[G], columns: &[G::Acc]) {
    for (grads, columns) in grads.chunks(LANES).zip(columns.chunks(LANES)) {
        for ((lane, g), &c) in lanes.iter_mut().zip(grads).zip(columns) {
            let u = g.acc().f64() * c.f64();
            *lane = u.mul_add(u, *lane);
        }
    }
}

vectorized! {
    /// Sums the squares of a tile whose rows are `width` elements apart. [`TOGETHER`] rows at a time load and store the sums
    /// of columns once; each column still adds its rows in order.
    fn add_squares<G: Element>(grads: &[G], width: usize, rows: &mut [f64], columns: &mut [f64]) {
        let whole = columns.len() / LANES * LANES;
        for (grads, sums) in grads.chunks(TOGETHER * width).zip(rows.chunks_mut(TOGETHER)) {
            let mut lanes = [[0.0_f64; LANES]; TOGETHER];
            let row = |at: usize| &grads[at * width..][..columns.len()];
            if sums.len() == TOGETHER {
                let together: [&[G]; TOGETHER] = std::array::from_fn(row);
                for start in (0..whole).step_by(LANES) {
                    let mut column = [0.0_f64; LANES];
                    column.copy_from_slice(&columns[start..start + LANES]);
                    for (row, lanes) in together.iter().zip(&mut lanes) {
                        let row = &row[start..start + LANES];
                        for ((lane, column), x) in lanes.iter_mut().zip(&mut column).zip(row) {
                            add_square(lane, column, *x);
                        }
                    }
                    columns[start..start + LANES].copy_from_slice(&column);
                }
            }
            let first = if sums.len() == TOGETHER { whole } else { 0 };
            for ((at, sum), lanes) in sums.iter_mut().enumerate().zip(&mut lanes) {
                let row = &grads[at * width..][first..columns.len()];
                for (row, columns) in row.chunks(LANES).zip(columns[first..].chunks_mut(LANES)) {
                    for ((lane, column), x) in lanes.iter_mut().zip(columns).zip(row) {
                        add_square(lane, column, *x);
                    }
                }
                *sum = lanes.iter().sum();
            }
        }
    }

    /// The sum of squares of gradients times the factors of their columns.
    pub(super) fn weighted_sq_norm<G: Element>(grads: &[G], columns: &[G::Acc]) -> f64 {
        let mut lanes = [0.0_f64; LANES];
        let (blocks, rest) = grads.as_chunks::<{ 2 * LANES }>();
        let (factors, last) = columns.as_chunks::<{ 2 * LANES }>();
        for (grads, columns) in blocks.iter().zip(factors) {
            prefetch::fetch_ahead(grads);
            add_weighted(&mut lanes, grads, columns);
        }
        add_weighted(&mut lanes, rest, last);
        lanes.into_iter().sum()
    }
}
