//! Launches reductions of a contiguous (outer, reduced, inner) tensor: blocks along the reduced dim, then an ordered
//! reduction of their values. The block sizes depend on the shape only.

use super::kernel;
use crate::{DType, Result, Tensor};

/// Minimum elements of a row per thread group, and of a column per thread.
const ROW_BLOCK: usize = 4096;
const COLUMN_BLOCK: usize = 64;
/// Maximum number of blocks per result; one thread reduces their values.
const MOST_BLOCKS: usize = 512;
/// Threads of a block that processes columns or reduces block values.
const COLUMNS: usize = 128;
/// Maximum grid size along y.
const MOST_ROWS: usize = 65_535;

/// A contiguous tensor as (outer, reduced, inner); the middle dim is reduced.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    pub(crate) x: &'a Tensor,
    pub(crate) outer: usize,
    pub(crate) reduced: usize,
    pub(crate) inner: usize,
}

impl Operand<'_> {
    /// Elements of a block.
    fn block(&self) -> usize {
        let least = if self.inner == 1 { ROW_BLOCK } else { COLUMN_BLOCK };
        self.reduced.div_ceil(MOST_BLOCKS).max(1).next_multiple_of(least)
    }

    fn blocks(&self) -> usize {
        self.reduced.div_ceil(self.block())
    }

    fn results(&self) -> usize {
        self.outer * self.inner
    }

    /// The values of the blocks, (outer, blocks, inner), from the kernel for rows or for columns. `max` holds the
    /// maximum of each row for the kernel that needs it.
    fn fold(&self, [rows, columns]: [&'static str; 2], max: Option<&Tensor>) -> Result<Tensor> {
        let Operand { x, outer, reduced, inner } = *self;
        let (block, blocks) = (self.block(), self.blocks());
        let acc = x.dtype().accumulator();
        let mut partials = Tensor::empty(x.device(), acc, &[outer, blocks, inner])?;
        let name = if inner == 1 { rows } else { columns };
        let kernel = kernel(x.device(), "reduce", x.dtype(), name)?.input(x);
        let kernel = match max {
            Some(max) => kernel.input(max),
            None => kernel,
        };
        let kernel = kernel.output(&mut partials).value(outer as u64).value(reduced as u64);
        if inner == 1 {
            let kernel = kernel.value(blocks as u64).value(block as u64);
            kernel.run_rows(outer * blocks, block.min(reduced))?;
        } else {
            let grid = [inner.div_ceil(COLUMNS), (outer * blocks).min(MOST_ROWS), 1];
            kernel
                .value(inner as u64)
                .value(blocks as u64)
                .value(block as u64)
                .run(grid, [COLUMNS, 1, 1])?;
        }
        Ok(partials)
    }

    /// Writes the sums divided by `divisor` to `y`.
    pub(crate) fn sum(&self, divisor: f64, y: &mut Tensor) -> Result<()> {
        let partials = self.fold(["sum_rows", "sum_columns"], None)?;
        kernel(self.x.device(), "reduce", self.x.dtype(), "sum_finish")?
            .input(&partials)
            .output(y)
            .value(self.outer as u64)
            .value(self.inner as u64)
            .value(self.blocks() as u64)
            .value(divisor)
            .run([self.results().div_ceil(COLUMNS), 1, 1], [COLUMNS, 1, 1])
    }

    /// Writes the maxima to `y`, whose dtype is that of `x` or its accumulator type.
    pub(crate) fn max(&self, y: &mut Tensor) -> Result<()> {
        let partials = self.fold(["max_rows", "max_columns"], None)?;
        let kernel = kernel(self.x.device(), "reduce", self.x.dtype(), "max_finish")?;
        let kernel = kernel.input(&partials);
        let kernel = match y.dtype() == self.x.dtype() {
            true => kernel.output(y).optional(None),
            false => kernel.optional(None).output(y),
        };
        kernel
            .value(self.outer as u64)
            .value(self.inner as u64)
            .value(self.blocks() as u64)
            .run([self.results().div_ceil(COLUMNS), 1, 1], [COLUMNS, 1, 1])
    }

    /// Writes ln(sum(e^x)) of each row to `y`.
    pub(crate) fn log_sum_exp(&self, y: &mut Tensor) -> Result<()> {
        let acc = self.x.dtype().accumulator();
        let mut max = Tensor::empty(self.x.device(), acc, &[self.outer])?;
        self.max(&mut max)?;
        let partials = self.fold(["sum_exp_rows"; 2], Some(&max))?;
        kernel(self.x.device(), "reduce", self.x.dtype(), "log_sum_exp_finish")?
            .input(&partials)
            .input(&max)
            .output(y)
            .value(self.outer as u64)
            .value(self.blocks() as u64)
            .run([self.outer.div_ceil(COLUMNS), 1, 1], [COLUMNS, 1, 1])
    }

    /// Writes the index of the first maximum of each row to `y`.
    pub(crate) fn argmax(&self, y: &mut Tensor) -> Result<()> {
        debug_assert_eq!(y.dtype(), DType::I64);
        kernel(self.x.device(), "reduce", self.x.dtype(), "argmax_rows")?
            .input(self.x)
            .output(y)
            .value(self.outer as u64)
            .value(self.reduced as u64)
            .run_rows(self.outer, self.reduced)
    }
}
