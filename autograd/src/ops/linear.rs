//! Gradient of the linear layer y = x W^T + b: dx = dy W, dW += dy^T x, db += sum of dy over rows.
//!
//! The weight gradient is accumulated directly in its buffer, and may be deferred. If the device can sum dy in the
//! same pass, db is computed with it.

use ferrotron_tensor::ops::matmul::{
    linear, linear_bias_gradient, linear_gelu, linear_input_gradient, linear_parameter_gradients,
    linear_weight_gradient,
};
use ferrotron_tensor::ops::table::Unary;
use ferrotron_tensor::{Result, Tensor};

use super::pointwise::record_unary;
use crate::{Backward, Cotangents, InputGrads, Saved, Var, forward_span};

struct LinearBackward {
    x: Option<Saved>,
    weight: Option<Saved>,
}

impl Backward for LinearBackward {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn saved(&self) -> Vec<Tensor> {
        self.x.iter().chain(&self.weight).filter_map(Saved::resident_tensor).collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let dy = dy.single()?;
        if let Some(weight) = &self.weight {
            let weight = weight.value()?; // (N, K)
            dx.accumulate_with(0, |out, accum| linear_input_gradient(out, accum, &dy, &weight))?;
        }
        give_parameter_gradients(dx, dy, self.x.map(|x| move || x.value()))
    }
}

/// Computes dW of operand 1 and, if present, db of operand 2, for dy (.., N). `x` returns x (.., K), and is `None` if
/// dW is not needed. If dW is deferred, db is still computed now.
pub fn give_parameter_gradients(
    dx: &mut InputGrads,
    dy: Tensor,
    x: Option<impl FnOnce() -> Result<Tensor> + Send + 'static>,
) -> Result<()> {
    match x {
        Some(x) if dx.needs_input_grad(2) && !dx.defers_weight(1) => {
            let mut dbias = None;
            dx.accumulate_with(1, |out, accum| {
                dbias = linear_parameter_gradients(out, accum, &dy, &x()?)?;
                Ok(())
            })?;
            dx.accumulate(2, dbias.map_or_else(|| linear_bias_gradient(&dy), Ok)?)
        }
        x => {
            if dx.needs_input_grad(2) {
                dx.accumulate(2, linear_bias_gradient(&dy)?)?;
            }
            let Some(x) = x else { return Ok(()) };
            dx.accumulate_or_defer(1, move |out, accum| {
                linear_weight_gradient(out, accum, &dy, &x()?)
            })
        }
    }
}

impl Var {
    /// x W^T + b for x (.., K), W (N, K), b (N): (.., N).
    pub fn linear(&self, weight: &Var, bias: Option<&Var>) -> Result<Var> {
        let _span = forward_span("linear");
        let value = linear(self.value(), weight.value(), bias.map(Var::value))?;
        self.record_linear(weight, bias, value)
    }

    /// gelu(x W^T + b), tanh form, for x (.., K), W (N, K), b (N): (.., N). Saved values and backward are those of
    /// [`Var::linear`] and [`Var::gelu_tanh`]; a GPU fuses both in 16 bits.
    pub fn linear_gelu(&self, weight: &Var, bias: Option<&Var>) -> Result<Var> {
        let span = forward_span("linear");
        let (hidden, value) = linear_gelu(self.value(), weight.value(), bias.map(Var::value))?;
        drop(span);
        gelu_from_preactivation(&self.record_linear(weight, bias, hidden)?, value)
    }

    fn record_linear(&self, weight: &Var, bias: Option<&Var>, value: Tensor) -> Result<Var> {
        let mut inputs = vec![self, weight];
        inputs.extend(bias);
        Var::record(&inputs, value, || LinearBackward {
            x: weight.needs_gradient().then(|| self.save()),
            weight: self.needs_gradient().then(|| weight.save()),
        })
    }
}

/// gelu(h), tanh form. `value` is the result if a linear layer has already computed it with h.
pub fn gelu_from_preactivation(hidden: &Var, value: Option<Tensor>) -> Result<Var> {
    match value {
        Some(value) => record_unary(Unary::GeluTanh, 0.0, hidden, value),
        None => hidden.gelu_tanh(),
    }
}
