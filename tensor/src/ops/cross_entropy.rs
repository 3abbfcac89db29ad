//! Cross-entropy of logits against target classes, summed over the counted tokens.
//!
//! With p = softmax(x), V classes and label smoothing e (as PyTorch):
//! loss = sum over counted rows of (1 - e) (-ln p_t) + e/V sum_j (-ln p_j)
//!      = sum over counted rows of lse - (1 - e) x_t - e/V sum_j x_j, lse = ln sum_j e^(x_j).
//! Gradient: dx_j = scale (e^(x_j - lse) - e/V - (1 - e) \[j = t\]), 0 in rows that are ignored; needs the
//! logits, which it may overwrite, and lse.
//!
//! Accumulates in `Element::Acc` in 32 lanes within blocks of 1024 classes that are joined in f64; rows are
//! summed in f64 in order. Nothing is divided by the number of tokens: that is the caller's `scale`.

use super::rows::{for_rows, for_rows2, overwritable};
use super::softmax::row_statistics;
use crate::simd::vectorized;
use crate::tensor::check_device;
use crate::{Element, Error, Index, Real, Result, Scalar, Tensor, dispatch_float, dispatch_index};

/// Which tokens count, and how sharp their targets are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossEntropyConfig {
    /// Targets of this value are not counted; negative ones never are.
    pub ignore_index: i64,
    /// Probability on [0, 1] that is spread over all classes.
    pub label_smoothing: f64,
}

impl Default for CrossEntropyConfig {
    /// PyTorch's: -100 and 0.
    fn default() -> Self {
        CrossEntropyConfig { ignore_index: -100, label_smoothing: 0.0 }
    }
}

/// The loss, and what its gradient needs.
#[derive(Debug, Clone)]
pub struct CrossEntropy {
    /// Sum over the counted tokens, without dims, in the accumulation dtype.
    pub loss: Tensor,
    /// ln sum_j e^(x_j) of every row, with the dims of the targets, in the accumulation dtype.
    pub lse: Tensor,
    /// How many tokens count.
    pub counted: usize,
}

/// The class of each row, or [`IGNORED`].
pub(crate) struct Targets(Vec<usize>);

const IGNORED: usize = usize::MAX;

impl Targets {
    /// Reads targets below `classes`; an error names the position and value of one that is not.
    pub(crate) fn new(
        op: &'static str,
        targets: &Tensor,
        classes: usize,
        config: &CrossEntropyConfig,
    ) -> Result<Targets> {
        if !(0.0..=1.0).contains(&config.label_smoothing) {
            let message = format!("label smoothing is on [0, 1], got {}", config.label_smoothing);
            return Err(Error::value(op, message));
        }
        let dense = targets.contiguous()?;
        let ignored = usize::try_from(config.ignore_index).unwrap_or(IGNORED);
        dispatch_index!(op, targets.dtype(), I => {
            let read = |(at, target): (usize, &I)| match target.index() {
                None => Ok(IGNORED),
                Some(class) if class == ignored => Ok(IGNORED),
                Some(class) if class < classes => Ok(class),
                Some(class) => Err(Error::value(
                    op,
                    format!("target {class} at position {at} is not below {classes}"),
                )),
            };
            Ok(Targets(dense.as_slice::<I>()?.iter().enumerate().map(read).collect::<Result<_>>()?))
        })
    }

    /// How many rows count.
    pub(crate) fn counted(&self) -> usize {
        self.0.iter().filter(|&&class| class != IGNORED).count()
    }

    /// Losses of dense rows of `logits` from row `first` of the targets on, and their lse.
    pub(crate) fn forward<T: Element>(
        &self,
        logits: &Tensor,
        first: usize,
        config: &CrossEntropyConfig,
        lse: &mut [T::Acc],
        losses: &mut [f64],
    ) -> Result<()> {
        let width = logits.dims().last().copied().unwrap_or(1);
        let elements = logits.as_slice::<T>()?;
        let smoothing = config.label_smoothing;
        for_rows2(logits.device(), (lse, 1), (losses, 1), elements.len(), |row, lse, losses| {
            for (i, (lse, loss)) in lse.iter_mut().zip(losses).enumerate() {
                let x = &elements[(row + i) * width..][..width];
                let found = row_statistics(x);
                let log_sum = found.log_sum_exp();
                *lse = T::Acc::of(log_sum);
                let class = self.0[first + row + i];
                *loss = match x.get(class) {
                    None => 0.0,
                    Some(x) if smoothing == 0.0 => log_sum - x.acc().f64(),
                    Some(x) => {
                        let mean = found.sum / width as f64;
                        log_sum - (1.0 - smoothing) * x.acc().f64() - smoothing * mean
                    }
                };
            }
        });
        Ok(())
    }

