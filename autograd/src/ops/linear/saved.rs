//! The input of a linear layer behind GELU, and what a linear layer saves.

use ferrotron_tensor::ops::linear::{
    linear_gelu_gradients, linear_gelu_input_gradient, linear_input_gradient,
};
use ferrotron_tensor::ops::pointwise::unary;
use ferrotron_tensor::ops::table::Unary;
use ferrotron_tensor::{Result, Tensor};

use crate::{InputGrads, Saved, Var, forward_span};

/// gelu(h), tanh form, for a linear layer whose backward gives the gradient of h.
///
/// ```
/// use ferrotron_autograd::{Leaf, ops::linear::Gelu};
/// use ferrotron_tensor::{Device, Tensor};
/// let device = Device::cpu(1)?;
/// let h = Leaf::new("h", Tensor::from_slice(&device, &[0.0_f64], &[1, 1])?);
/// let w = Leaf::new("w", Tensor::from_slice(&device, &[3.0_f64], &[1, 1])?);
/// Gelu::new(h.var()?, None)?.linear(&w.var()?, None)?.sum_all()?.backward()?;
/// assert_eq!(h.gradient()?.unwrap().item()?, 1.5); // 3 gelu'(0)
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub struct Gelu {
    hidden: Var,
    value: Tensor,
}

impl Gelu {
    /// gelu of `hidden`. `value` is the result if a linear layer has computed it with `hidden`.
    pub fn new(hidden: Var, value: Option<Tensor>) -> Result<Gelu> {
        let value = match value {
            Some(value) => value,
            None => {
                let _span = forward_span(Unary::GeluTanh.name());
                unary(Unary::GeluTanh, 0.0, hidden.value())?
            }
        };
        Ok(Gelu { hidden, value })
    }

    /// h (.., K)
    pub fn hidden(&self) -> &Var {
        &self.hidden
    }

    /// gelu(h) (.., K)
    pub fn value(&self) -> &Tensor {
        &self.value
    }
}

/// The state that a linear layer keeps for backward.
pub struct SavedLinear {
    /// x, if dW is needed.
    pub x: Option<Saved>,
    /// W, if the gradient of operand 0 is needed.
    pub weight: Option<Saved>,
    /// h, if operand 0 is h of x = gelu(h) and its gradient is needed.
    hidden: Option<Saved>,
}

impl SavedLinear {
    /// For the operands x and W.
    pub fn new(x: &Var, weight: &Var) -> SavedLinear {
        SavedLinear {
            x: weight.needs_gradient().then(|| x.save()),
            weight: x.needs_gradient().then(|| weight.save()),
            hidden: None,
        }
    }

    /// For the operands h and W, where x = gelu(h).
    pub fn of_gelu(x: &Gelu, weight: &Var) -> SavedLinear {
        if !x.hidden.needs_gradient() {
            return SavedLinear::new(&Var::constant(x.value.clone()), weight);
        }
        let hidden = x.hidden.save();
        let again = hidden.clone();
        let x = move || Saved::recomputed(move || unary(Unary::GeluTanh, 0.0, &again.value()?));
        SavedLinear {
            x: weight.needs_gradient().then(x),
            weight: Some(weight.save()),
            hidden: Some(hidden),
        }
    }

    /// The saved tensors in device memory.
    pub fn tensors(&self) -> Vec<Tensor> {
        let saved = self.x.iter().chain(&self.weight).chain(&self.hidden);
        saved.filter_map(Saved::resident_tensor).collect()
    }

    /// Computes the gradient of operand 0 for dy (.., N), if it is needed. Of x = gelu(h), x comes with it unless dW is
    /// deferred.
    pub fn give_input_gradient(&mut self, dx: &mut InputGrads, dy: &Tensor) -> Result<()> {
        let Some(weight) = &self.weight else { return Ok(()) };
        let weight = weight.value()?; // (N, K)
        let Some(hidden) = &self.hidden else {
            return dx
                .accumulate_with(0, |out, accum| linear_input_gradient(out, accum, dy, &weight));
        };
        let hidden = hidden.value()?;
        if self.x.is_none() || dx.defers_weight(1) {
            return dx.accumulate(0, linear_gelu_input_gradient(dy, &weight, &hidden)?);
        }
        let [x, dh] = linear_gelu_gradients(dy, &weight, &hidden)?;
        self.x = Some(Saved::computed(x));
        dx.accumulate(0, dh)
    }
}
