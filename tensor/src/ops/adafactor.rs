//! The passes of Adafactor over one parameter: Shazeer and Stern, arXiv 1804.04235, algorithms 4 and 5.
//!
//! For the gradient g = grad_scale * gradient of a matrix, or of each of several matrices, with i its rows and j
//! its columns:
//!
//! ```text
//! R_i = mean_j g_ij^2, C_j = mean_i g_ij^2                         square_sums
//! u_ij = g_ij * r_i * c_j, and its RMS, by which it is clipped     update_sq_norm
//!     r = 1 / sqrt(R / mean(R)), c = 1 / sqrt(C), of running means
//! w = keep * w - step * u, or with a mean of updates               adafactor
//! ```
//!
//! What lies between these passes (means over the parts of other ranks, running means, clipping) is a handful
//! of numbers for each row and column, and the optimizer's business. A vector is a matrix of one row.
//!
//! Sums are accumulated in f64 and in an order that is given by the shape; updates are computed in
//! `Element::Acc`, each element for itself. Nothing depends on the number of threads.

use super::adamw::CHUNK;
use super::rows::for_rows;
use super::sq_norm::sq_norm_block;
use crate::disjoint::Disjoint;
use crate::simd::vectorized;
use crate::{Device, Element, Error, Real, Result};

/// Columns whose sums a task makes: of f32, four cache lines in each row.
const COLUMNS: usize = 64;
const LANES: usize = 16;

/// Matrices laid end to end, the last two dims of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrices {
    /// How many.
    pub count: usize,
    /// Rows of each.
    pub rows: usize,
    /// Columns of each.
    pub columns: usize,
}

impl Matrices {
    /// Those of a tensor of `dims`; one of a single row if there are fewer than two dims.
    ///
    /// ```
    /// use ferrotron_tensor::ops::adafactor::Matrices;
    /// assert_eq!(Matrices::of(&[5, 2, 3]), Matrices { count: 5, rows: 2, columns: 3 });
    /// assert_eq!(Matrices::of(&[7]), Matrices { count: 1, rows: 1, columns: 7 });
    /// ```
    pub fn of(dims: &[usize]) -> Matrices {
        match dims {
            [outer @ .., rows, columns] => {
                Matrices { count: outer.iter().product(), rows: *rows, columns: *columns }
            }
            _ => Matrices { count: 1, rows: 1, columns: dims.iter().product() },
        }
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.count * self.rows * self.columns
    }

    /// Errors unless the slices have as many elements, rows and columns.
    fn check(&self, elements: usize, rows: usize, columns: usize) -> Result<()> {
        let want = (self.numel(), self.count * self.rows, self.count * self.columns);
        if want == (elements, rows, columns) {
            return Ok(());
        }
        let message =
            format!("{self:?} for {elements} elements, {rows} rows and {columns} columns");
        Err(Error::shape("adafactor", message))
    }

    /// Rows that are about [`CHUNK`] elements.
    fn rows_per_task(&self) -> usize {
        (CHUNK / self.columns.max(1)).max(1)
    }
}

/// What multiplies the gradient's element in row i and column j: `rows[i] * columns[j]`.
#[derive(Debug, Clone, Copy)]
pub struct Factors<'a, A> {
    /// For each row of each matrix.
    pub rows: &'a [A],
    /// For each column of each matrix.
    pub columns: &'a [A],
}

/// The numbers of one step of one parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adafactor {
    /// What the gradients are multiplied with: clip coefficient x inverse loss scale.
    pub grad_scale: f64,
    /// What the weights are multiplied with: 1 less their decay.
    pub keep: f64,
    /// What the update is multiplied with: learning rate over what clips the update.
    pub step: f64,
    /// Decay of the mean of updates, where there is one.
    pub beta1: f64,
}

