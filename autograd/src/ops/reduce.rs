//! Gradients of reductions: the cotangent is broadcast over the reduced dims.

use ferrotron_tensor::ops::pointwise::{Comparison, compare};
use ferrotron_tensor::ops::reduce::{self, KeepDims};
use ferrotron_tensor::{Result, Tensor};

use crate::engine::node::Named;
use crate::{Backward, Cotangents, InputGrads, Saved, Var, forward_span};

/// Saves the operand and the value, with the reduced dim as size 1.
struct MaxBackward {
    x: Saved,
    kept: Saved,
    dim: isize,
}

impl Backward for MaxBackward {
    fn name(&self) -> &'static str {
        "max"
    }

    fn saved(&self) -> Vec<Tensor> {
        self.x.resident_tensor().into_iter().chain(self.kept.resident_tensor()).collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let (x, kept) = (self.x.value()?, self.kept.value()?);
        let hit = compare(Comparison::Eq, &x, &kept)?.cast(x.dtype())?;
        let share = hit.div(&reduce::sum(&hit, &[self.dim], KeepDims::Keep)?)?;
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

impl Var {
    /// Sum over `dims`.
    pub fn sum(&self, dims: &[isize], keep: KeepDims) -> Result<Var> {
        let _span = forward_span("sum");
        self.spread("sum", reduce::sum(self.value(), dims, keep)?, dims, 1.0)
    }

    /// Mean over `dims`.
    pub fn mean(&self, dims: &[isize], keep: KeepDims) -> Result<Var> {
        let _span = forward_span("mean");
        let value = reduce::mean(self.value(), dims, keep)?;
        let count = self.value().numel() as f64 / value.numel().max(1) as f64;
        self.spread("mean", value, dims, 1.0 / count)
    }

    /// Sum of all elements, a scalar.
    pub fn sum_all(&self) -> Result<Var> {
        let _span = forward_span("sum_all");
        let dims = self.dims().to_vec();
        Var::record(&[self], reduce::sum_all(self.value())?, || {
            Named("sum_all", move |dy: Tensor, dx: &mut InputGrads| {
                dx.accumulate(0, dy.broadcast_to(&dims)?)
            })
        })
    }

    /// Mean of all elements, a scalar.
    pub fn mean_all(&self) -> Result<Var> {
        self.sum_all()?.mul_scalar(1.0 / self.value().numel() as f64)
    }

    /// Maximum along `dim`; equal elements share the gradient.
    pub fn max(&self, dim: isize, keep: KeepDims) -> Result<Var> {
        let _span = forward_span("max");
        let kept = reduce::max(self.value(), &[dim], KeepDims::Keep)?;
        let value = dropped(&kept, self, &[dim], keep)?;
        Var::record(&[self], value, || MaxBackward {
            x: self.save(),
            kept: Saved::statistic(&kept),
            dim,
        })
    }

    /// log(sum(exp(x))) along `dims`; its gradient is the softmax.
    pub fn log_sum_exp(&self, dims: &[isize], keep: KeepDims) -> Result<Var> {
        let _span = forward_span("log_sum_exp");
        let kept = reduce::log_sum_exp(self.value(), dims, KeepDims::Keep)?;
        let value = dropped(&kept, self, dims, keep)?;
        Var::record(&[self], value, || LogSumExpBackward {
            x: self.save(),
            kept: Saved::statistic(&kept),
        })
    }

    /// Records the reduction `value` of this variable, whose gradient is `factor` times the broadcast cotangent.
    fn spread(
        &self,
        name: &'static str,
        value: Tensor,
        dims: &[isize],
        factor: f64,
    ) -> Result<Var> {
        let full = self.dims().to_vec();
        let kept = kept_dims(self, dims);
        Var::record(&[self], value, || {
            Named(name, move |dy: Tensor, dx: &mut InputGrads| {
                let dy = if factor == 1.0 { dy } else { dy.mul_scalar(factor)? };
                dx.accumulate(0, dy.reshape(&kept)?.broadcast_to(&full)?)
            })
        })
    }
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
