//! Gradients of reductions: the cotangent is broadcast over the reduced dims.

use ferrotron_tensor::ops::pointwise::{Comparison, compare};
use ferrotron_tensor::ops::reduce::{self, KeepDims};
use ferrotron_tensor::{Result, Tensor};

use crate::engine::node::Named;
use crate::{Backward, Cotangents, InputGrads, Saved, Var, forward_span};

/// Saves the operand and the value, with the reduced dims as size 1.
struct AmaxBackward {
    x: Saved,
    kept: Saved,
    dims: Vec<isize>,
}

impl Backward for AmaxBackward {
    fn name(&self) -> &'static str {
        "amax"
    }

    fn saved(&self) -> Vec<Tensor> {
        self.x.resident_tensor().into_iter().chain(self.kept.resident_tensor()).collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let (x, kept) = (self.x.value()?, self.kept.value()?);
        let hit = compare(Comparison::Eq, &x, &kept)?.cast(x.dtype())?;
        let share = hit.div(&reduce::sum(&hit, &self.dims, KeepDims::Keep)?)?;
        dx.accumulate(0, share.mul(&dy.single()?.reshape(kept.dims())?)?)
    }
}

/// Saves the operand and the value, with the reduced dims as size 1.
struct LogSumExpBackward {
    x: Saved,
    kept: Saved,
}

impl Backward for LogSumExpBackward {
    fn name(&self) -> &'static str {
        "log_sum_exp"
    }

    fn saved(&self) -> Vec<Tensor> {
        self.x.resident_tensor().into_iter().chain(self.kept.resident_tensor()).collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let kept = self.kept.value()?;
        let softmax = self.x.value()?.sub(&kept)?.exp()?;
        dx.accumulate(0, softmax.mul(&dy.single()?.reshape(kept.dims())?)?)
    }
}

/// Sum over `dims`.
pub(crate) fn sum(x: &Var, dims: &[isize], keep: KeepDims) -> Result<Var> {
    let _span = forward_span("sum");
    spread("sum", x, reduce::sum(x.value(), dims, keep)?, dims, 1.0)
}

/// Mean over `dims`.
pub(crate) fn mean(x: &Var, dims: &[isize], keep: KeepDims) -> Result<Var> {
    let _span = forward_span("mean");
    let value = reduce::mean(x.value(), dims, keep)?;
    let count = x.value().numel() as f64 / value.numel().max(1) as f64;
    spread("mean", x, value, dims, count)
}

/// Sum of all elements, a scalar.
pub(crate) fn sum_all(x: &Var) -> Result<Var> {
    let _span = forward_span("sum_all");
    let dims = x.dims().to_vec();
    Var::record(&[x], reduce::sum_all(x.value())?, || {
        Named("sum_all", move |dy: Tensor, dx: &mut InputGrads| {
            dx.accumulate(0, dy.broadcast_to(&dims)?)
        })
    })
}

/// Maximum over `dims`; equal elements share the gradient.
pub(crate) fn amax(x: &Var, dims: &[isize], keep: KeepDims) -> Result<Var> {
    let _span = forward_span("amax");
    let kept = reduce::amax(x.value(), dims, KeepDims::Keep)?;
    let value = dropped(&kept, x, dims, keep)?;
    Var::record(&[x], value, || AmaxBackward {
        x: x.save(),
        kept: Saved::statistic(&kept),
        dims: dims.to_vec(),
    })
}

/// log(sum(exp(x))) along `dims`; its gradient is the softmax.
pub(crate) fn log_sum_exp(x: &Var, dims: &[isize], keep: KeepDims) -> Result<Var> {
    let _span = forward_span("log_sum_exp");
    let kept = reduce::log_sum_exp(x.value(), dims, KeepDims::Keep)?;
    let value = dropped(&kept, x, dims, keep)?;
    Var::record(&[x], value, || LogSumExpBackward { x: x.save(), kept: Saved::statistic(&kept) })
}

/// Records the reduction `value` of `x`, whose gradient is the broadcast cotangent divided by `divisor`.
fn spread(name: &'static str, x: &Var, value: Tensor, dims: &[isize], divisor: f64) -> Result<Var> {
    let full = x.dims().to_vec();
    let kept = kept_dims(x, dims);
    Var::record(&[x], value, || {
        Named(name, move |dy: Tensor, dx: &mut InputGrads| {
            let dy = if divisor == 1.0 { dy } else { dy.div_scalar(divisor)? };
            dx.accumulate(0, dy.reshape(&kept)?.broadcast_to(&full)?)
        })
    })
}

/// The dims of `x` with the reduced ones set to 1; the reduction has already checked them.
fn kept_dims(x: &Var, dims: &[isize]) -> Vec<usize> {
    let rank = x.dims().len() as isize;
    let mut kept = x.dims().to_vec();
    for &dim in dims {
        kept[(if dim < 0 { dim + rank } else { dim }) as usize] = 1;
    }
    kept
}

fn dropped(kept: &Tensor, x: &Var, dims: &[isize], keep: KeepDims) -> Result<Tensor> {
    if keep == KeepDims::Keep {
        return Ok(kept.clone());
    }
    let rank = x.dims().len() as isize;
    let reduced: Vec<usize> =
        dims.iter().map(|&dim| (if dim < 0 { dim + rank } else { dim }) as usize).collect();
    let dims: Vec<usize> = kept
        .dims()
        .iter()
        .enumerate()
        .filter(|(d, _)| !reduced.contains(d))
        .map(|(_, &n)| n)
        .collect();
    kept.reshape(&dims)
}
