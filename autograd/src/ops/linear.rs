//! Gradient of the linear layer y = x W^T + b: dx = dy W, dW += dy^T x, db += sum of dy over rows.
//!
//! The weight gradient is accumulated directly in its buffer, and may be deferred. If the device can sum dy in the
//! same pass, db is computed with it.
//!
//! A residual that is added in the pass of the product has dy as its gradient: the same tensor, which nobody writes to
//! while it has two holders.
//!
//! A layer of x = gelu(h) is an operation of h, whose gradient is dh = dx gelu'(h): a device may compute that in the
//! pass of dx. Its backward keeps h, and computes x from it once more for dW: on a CPU together with dh.

mod saved;

pub use saved::{Gelu, SavedLinear};

use ferrotron_tensor::ops::linear::{
    linear, linear_bias_gradient, linear_gelu, linear_onto, linear_parameter_gradients,
    linear_weight_gradient,
};
use ferrotron_tensor::{Result, Tensor};

use crate::{Backward, Cotangents, InputGrads, Var, forward_span};

/// The operand that is a residual.
const RESIDUAL: usize = 3;

struct LinearBackward(SavedLinear);

impl Backward for LinearBackward {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn saved(&self) -> Vec<Tensor> {
        self.0.tensors()
    }

    fn backward(mut self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let dy = dy.single()?;
        dx.accumulate(RESIDUAL, dy.clone())?;
        self.0.give_input_gradient(dx, &dy)?;
        give_parameter_gradients(dx, dy, self.0.x.map(|x| move || x.value()))
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
        record(self, weight, bias, None, value, || SavedLinear::new(self, weight))
    }

    /// r + x W^T + b for r (.., N), the residual, and the operands of [`Var::linear`]: (.., N). In 16 bits a GPU adds r in
    /// the pass of the product. The gradient of r is dy itself.
    ///
    /// ```
    /// use ferrotron_autograd::Leaf;
    /// use ferrotron_tensor::{Device, Tensor};
    /// let device = Device::cpu(1)?;
    /// let leaf = |name: &str, x: f64| Ok(Leaf::new(name, Tensor::from_slice(&device, &[x], &[1, 1])?));
    /// let (r, x, w) = (leaf("r", 5.0)?, leaf("x", 2.0)?, leaf("w", 3.0)?);
    /// let y = x.var()?.linear_onto(&r.var()?, &w.var()?, None)?;
    /// assert_eq!(y.value().item()?, 11.0);
    /// y.sum_all()?.backward()?;
    /// assert_eq!(r.gradient()?.unwrap().item()?, 1.0);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn linear_onto(&self, residual: &Var, weight: &Var, bias: Option<&Var>) -> Result<Var> {
        let _span = forward_span("linear");
        let bias_value = bias.map(Var::value);
        let value = linear_onto(residual.value(), self.value(), weight.value(), bias_value)?;
        record(self, weight, bias, Some(residual), value, || SavedLinear::new(self, weight))
    }

    /// gelu(x W^T + b), tanh form, for x (.., K), W (N, K), b (N): (.., N), as the input of another linear layer. A GPU
    /// fuses both in 16 bits.
    pub fn linear_gelu(&self, weight: &Var, bias: Option<&Var>) -> Result<Gelu> {
        let span = forward_span("linear");
        let (hidden, value) = linear_gelu(self.value(), weight.value(), bias.map(Var::value))?;
        drop(span);
        let hidden = record(self, weight, bias, None, hidden, || SavedLinear::new(self, weight))?;
        Gelu::new(hidden, value)
    }
}

fn record(
    operand: &Var,
    weight: &Var,
    bias: Option<&Var>,
    residual: Option<&Var>,
    value: Tensor,
    saved: impl FnOnce() -> SavedLinear,
) -> Result<Var> {
    // Stands where a bias would, so that the residual has its place.
    let no_bias = match (bias, residual) {
        (None, Some(_)) => Some(operand.detach()),
        _ => None,
    };
    let bias = bias.or(no_bias.as_ref());
    let inputs: Vec<&Var> = [operand, weight].into_iter().chain(bias).chain(residual).collect();
    Var::record(&inputs, value, || LinearBackward(saved()))
}

impl Gelu {
    /// gelu(h) W^T + b for W (N, K), b (N): (.., N).
    pub fn linear(&self, weight: &Var, bias: Option<&Var>) -> Result<Var> {
        let _span = forward_span("linear");
        let value = linear(self.value(), weight.value(), bias.map(Var::value))?;
        record(self.hidden(), weight, bias, None, value, || SavedLinear::of_gelu(self, weight))
    }

    /// r + gelu(h) W^T + b: see [`Var::linear_onto`].
    pub fn linear_onto(&self, residual: &Var, weight: &Var, bias: Option<&Var>) -> Result<Var> {
        let _span = forward_span("linear");
        let bias_value = bias.map(Var::value);
        let value = linear_onto(residual.value(), self.value(), weight.value(), bias_value)?;
        let saved = || SavedLinear::of_gelu(self, weight);
        record(self.hidden(), weight, bias, Some(residual), value, saved)
    }
}
