//! CPU kernels of cross-entropy over rows of logits, forward and backward.

use super::config::CrossEntropyConfig;
use super::shard::{VocabAllReduce, VocabShard, joined};
use crate::numeric::prefetch::fetch_ahead;
use crate::numeric::simd::vectorized;
use crate::ops::rows::{can_reuse, for_rows, for_rows2};
use crate::ops::softmax::{RowStatistics, WithSum, WithoutSum, row_statistics};
use crate::{Element, Error, Index, Real, Result, Scalar, Tensor, dispatch_index};

/// The class of each row relative to the shard's first, or [`IGNORED`], or [`ELSEWHERE`].
pub(crate) struct HostTargets {
    rows: Vec<usize>,
    config: CrossEntropyConfig,
    /// Classes of the whole vocabulary.
    global: usize,
}

const IGNORED: usize = usize::MAX;

/// A class in another shard.
const ELSEWHERE: usize = usize::MAX - 1;

impl HostTargets {
    /// Reads contiguous targets of the whole vocabulary for a shard of `classes`.
    ///
    /// Errors, with position and value, if a target is not below the vocabulary size; every shard returns the same
    /// error.
    pub(super) fn new(
        op: &'static str,
        targets: &Tensor,
        classes: usize,
        shard: VocabShard,
        config: &CrossEntropyConfig,
    ) -> Result<HostTargets> {
        let VocabShard { offset, global, .. } = shard;
        if targets.device().is_fake() {
            let rows = vec![IGNORED; targets.numel()]; // they have no values
            return Ok(HostTargets { rows, config: *config, global });
        }
        let ignored = usize::try_from(config.ignore_index).unwrap_or(IGNORED);
        let rows = dispatch_index!(op, targets.dtype(), I => {
            let read = |(at, target): (usize, &I)| match target.index() {
                None => Ok(IGNORED),
                Some(class) if class == ignored => Ok(IGNORED),
                Some(class) if class < global => {
                    let local = class.checked_sub(offset).filter(|&local| local < classes);
                    Ok(local.unwrap_or(ELSEWHERE))
                }
                Some(class) => Err(Error::value(
                    op,
                    format!("target {class} at position {at} is not below {global}"),
                )),
            };
            targets.as_slice::<I>()?.iter().enumerate().map(read).collect::<Result<_>>()?
        });
        Ok(HostTargets { rows, config: *config, global })
    }

    /// Loss of a row from its lse, the logit of its target and the sum of its logits.
    #[inline(always)]
    fn loss(&self, row: usize, lse: f64, target: f64, sum: f64) -> f64 {
        let smoothing = self.config.label_smoothing;
        if self.rows[row] == IGNORED {
            0.0
        } else if smoothing == 0.0 {
            lse - target
        } else {
            lse - (1.0 - smoothing) * target - smoothing * (sum / self.global as f64)
        }
    }

    /// The statistics of a row that its loss needs.
    fn statistics<T: Element>(&self) -> fn(&[T]) -> RowStatistics<T::Acc> {
        match self.config.label_smoothing {
            0.0 => row_statistics::<T, WithoutSum>,
            _ => row_statistics::<T, WithSum>,
        }
    }

    /// See [`Targets::forward`](super::Targets::forward).
    pub(super) fn forward<T: Element>(
        &self,
        logits: &Tensor,
        first: usize,
        join: Option<&dyn VocabAllReduce>,
        lse: &mut [T::Acc],
        losses: &mut [f64],
    ) -> Result<()> {
        if let Some(join) = join {
            return self.forward_joined::<T>(logits, first, join, lse, losses);
        }
        let width = logits.dims().last().copied().unwrap_or(1);
        let elements = logits.as_slice::<T>()?;
        let statistics = self.statistics();
        for_rows2(logits.device(), (lse, 1), (losses, 1), elements.len(), |row, lse, losses| {
            for (i, (lse, loss)) in lse.iter_mut().zip(losses).enumerate() {
                let x = &elements[(row + i) * width..][..width];
                let found = statistics(x);
                let log_sum = found.log_sum_exp();
                *lse = T::Acc::from_f64(log_sum);
                let target = x.get(self.rows[first + row + i]).map_or(0.0, |x| x.acc().f64());
                *loss = self.loss(first + row + i, log_sum, target, found.sum);
            }
        });
        Ok(())
    }