    /// Overwrites dense, unique `logits` with their gradient, or writes it to a tensor of its own.
    pub(crate) fn backward<T: Element>(
        &self,
        mut logits: Tensor,
        first: usize,
        config: &CrossEntropyConfig,
        lse: &[T::Acc],
        scale: f64,
    ) -> Result<Tensor> {
        let width = logits.dims().last().copied().unwrap_or(1);
        let work = logits.numel();
        let device = logits.device().clone();
        let uniform = T::Acc::of(config.label_smoothing / width as f64 * scale);
        let peak = T::Acc::of((1.0 - config.label_smoothing) * scale);
        let scale = T::Acc::of(scale);
        // `x_t` is read before the row is overwritten, so that 16 bits are rounded to once.
        let finish = |dx: &mut [T], class: usize, x_t: T::Acc, lse: T::Acc| {
            dx[class] = T::from_acc((x_t - lse).exp() * scale - uniform - peak);
        };
        if overwritable(&logits) {
            for_rows(&device, (logits.as_mut_slice::<T>()?, width), work, |row, rows| {
                for (i, dx) in rows.chunks_exact_mut(width).enumerate() {
                    let (lse, class) = (lse[row + i], self.0[first + row + i]);
                    if class == IGNORED {
                        dx.fill(T::from_acc(T::Acc::ZERO));
                    } else {
                        let x_t = dx[class].acc();
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
                let (lse, class) = (lse[row + i], self.0[first + row + i]);
                if class == IGNORED {
                    dx.fill(T::from_acc(T::Acc::ZERO));
                } else {
                    let x = &elements[(row + i) * width..][..width];
                    gradient(x, dx, lse, scale, uniform);
                    finish(dx, class, x[class].acc(), lse);
                }
            }
        });
        Ok(out)
    }
}

#[inline(always)]
fn scaled<A: Real>(x: A, lse: A, scale: A, uniform: A) -> A {
    (x - lse).exp() * scale - uniform
}

vectorized! {
    fn gradient<T: Element>(x: &[T], dx: &mut [T], lse: T::Acc, scale: T::Acc, uniform: T::Acc) {
        for (dx, x) in dx.iter_mut().zip(x) {
            *dx = T::from_acc(scaled(x.acc(), lse, scale, uniform));
        }
    }

    fn gradient_in_place<T: Element>(x: &mut [T], lse: T::Acc, scale: T::Acc, uniform: T::Acc) {
        for x in x {
            *x = T::from_acc(scaled(x.acc(), lse, scale, uniform));
        }
    }
}

/// Cross-entropy of `logits` (.., V) against `targets` (..), summed over the counted tokens.
///
/// ```
/// use ferrotron_tensor::{Device, Tensor};
/// use ferrotron_tensor::ops::cross_entropy::{CrossEntropyConfig, cross_entropy};
/// let device = Device::cpu(1)?;
/// let logits = Tensor::from_slice(&device, &[0.0_f64; 8], &[2, 4])?;
/// let targets = Tensor::from_slice(&device, &[3_i64, -100], &[2])?;
/// let found = cross_entropy(&logits, &targets, &CrossEntropyConfig::default())?;
/// assert_eq!(found.counted, 1);
/// assert!((found.loss.item()? - 4.0_f64.ln()).abs() < 1e-15);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn cross_entropy(
    logits: &Tensor,
    targets: &Tensor,
    config: &CrossEntropyConfig,
) -> Result<CrossEntropy> {
    const OP: &str = "cross_entropy";
    let classes = check(OP, logits, targets)?;
    let list = Targets::new(OP, targets, classes, config)?;
    let logits = logits.contiguous()?;
    dispatch_float!(OP, logits.dtype(), T => {
        type Acc = <T as Element>::Acc;
        let mut lse = Tensor::empty(logits.device(), Acc::DTYPE, targets.dims())?;
        let mut losses = vec![0.0; targets.numel()];
        list.forward::<T>(&logits, 0, config, lse.as_mut_slice::<Acc>()?, &mut losses)?;
        let loss = Tensor::full(logits.device(), Acc::DTYPE, &[], losses.iter().sum())?;
        Ok(CrossEntropy { loss, lse, counted: list.counted() })
    })
}

/// Gradient of `scale` x [`cross_entropy`] with respect to the logits, which are overwritten if nobody else
/// holds them. `lse` is that of the forward pass.
pub fn cross_entropy_backward(
    logits: Tensor,
    targets: &Tensor,
    lse: &Tensor,
    config: &CrossEntropyConfig,
    scale: f64,
) -> Result<Tensor> {
    const OP: &str = "cross_entropy_backward";
    let classes = check(OP, &logits, targets)?;
    if lse.dims() != targets.dims() {
        let message = format!("lse is {:?}, targets {:?}", lse.dims(), targets.dims());
        return Err(Error::shape(OP, message));
    }
    let list = Targets::new(OP, targets, classes, config)?;
    dispatch_float!(OP, logits.dtype(), T => {
        let lse = lse.contiguous()?;
        list.backward::<T>(logits, 0, config, lse.as_slice::<<T as Element>::Acc>()?, scale)
    })
}

/// The number of classes, if the operands fit together.
fn check(op: &'static str, logits: &Tensor, targets: &Tensor) -> Result<usize> {
    check_device(op, logits, targets)?;
    match logits.dims().split_last() {
        Some((&classes, rows)) if rows == targets.dims() => Ok(classes),
        _ => Err(Error::shape(
            op,
            format!("logits are {:?}, targets {:?}", logits.dims(), targets.dims()),
        )),
    }
}

#[cfg(test)]
mod tests;