/// The sums of the squares of `grads` along every row and every column.
///
/// ```
/// use ferrotron_tensor::{Device, ops::adafactor::{Matrices, square_sums}};
/// let (mut rows, mut columns) = ([0.0; 2], [0.0; 3]);
/// let grads = [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0];
/// square_sums(&Device::cpu(1)?, &Matrices::of(&[2, 3]), &grads, &mut rows, &mut columns)?;
/// assert_eq!((rows, columns), ([14.0, 77.0], [17.0, 29.0, 45.0]));
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// Errors if the lengths do not fit `shape`.
pub fn square_sums<G: Element>(
    device: &Device,
    shape: &Matrices,
    grads: &[G],
    rows: &mut [f64],
    columns: &mut [f64],
) -> Result<()> {
    shape.check(grads.len(), rows.len(), columns.len())?;
    let width = shape.columns;
    for_rows(device, (rows, 1), grads.len(), |first, rows| {
        for (i, sum) in rows.iter_mut().enumerate() {
            *sum = sq_norm_block(&grads[(first + i) * width..][..width]);
        }
    });
    let (matrix, blocks) = (shape.rows * width, width.div_ceil(COLUMNS));
    let sums = Disjoint::new(columns);
    device.for_each(shape.count * blocks, grads.len(), |task| {
        let (index, start) = (task / blocks, task % blocks * COLUMNS);
        let len = COLUMNS.min(width - start);
        // SAFETY: tasks take consecutive blocks of columns.
        let sums = unsafe { sums.part(index * width + start, len) };
        column_block(&grads[index * matrix..][..matrix], width, start, sums);
    });
    Ok(())
}

/// The sum of the squares of the update, before it is clipped.
///
/// Errors if the lengths do not fit `shape`.
pub fn update_sq_norm<G: Element>(
    device: &Device,
    shape: &Matrices,
    grads: &[G],
    grad_scale: f64,
    factors: Factors<G::Acc>,
) -> Result<f64> {
    shape.check(grads.len(), factors.rows.len(), factors.columns.len())?;
    let width = shape.columns;
    let mut sums = vec![0.0; factors.rows.len()];
    for_rows(device, (&mut sums, 1), grads.len(), |first, sums| {
        for (i, sum) in sums.iter_mut().enumerate() {
            let row = first + i;
            let columns = &factors.columns[row / shape.rows * width..][..width];
            let scale = factors.rows[row].f64() * grad_scale;
            *sum = scale * scale * weighted_sq_norm(&grads[row * width..][..width], columns);
        }
    });
    Ok(sums.iter().sum())
}

/// Steps `weights` along the update; where `mean` is not empty, along its running mean, which comes into it
/// multiplied with the step already (as in Hugging Face's Adafactor).
///
/// ```
/// use ferrotron_tensor::{Device, ops::adafactor::{Adafactor, Factors, Matrices, adafactor}};
/// let config = Adafactor { grad_scale: 0.5, keep: 1.0, step: 0.1, beta1: 0.0 };
/// let factors = Factors { rows: &[1.0, 2.0], columns: &[3.0] };
/// let mut weights = [1.0_f64, 1.0];
/// adafactor(&Device::cpu(1)?, &config, &Matrices::of(&[2, 1]), &mut weights, &[2.0_f64, 1.0], factors, &mut [])?;
/// assert!((weights[0] - 0.7).abs() < 1e-15 && (weights[1] - 0.7).abs() < 1e-15);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// Errors if the lengths do not fit `shape`.
pub fn adafactor<T: Element, G: Element<Acc = T::Acc>>(
    device: &Device,
    config: &Adafactor,
    shape: &Matrices,
    weights: &mut [T],
    grads: &[G],
    factors: Factors<T::Acc>,
    mean: &mut [T::Acc],
) -> Result<()> {
    shape.check(grads.len(), factors.rows.len(), factors.columns.len())?;
    shape.check(weights.len(), factors.rows.len(), factors.columns.len())?;
    let has_mean = !mean.is_empty();
    if has_mean && mean.len() != weights.len() {
        let message = format!("{} weights, a mean of {}", weights.len(), mean.len());
        return Err(Error::shape("adafactor", message));
    }
    let a = T::Acc::of;
    let (keep, beta1, one_minus_beta1) = (a(config.keep), a(config.beta1), a(1.0 - config.beta1));
    let scale = config.step * config.grad_scale;
    let (width, rows, step) = (shape.columns, shape.count * shape.rows, shape.rows_per_task());
    let (weights, mean) = (Disjoint::new(weights), Disjoint::new(mean));
    device.for_each(rows.div_ceil(step), shape.numel(), |task| {
        for row in task * step..rows.min((task + 1) * step) {
            let start = row * width;
            // SAFETY: every row belongs to one task.
            let w = unsafe { weights.part(start, width) };
            let g = &grads[start..start + width];
            let columns = &factors.columns[row / shape.rows * width..][..width];
            let factor = a(factors.rows[row].f64() * scale);
            if has_mean {
                // SAFETY: as above.
                let mean = unsafe { mean.part(start, width) };
                step_row_of_means(w, g, columns, mean, factor, keep, beta1, one_minus_beta1);
            } else {
                step_row(w, g, columns, factor, keep);
            }
        }
    });
    Ok(())
}