    fn forward_joined<T: Element>(
        &self,
        logits: &Tensor,
        first: usize,
        join: &dyn VocabAllReduce,
        lse: &mut [T::Acc],
        losses: &mut [f64],
    ) -> Result<()> {
        let width = logits.dims().last().copied().unwrap_or(1);
        let (device, count) = (logits.device(), lse.len());
        let elements = logits.as_slice::<T>()?;
        let mut maxima = Tensor::empty(device, T::Acc::DTYPE, &[count])?;
        let nothing = RowStatistics { max: T::Acc::NEG_INFINITY, sum_exp: 0.0, sum: 0.0 };
        let mut found = vec![nothing; count];
        let out = maxima.as_mut_slice::<T::Acc>()?;
        let statistics = self.statistics();
        for_rows2(device, (out, 1), (&mut found, 1), elements.len(), |row, maxima, found| {
            for (i, (max, found)) in maxima.iter_mut().zip(found).enumerate() {
                *found = statistics(&elements[(row + i) * width..][..width]);
                *max = found.max;
            }
        });
        let maxima = joined(join.max(maxima)?, T::Acc::DTYPE, &[count])?;
        let maxima = maxima.as_slice::<T::Acc>()?;

        let terms = if self.config.label_smoothing == 0.0 { 2 } else { 3 };
        let mut sums = Tensor::empty(device, T::Acc::DTYPE, &[terms, count])?;
        let (sum_exps, rest) = sums.as_mut_slice::<T::Acc>()?.split_at_mut(count);
        let (predicted, totals) = rest.split_at_mut(count);
        for (i, (found, &max)) in found.iter().zip(maxima).enumerate() {
            // The difference of two equal infinities is NaN, but the ratio of their exponentials must be 1.
            let shrink = if found.max == max { 1.0 } else { (found.max - max).f64().exp() };
            sum_exps[i] = T::Acc::from_f64(found.sum_exp * shrink);
            let x = &elements[i * width..][..width];
            predicted[i] = x.get(self.rows[first + i]).map_or(T::Acc::ZERO, |x| x.acc());
            if let Some(total) = totals.get_mut(i) {
                *total = T::Acc::from_f64(found.sum);
            }
        }
        let sums = joined(join.sum(sums)?, T::Acc::DTYPE, &[terms, count])?;
        let (sum_exps, rest) = sums.as_slice::<T::Acc>()?.split_at(count);
        let (predicted, totals) = rest.split_at(count);
        for_rows2(device, (lse, 1), (losses, 1), count, |row, lse, losses| {
            for (i, (lse, loss)) in (row..).zip(lse.iter_mut().zip(losses)) {
                let log_sum = maxima[i].f64() + sum_exps[i].f64().ln();
                *lse = T::Acc::from_f64(log_sum);
                let total = totals.get(i).map_or(0.0, |total| total.f64());
                *loss = self.loss(first + i, log_sum, predicted[i].f64(), total);
            }
        });
        Ok(())
    }

    /// See [`Targets::backward`](super::Targets::backward).
    pub(super) fn backward<T: Element>(
        &self,
        mut logits: Tensor,
        first: usize,
        lse: &[T::Acc],
        scale: f64,
    ) -> Result<Tensor> {
        let width = logits.dims().last().copied().unwrap_or(1);
        let work = logits.numel();
        let device = logits.device().clone();
        let smoothing = self.config.label_smoothing;
        let uniform = T::Acc::from_f64(smoothing / self.global as f64 * scale);
        let peak = T::Acc::from_f64((1.0 - smoothing) * scale);
        let scale = T::Acc::from_f64(scale);
        // `x_t` is read before the row is overwritten, so that 16-bit values are rounded once. A target in another
        // shard has no element here.
        let finish = |dx: &mut [T], class: usize, x_t: Option<T::Acc>, lse: T::Acc| {
            if let Some(x_t) = x_t {
                dx[class] = T::from_acc((x_t - lse).exp_bounded() * scale - uniform - peak);
            }
        };
        if can_reuse(&logits) {
            for_rows(&device, (logits.as_mut_slice::<T>()?, width), work, |row, rows| {
                for (i, dx) in rows.chunks_exact_mut(width).enumerate() {
                    let (lse, class) = (lse[row + i], self.rows[first + row + i]);
                    if class == IGNORED {
                        dx.fill(T::from_acc(T::Acc::ZERO));
                    } else {
                        let x_t = dx.get(class).map(|x| x.acc());
                        gradient_in_place(dx, lse, scale, uniform);
                        finish(dx, class, x_t, lse);
                    }
                }
            });
            return Ok(logits);
        }
        let logits = logits.contiguous()?;
        let elements = logits.as_slice::<T>()?;
        let mut out = Tensor::empty(&device, logits.dtype(), logits.dims())?;
        for_rows(&device, (out.as_mut_slice::<T>()?, width), work, |row, rows| {
            for (i, dx) in rows.chunks_exact_mut(width).enumerate() {
                let (lse, class) = (lse[row + i], self.rows[first + row + i]);
                if class == IGNORED {
                    dx.fill(T::from_acc(T::Acc::ZERO));
                } else {
                    let x = &elements[(row + i) * width..][..width];
                    gradient(x, dx, lse, scale, uniform);
                    finish(dx, class, x.get(class).map(|x| x.acc()), lse);
                }
            }
        });
        Ok(out)
    }
}

#[inline(always)]
fn scaled<A: Real>(x: A, lse: A, scale: A, uniform: A) -> A {
    (x - lse).exp_bounded() * scale - uniform
}

#[inline(always)]
fn set_gradient<T: Element>(x: &mut [T], lse: T::Acc, scale: T::Acc, uniform: T::Acc) {
    for x in x {
        *x = T::from_acc(scaled(x.acc(), lse, scale, uniform));
    }
}

vectorized! {
    fn gradient<T: Element>(x: &[T], dx: &mut [T], lse: T::Acc, scale: T::Acc, uniform: T::Acc) {
        for (dx, x) in dx.iter_mut().zip(x) {
            *dx = T::from_acc(scaled(x.acc(), lse, scale, uniform));
        }
    }

    fn gradient_in_place<T: Element>(x: &mut [T], lse: T::Acc, scale: T::Acc, uniform: T::Acc) {
        let (blocks, rest) = x.as_chunks_mut::<32>();
        for block in blocks {
            fetch_ahead(block);
            set_gradient(block, lse, scale, uniform);
        }
        set_gradient(rest, lse, scale, uniform);
    }
}
