//! The targets of a call on either device, with the losses and gradients of chunks of rows.

use super::config::CrossEntropyConfig;
use super::rows::HostTargets;
use super::shard::{VocabAllReduce, VocabShard};
use crate::core::tensor::check_device;
use crate::cuda;
use crate::kernel_span::kernel_span;
use crate::{DType, Element, Error, Result, Tensor, dispatch_float};

/// The targets of a call, in the form of the device.
pub(crate) enum Targets {
    Host(HostTargets),
    Gpu(cuda::cross_entropy::Targets),
}

impl Targets {
    /// Targets of the whole vocabulary for a shard of `classes`.
    ///
    /// Errors if a target is not below the vocabulary size; on a GPU the next synchronization reports it. Every shard
    /// returns the same error.
    pub(crate) fn new(
        op: &'static str,
        targets: &Tensor,
        classes: usize,
        shard: VocabShard,
        config: &CrossEntropyConfig,
    ) -> Result<Targets> {
        if !(0.0..=1.0).contains(&config.label_smoothing) {
            let message = format!("label smoothing is on [0, 1], got {}", config.label_smoothing);
            return Err(Error::value(op, message));
        }
        shard.check(op, classes)?;
        let targets = targets.contiguous()?;
        if targets.device().gpu().is_some() {
            return Ok(Targets::Gpu(cuda::cross_entropy::Targets::new(
                op, &targets, shard, config,
            )?));
        }
        Ok(Targets::Host(HostTargets::new(op, &targets, classes, shard, config)?))
    }

    /// Computes losses and lse of contiguous rows of `logits`, which start at row `first` of the targets. If the
    /// classes are sharded, they are reduced over the shards.
    pub(crate) fn forward(
        &self,
        logits: &Tensor,
        first: usize,
        join: Option<&dyn VocabAllReduce>,
        found: &mut RowLosses,
    ) -> Result<()> {
        let RowLosses { lse, losses, .. } = found;
        let _span = kernel_span!("cross_entropy", logits.dtype(), 0, [logits] => [lse, losses]);
        match self {
            Targets::Gpu(targets) => targets.forward(logits, first, join, (lse, losses)),
            Targets::Host(targets) => dispatch_float!("cross_entropy", logits.dtype(), T => {
                let count = logits.dims()[0];
                let lse = &mut lse.as_mut_slice::<<T as Element>::Acc>()?[first..first + count];
                let losses = &mut losses.as_mut_slice::<f64>()?[first..first + count];
                targets.forward::<T>(logits, first, join, lse, losses)
            }),
        }
    }

    /// The gradient of `scale` times the losses of `logits` (rows, classes). It overwrites `logits` if they have no
    /// other holder. `lse` covers all rows.
    pub(crate) fn backward(
        &self,
        logits: Tensor,
        first: usize,
        lse: &Tensor,
        scale: &Tensor,
    ) -> Result<Tensor> {
        const OP: &str = "cross_entropy_backward";
        let acc = logits.dtype().accumulator();
        check_device(OP, &logits, lse)?;
        check_device(OP, &logits, scale)?;
        if scale.numel() != 1 || scale.dtype() != acc || lse.dtype() != acc {
            let message =
                format!("needs lse and a scale, of one element, in {acc}: got {lse:?}, {scale:?}");
            return Err(Error::shape(OP, message));
        }
        let lse = lse.reshape(&[lse.numel()])?.narrow(0, first, logits.dims()[0])?;
        let _span = kernel_span!("cross_entropy", logits.dtype(), 0, [&logits, &lse] => [&logits]);
        match self {
            Targets::Gpu(targets) => targets.backward(logits, first, &lse, scale),
            Targets::Host(targets) => dispatch_float!(OP, logits.dtype(), T => {
                let lse = lse.as_slice::<<T as Element>::Acc>()?;
                targets.backward::<T>(logits, first, lse, scale.item()?)
            }),
        }
    }
}

/// The statistics of each row.
pub(crate) struct RowLosses {
    /// (rows), in the accumulator dtype of the logits.
    pub lse: Tensor,
    /// (rows), in f64.
    pub losses: Tensor,
    /// The dtype of the logits.
    dtype: DType,
}

impl RowLosses {
    /// Allocates for `rows` rows of logits like `like`.
    pub(crate) fn new(like: &Tensor, rows: usize) -> Result<RowLosses> {
        let room = |dtype| Tensor::empty(like.device(), dtype, &[rows]);
        let (lse, losses) = (room(like.dtype().accumulator())?, room(DType::F64)?);
        Ok(RowLosses { lse, losses, dtype: like.dtype() })
    }

    /// The sum of the losses, in order, without dims.
    pub(crate) fn total(&self) -> Result<Tensor> {
        let losses = &self.losses;
        if losses.device().gpu().is_some() {
            return cuda::cross_entropy::total(losses, self.dtype);
        }
        Tensor::full(losses.device(), self.lse.dtype(), &[], losses.as_slice::<f64>()?.iter().sum())
    }
}
