//! A parameter as Adafactor sees it: a batch of matrices, with factors of their rows and columns.

use crate::ops::optim::adamw::CHUNK;
use crate::ops::optim::step::check_vectors;
use crate::{Error, Result, Tensor};

/// The last two dims of a tensor, as contiguous matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixBatch {
    /// Number of matrices.
    pub count: usize,
    /// Rows of each.
    pub rows: usize,
    /// Columns of each.
    pub columns: usize,
}

impl MatrixBatch {
    /// The matrices of a tensor of `dims`; one matrix of a single row if there are fewer than two dims.
    ///
    /// ```
    /// use ferrotron_tensor::ops::adafactor::MatrixBatch;
    /// assert_eq!(MatrixBatch::from_dims(&[5, 2, 3]), MatrixBatch { count: 5, rows: 2, columns: 3 });
    /// assert_eq!(MatrixBatch::from_dims(&[7]), MatrixBatch { count: 1, rows: 1, columns: 7 });
    /// ```
    pub fn from_dims(dims: &[usize]) -> MatrixBatch {
        match dims {
            [outer @ .., rows, columns] => {
                MatrixBatch { count: outer.iter().product(), rows: *rows, columns: *columns }
            }
            _ => MatrixBatch { count: 1, rows: 1, columns: dims.iter().product() },
        }
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.count * self.rows * self.columns
    }

    /// Errors unless the vectors match the number of elements, rows and columns.
    pub(super) fn check(&self, elements: &Tensor, rows: &Tensor, columns: &Tensor) -> Result<()> {
        check_vectors("adafactor", &[elements, rows, columns])?;
        let want = [self.numel(), self.count * self.rows, self.count * self.columns];
        let [elements, rows, columns] = [elements, rows, columns].map(Tensor::numel);
        if want == [elements, rows, columns] {
            return Ok(());
        }
        let message =
            format!("{self:?} for {elements} elements, {rows} rows and {columns} columns");
        Err(Error::shape("adafactor", message))
    }

    /// Number of rows with about [`CHUNK`] elements.
    pub(super) fn rows_per_task(&self) -> usize {
        (CHUNK / self.columns.max(1)).max(1)
    }
}

/// Factors of the gradient: the element in row i and column j is multiplied by `rows[i] * columns[j]`. Both are in
/// the accumulator type.
#[derive(Debug)]
pub struct RowColFactors {
    /// Shape of the parameter.
    pub shape: MatrixBatch,
    /// One factor per row of each matrix.
    pub rows: Tensor,
    /// One factor per column of each matrix.
    pub columns: Tensor,
}

/// Sums over a whole parameter, each an f64 tensor of one element.
#[derive(Debug)]
pub struct SquareSums {
    /// Sum of squares of the weights, for relative steps.
    pub weights: Option<Tensor>,
    /// Sum of squares of the update.
    pub update: Tensor,
    /// Number of elements of the parameter.
    pub numel: usize,
}