vectorized! {
    fn column_block<G: Element>(matrix: &[G], width: usize, start: usize, sums: &mut [f64]) {
        sums.fill(0.0);
        for row in matrix.chunks_exact(width) {
            for (sum, x) in sums.iter_mut().zip(&row[start..]) {
                let x = x.acc().f64();
                *sum += x * x;
            }
        }
    }

    fn weighted_sq_norm<G: Element>(grads: &[G], columns: &[G::Acc]) -> f64 {
        let mut lanes = [0.0_f64; LANES];
        for (grads, columns) in grads.chunks(LANES).zip(columns.chunks(LANES)) {
            for ((lane, g), c) in lanes.iter_mut().zip(grads).zip(columns) {
                let u = g.acc().f64() * c.f64();
                *lane += u * u;
            }
        }
        lanes.into_iter().sum()
    }

    fn step_row<T: Element, G: Element<Acc = T::Acc>>(
        weights: &mut [T],
        grads: &[G],
        columns: &[T::Acc],
        factor: T::Acc,
        keep: T::Acc,
    ) {
        for ((w, g), &c) in weights.iter_mut().zip(grads).zip(columns) {
            *w = T::from_acc(w.acc() * keep - g.acc() * c * factor);
        }
    }

    fn step_row_of_means<T: Element, G: Element<Acc = T::Acc>>(
        weights: &mut [T],
        grads: &[G],
        columns: &[T::Acc],
        mean: &mut [T::Acc],
        factor: T::Acc,
        keep: T::Acc,
        beta1: T::Acc,
        one_minus_beta1: T::Acc,
    ) {
        for (((w, g), &c), mean) in weights.iter_mut().zip(grads).zip(columns).zip(mean) {
            *mean = *mean * beta1 + g.acc() * c * factor * one_minus_beta1;
            *w = T::from_acc(w.acc() * keep - *mean);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bf16;
    use crate::ops::testing::{message, values};

    /// Shapes with several tasks each way, rests, and nothing.
    const SHAPES: [&[usize]; 7] =
        [&[300, 150], &[2, 70, 65], &[1, 40_000], &[40_000, 1], &[5], &[0, 3], &[3, 0]];

    #[test]
    fn sums_and_steps_equal_loops_on_any_number_of_threads() {
        for dims in SHAPES {
            let shape = Matrices::of(dims);
            let (n, width) = (shape.numel(), shape.columns);
            let (row_count, column_count) = (shape.count * shape.rows, shape.count * width);
            let row_of = |i: usize| i / width;
            let column_of = |i: usize| i / (shape.rows * width) * width + i % width;
            let grads = values(n, 1); // multiples of 1/64: their squares are summed exactly
            let (mut rows, mut columns) = (vec![0.0; row_count], vec![0.0; column_count]);
            for (i, g) in grads.iter().enumerate() {
                rows[row_of(i)] += g * g;
                columns[column_of(i)] += g * g;
            }
            let factor = |k: usize| 1.0 + (k % 7) as f64 / 8.0;
            let row_factors: Vec<f64> = (0..row_count).map(factor).collect();
            let column_factors: Vec<f64> = (0..column_count).map(|k| factor(k + 3)).collect();
            let factors = Factors { rows: &row_factors, columns: &column_factors };
            let update =
                |i: usize| 0.5 * grads[i] * factors.rows[row_of(i)] * factors.columns[column_of(i)];
            let norm: f64 = (0..n).map(|i| update(i) * update(i)).sum();
            let config = Adafactor { grad_scale: 0.5, keep: 0.75, step: 0.25, beta1: 0.5 };
            for threads in [1, 2, 3] {
                let device = Device::cpu(threads).unwrap();
                let (mut r, mut c) = (vec![7.0; row_count], vec![7.0; column_count]);
                square_sums(&device, &shape, &grads, &mut r, &mut c).unwrap();
                assert!(r == rows && c == columns, "{dims:?} on {threads} threads");
                let found = update_sq_norm(&device, &shape, &grads, 0.5, factors).unwrap();
                assert!((found - norm).abs() <= n as f64 * f64::EPSILON * norm, "{found} {norm}");
                let (mut w, mut means) = (vec![2.0; n], vec![1.0; n]);
                adafactor(&device, &config, &shape, &mut w, &grads, factors, &mut []).unwrap();
                for (i, w) in w.iter_mut().enumerate() {
                    let want = 0.75 * 2.0 - 0.25 * update(i);
                    assert!((*w - want).abs() <= 8.0 * f64::EPSILON, "{dims:?}[{i}]: {w}, {want}");
                    *w = 2.0;
                }
                adafactor(&device, &config, &shape, &mut w, &grads, factors, &mut means).unwrap();
                for (i, (w, mean)) in w.iter().zip(means).enumerate() {
                    let want = 0.5 + 0.5 * 0.25 * update(i);
                    assert!((mean - want).abs() <= 8.0 * f64::EPSILON, "{dims:?}[{i}]: {mean}");
                    assert_eq!(*w, 0.75 * 2.0 - mean, "{dims:?}[{i}]");
                }
            }
        }
    }

    #[test]
    fn sixteen_bit_numbers_are_widened() {
        let (device, shape) = (Device::cpu(2).unwrap(), Matrices::of(&[200, 130]));
        let grads: Vec<f32> = values(shape.numel(), 1).iter().map(|&x| x as f32).collect();
        let halves: Vec<bf16> = grads.iter().map(|&g| bf16::from_f32(g)).collect(); // exact
        let (mut rows, mut columns) = (vec![0.0; 200], vec![0.0; 130]);
        let (mut rows16, mut columns16) = (rows.clone(), columns.clone());
        square_sums(&device, &shape, &grads, &mut rows, &mut columns).unwrap();
        square_sums(&device, &shape, &halves, &mut rows16, &mut columns16).unwrap();
        assert!(rows == rows16 && columns == columns16);
        let factors = Factors { rows: &[0.5_f32; 200], columns: &[0.25; 130] };
        let config = Adafactor { grad_scale: 1.0, keep: 0.9, step: 0.1, beta1: 0.0 };
        let (mut w, mut w16) = (vec![1.0_f32; shape.numel()], vec![bf16::ONE; shape.numel()]);
        adafactor(&device, &config, &shape, &mut w, &grads, factors, &mut []).unwrap();
        adafactor(&device, &config, &shape, &mut w16, &halves, factors, &mut []).unwrap();
        assert!(w.iter().zip(&w16).all(|(&w, &w16)| bf16::from_f32(w) == w16));
    }

    #[test]
    fn errors_name_the_values() {
        let device = Device::cpu(1).unwrap();
        let sums = square_sums(&device, &Matrices::of(&[2, 3]), &[0.0; 6], &mut [0.0; 3], &mut []);
        assert_eq!(
            message(sums),
            "adafactor: Matrices { count: 1, rows: 2, columns: 3 } for 6 elements, 3 rows and 0 columns"
        );
        let config = Adafactor { grad_scale: 1.0, keep: 1.0, step: 1.0, beta1: 0.0 };
        let factors = Factors { rows: &[1.0; 2], columns: &[1.0; 3] };
        let (mut w, g) = ([0.0; 6], [0.0; 6]);
        let shape = Matrices::of(&[2, 3]);
        let step = adafactor(&device, &config, &shape, &mut w, &g, factors, &mut [0.0; 5]);
        assert_eq!(message(step), "adafactor: 6 weights, a mean of 5");
    }
}
