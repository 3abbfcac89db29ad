//! Gradient of the linear layer y = x W^T + b: dx = dy W, dW += dy^T x, db += sum of dy over rows.
//!
//! The weight's gradient is written with beta = 1 straight into its buffer, and may be deferred.

use ferrotron_tensor::ops::matmul::{linear, linear_input_gradient, linear_weight_gradient};
use ferrotron_tensor::ops::reduce::sum_to;
use ferrotron_tensor::{Result, Tensor};

use crate::{Backward, Cotangents, Grads, Saved, Var, forward_span};

struct LinearBackward {
    x: Option<Saved>,
    weight: Option<Saved>,
}

impl Backward for LinearBackward {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn saved(&self) -> Vec<Tensor> {
        self.x.iter().chain(&self.weight).filter_map(Saved::held).collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut Grads) -> Result<()> {
        let dy = dy.single()?;
        if let Some(weight) = &self.weight {
            let weight = weight.value()?; // (N, K)
            dx.accumulate(0, |out, accum| linear_input_gradient(out, accum, &dy, &weight))?;
        }
        if dx.needs(2) {
            dx.give(2, sum_to(&dy.as_matrix()?, &dy.dims()[dy.rank() - 1..])?)?;
        }
        if let Some(x) = self.x {
            dx.accumulate_weight(1, move |out, accum| {
                linear_weight_gradient(out, accum, &dy, &x.value()?)
            })?;
        }
        Ok(())
    }
}

impl Var {
    /// x W^T + b for x (.., K), W (N, K), b (N): (.., N).
    pub fn linear(&self, weight: &Var, bias: Option<&Var>) -> Result<Var> {
        let _span = forward_span("linear");
        let value = linear(self.value(), weight.value(), bias.map(Var::value))?;
        let mut inputs = vec![self, weight];
        inputs.extend(bias);
        Var::record(&inputs, value, || LinearBackward {
            x: weight.needs_gradient().then(|| self.save()),
            weight: self.needs_gradient().then(|| weight.save()),
        })
    }
}
