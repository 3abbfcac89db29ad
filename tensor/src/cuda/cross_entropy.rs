//! Launches cross-entropy of rows of logits.

use ferrotron_cuda::arguments::CrossEntropy;

use super::kernel::{Kernel, kernel};
use crate::core::copy::into_unique;
use crate::ops::cross_entropy::config::CrossEntropyConfig;
use crate::ops::cross_entropy::shard::{VocabAllReduce, VocabShard, joined};
use crate::{DType, Result, Tensor};

/// Threads of a block with one row per thread.
const THREADS: usize = 256;

/// The targets of a call.
pub(crate) struct Targets {
    op: &'static str,
    /// Contiguous and one-dimensional.
    classes: Tensor,
    config: CrossEntropyConfig,
    shard: VocabShard,
}

impl Targets {
    /// Contiguous targets of any dims.
    pub(crate) fn new(
        op: &'static str,
        targets: &Tensor,
        shard: VocabShard,
        config: &CrossEntropyConfig,
    ) -> Result<Targets> {
        let classes = targets.reshape(&[targets.numel()])?;
        Ok(Targets { op, classes, config: *config, shard })
    }

    /// Computes lse and losses of contiguous `logits` (rows, classes) and writes them from row `first` on.
    pub(crate) fn forward(
        &self,
        logits: &Tensor,
        first: usize,
        join: Option<&dyn VocabAllReduce>,
        (lse, losses): (&mut Tensor, &mut Tensor),
    ) -> Result<()> {
        let rows = logits.dims()[0];
        lse.narrow_mut(0, first, rows, |lse| {
            losses.narrow_mut(0, first, rows, |losses| match join {
                None => self.whole(logits, first, lse, losses),
                Some(join) => self.shard(logits, first, join, lse, losses),
            })
        })
    }

    fn whole(
        &self,
        logits: &Tensor,
        first: usize,
        lse: &mut Tensor,
        losses: &mut Tensor,
    ) -> Result<()> {
        let (rows, width) = (logits.dims()[0], logits.dims()[1]);
        let launch = kernel(logits.device(), "cross_entropy", logits.dtype(), "cross_entropy")?;
        self.with_classes(launch.input(logits), first, rows)?
            .output(lse)
            .output(losses)
            .value(rows as u64)
            .value(width as u64)
            .bad_index(self.op)
            .run_rows(rows, width)
    }

    /// Reduces this shard's statistics with those of the other shards, maxima first.
    fn shard(
        &self,
        logits: &Tensor,
        first: usize,
        join: &dyn VocabAllReduce,
        lse: &mut Tensor,
        losses: &mut Tensor,
    ) -> Result<()> {
        let (rows, width) = (logits.dims()[0], logits.dims()[1]);
        let (device, dtype, acc) = (logits.device(), logits.dtype(), logits.dtype().accumulator());
        let terms = if self.config.label_smoothing == 0.0 { 2 } else { 3 };
        let mut own = Tensor::empty(device, acc, &[rows])?;
        let mut sums = Tensor::empty(device, acc, &[terms, rows])?;
        let launch = kernel(device, "cross_entropy", dtype, "cross_entropy_shard")?;
        self.with_classes(launch.input(logits), first, rows)?
            .output(&mut own)
            .output(&mut sums)
            .value(rows as u64)
            .value(width as u64)
            .bad_index(self.op)
            .run_rows(rows, width)?;
        let max = joined(join.max(own.copy()?)?, acc, &[rows])?;
        let (grid, block) = ([rows.div_ceil(THREADS), 1, 1], [THREADS, 1, 1]);
        kernel(device, "cross_entropy", dtype, "cross_entropy_rescale")?
            .output(&mut sums)
            .input(&own)
            .input(&max)
            .value(rows as u64)
            .run(grid, block)?;
        let sums = joined(join.sum(sums)?, acc, &[terms, rows])?;
        let launch = kernel(device, "cross_entropy", dtype, "cross_entropy_finish")?;
        self.with_classes(launch.input(&max).input(&sums), first, rows)?
            .output(lse)
            .output(losses)
            .value(rows as u64)
            .run(grid, block)
    }

    /// The gradient of `logits` (rows, classes), whose first row is row `first` of all. It overwrites `logits` if
    /// they have no other holder. `lse` covers these rows only.
    pub(crate) fn backward(
        &self,
        logits: Tensor,
        first: usize,
        lse: &Tensor,
        scale: &Tensor,
    ) -> Result<Tensor> {
        let mut dx = into_unique(logits)?;
        let (rows, width) = (dx.dims()[0], dx.dims()[1]);
        let device = dx.device().clone();
        let launch = kernel(&device, "cross_entropy", dx.dtype(), "cross_entropy_backward")?;
        self.with_classes(launch.updated(&mut dx), first, rows)?
            .input(&lse.contiguous()?)
            .input(scale)
            .value(rows as u64)
            .value(width as u64)
            .run_rows(rows, width)?;
        Ok(dx)
    }

    /// Adds the targets of `rows` rows from `first` on, and the loss options.
    fn with_classes<'a>(
        &self,
        launch: Kernel<'a>,
        first: usize,
        rows: usize,
    ) -> Result<Kernel<'a>> {
        let config = CrossEntropy {
            ignore_index: self.config.ignore_index,
            offset: self.shard.offset as i64,
            global: self.shard.global as i64,
            smoothing: self.config.label_smoothing,
            first: first as i64,
        };
        Ok(launch.indices(&self.classes.narrow(0, first, rows)?).value(config))
    }
}

/// The sum of the losses of all rows, in the accumulator type of `dtype`.
pub(crate) fn total(losses: &Tensor, dtype: DType) -> Result<Tensor> {
    let mut loss = Tensor::empty(losses.device(), dtype.accumulator(), &[])?;
    kernel(losses.device(), "cross_entropy", dtype, "cross_entropy_total")?
        .input(losses)
        .output(&mut loss)
        .value(losses.numel() as u64)
        .run([1; 3], [512, 1, 1])?;
    Ok(loss)
}
