//! Launches the passes of Adafactor.

use ferrotron_cuda::arguments;

use super::step::{Types, check_accumulators, types};
use super::{kernel, sq_norm};
use crate::ops::optim::adafactor::matrix::{MatrixBatch, RowColFactors, SquareSums};
use crate::ops::optim::config::{Adafactor, NormalizeBy, SecondMomentDecay};
use crate::{DType, Result, Tensor};

/// Columns of a block, and the number of threads that share the rows of each column.
const COLUMNS: usize = 32;
const DEALT: usize = 16;

/// Sums of squares over each row and each column.
pub(crate) fn square_sums(
    shape: &MatrixBatch,
    grads: &Tensor,
    rows: &mut Tensor,
    columns: &mut Tensor,
) -> Result<()> {
    let (device, dtype) = (grads.device(), grads.dtype());
    let (count, width) = (shape.count * shape.rows, shape.columns);
    check_accumulators("adafactor", DType::F64, &[rows, columns])?;
    kernel(device, "adafactor", dtype, "adafactor_row_sums")?
        .input(grads)
        .output(rows)
        .value(count as u64)
        .value(width as u64)
        .run_rows(count, width)?;
    let blocks = width.div_ceil(COLUMNS);
    kernel(device, "adafactor", dtype, "adafactor_column_sums")?
        .input(grads)
        .output(columns)
        .value(shape.rows as u64)
        .value(width as u64)
        .value(blocks as u64)
        .run([shape.count * blocks, 1, 1], [COLUMNS, DEALT, 1])
}

/// Updates the means with sums of the squares of `count` gradients each.
pub(crate) fn update_means(
    decay: &SecondMomentDecay,
    step: &Tensor,
    means: &mut Tensor,
    sums: &Tensor,
    count: usize,
) -> Result<()> {
    check_accumulators("adafactor", DType::F64, &[sums])?;
    let (device, dtype, n) = (sums.device(), means.dtype(), means.numel());
    kernel(device, "adafactor", dtype, "adafactor_means")?
        .input(step)
        .output(means)
        .input(sums)
        .value(n as u64)
        .value(count as u64)
        .value(decay.rate)
        .value(decay.eps1)
        .run_elements(n)
}

/// Updates the elementwise means with the squares of the gradients.
pub(crate) fn update_mean_squares(
    decay: &SecondMomentDecay,
    step: &Tensor,
    means: &mut Tensor,
    grads: &Tensor,
) -> Result<()> {
    check_accumulators("adafactor", grads.dtype(), &[means])?;
    let n = means.numel();
    kernel(grads.device(), "adafactor", grads.dtype(), "adafactor_mean_squares")?
        .input(step)
        .output(means)
        .input(grads)
        .value(n as u64)
        .value(decay.rate)
        .value(decay.eps1)
        .run_elements(n)
}

/// The factors that multiply rows and columns.
pub(crate) fn matrix_factors(
    shape: &MatrixBatch,
    rows: &Tensor,
    columns: &Tensor,
    mean_of: NormalizeBy,
) -> Result<RowColFactors> {
    let mut scaled = Tensor::empty(rows.device(), rows.dtype(), rows.dims())?;
    let (others, count) = match mean_of {
        NormalizeBy::Rows => (rows, shape.rows),
        NormalizeBy::Columns => (columns, shape.columns),
    };
    kernel(rows.device(), "adafactor", rows.dtype(), "adafactor_row_factors")?
        .input(rows)
        .input(others)
        .output(&mut scaled)
        .value(shape.count as u64)
        .value(shape.rows as u64)
        .value(count as u64)
        .run_rows(shape.count, shape.rows.max(count))?;
    Ok(RowColFactors { shape: *shape, rows: scaled, columns: inverse_roots(columns)? })
}

/// 1 / sqrt(x).
pub(crate) fn inverse_roots(x: &Tensor) -> Result<Tensor> {
    let (mut y, n) = (Tensor::empty(x.device(), x.dtype(), x.dims())?, x.numel());
    kernel(x.device(), "adafactor", x.dtype(), "adafactor_inverse_roots")?
        .input(x)
        .output(&mut y)
        .value(n as u64)
        .run_elements(n)?;
    Ok(y)
}

/// The sum of squares of the unclipped update.
pub(crate) fn update_sq_norm(
    step: &Tensor,
    grads: &Tensor,
    factors: &RowColFactors,
) -> Result<Tensor> {
    let RowColFactors { shape, rows, columns } = factors;
    check_accumulators("adafactor", grads.dtype(), &[rows, columns])?;
    let (device, count) = (grads.device(), shape.count * shape.rows);
    let mut sums = Tensor::empty(device, DType::F64, &[count])?;
    kernel(device, "adafactor", grads.dtype(), "adafactor_update_sums")?
        .input(step)
        .input(grads)
        .input(rows)
        .input(columns)
        .output(&mut sums)
        .value(count as u64)
        .value(shape.rows as u64)
        .value(shape.columns as u64)
        .run_rows(count, shape.columns)?;
    let mut total = Tensor::zeros(device, DType::F64, &[1])?;
    sq_norm::add_up(&mut total, &sums)?;
    Ok(total)
}

/// Updates the weights.
pub(crate) fn adafactor(
    config: &Adafactor,
    step: &Tensor,
    weights: &mut Tensor,
    grads: &Tensor,
    factors: &RowColFactors,
    sums: &SquareSums,
    mean: Option<&mut Tensor>,
) -> Result<()> {
    let (element, found) = types("adafactor", weights, grads, None)?;
    let RowColFactors { shape, rows, columns } = factors;
    check_accumulators("adafactor", element, &[rows, columns])?;
    if let Some(mean) = &mean {
        check_accumulators("adafactor", element, &[mean])?;
    }
    let name = match found {
        Types::Same => "adafactor",
        Types::Wide => "adafactor_wide",
        Types::Master | Types::MasterWide => "adafactor_master",
    };
    let Adafactor { eps2, clip_threshold, beta1, weight_decay } = *config;
    let numel = sums.numel as u64;
    let constants = arguments::Adafactor { eps2, clip_threshold, beta1, weight_decay, numel };
    let (count, width) = (shape.count * shape.rows, shape.columns);
    let launch = kernel(grads.device(), "adafactor", element, name)?
        .input(step)
        .output(weights)
        .input(grads)
        .input(rows)
        .input(columns);
    let launch = match mean {
        Some(mean) => launch.output(mean),
        None => launch.optional(None),
    };
    launch
        .optional(sums.weights.as_ref())
        .input(&sums.update)
        .value(count as u64)
        .value(shape.rows as u64)
        .value(width as u64)
        .value(constants)
        .run_rows(count, width)
}
