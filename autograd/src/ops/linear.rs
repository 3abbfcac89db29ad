//! Gradient of the linear layer y = x W^T + b: dx = dy W, dW += dy^T x, db += sum of dy over rows.
//!
//! The weight's gradient is written with beta = 1 straight into its buffer, and may be deferred.

use ferrotron_tensor::ops::matmul::{linear, matmul_into};
use ferrotron_tensor::ops::reduce::sum_to;
use ferrotron_tensor::{Result, Tensor};

use crate::{Backward, Cotangents, Grads, Saved, Var};

struct LinearBackward {
    x: Option<Saved>,
    weight: Option<Saved>,
}

impl Backward for LinearBackward {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn saved(&self) -> Vec<&Tensor> {
        self.x.iter().chain(&self.weight).filter_map(Saved::held).collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut Grads) -> Result<()> {
        let dy = dy.single()?;
        if let Some(weight) = &self.weight {
            let weight = weight.value()?; // (N, K)
            dx.accumulate(0, |out, accum| {
                let dy = rows(&dy)?; // (.., N) as a matrix
                let dims = [dy.dims()[0], weight.dims()[1]];
                out.reshape_mut(&dims, |out| matmul_into(out, accum, &dy, &weight))
            })?;
        }
        if dx.needs(2) {
            dx.give(2, sum_to(&rows(&dy)?, &dy.dims()[dy.rank() - 1..])?)?;
        }
        if let Some(x) = self.x {
            dx.accumulate_weight(1, move |out, accum| {
                let x = x.value()?;
                matmul_into(out, accum, &rows(&dy)?.transpose(0, 1)?, &rows(&x)?)
            })?;
        }
        Ok(())
    }
}

/// All dims but the last joined into one.
fn rows(x: &Tensor) -> Result<Tensor> {
    let width = x.dims()[x.rank() - 1];
    let rows: usize = x.dims()[..x.rank() - 1].iter().product();
    x.reshape(&[rows, width])
}

impl Var {
    /// x W^T + b for x (.., K), W (N, K), b (N): (.., N).
    pub fn linear(&self, weight: &Var, bias: Option<&Var>) -> Result<Var> {
        let value = linear(self.value(), weight.value(), bias.map(Var::value))?;
        let mut inputs = vec![self, weight];
        inputs.extend(bias);
        Var::record(&inputs, value, || LinearBackward {
            x: weight.needs_gradient().then(|| self.save()),
            weight: self.needs_gradient().then(|| weight.save()),
        })
    }
}
