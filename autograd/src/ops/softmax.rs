//! Gradients of softmax and log-softmax, computed from their saved values.

use ferrotron_tensor::ops::softmax::{
    log_softmax, log_softmax_backward, softmax, softmax_backward,
};
use ferrotron_tensor::{Result, Tensor};

use crate::{Backward, Cotangents, InputGrads, Saved, Var, forward_span};

struct SoftmaxBackward {
    name: &'static str,
    y: Saved,
    dim: isize,
    gradient: fn(&Tensor, Tensor, isize) -> Result<Tensor>,
}

impl Backward for SoftmaxBackward {
    fn name(&self) -> &'static str {
        self.name
    }

    fn saved(&self) -> Vec<Tensor> {
        self.y.resident_tensor().into_iter().collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        dx.accumulate(0, (self.gradient)(&self.y.value()?, dy.single()?, self.dim)?)
    }
}

impl Var {
    /// e^x / sum e^x over `dim`.
    pub fn softmax(&self, dim: isize) -> Result<Var> {
        let _span = forward_span("softmax");
        let y = softmax(self.value(), dim)?;
        Var::record(&[self], y.clone(), || {
            let y = Saved::tensor(&y);
            SoftmaxBackward { name: "softmax", y, dim, gradient: softmax_backward }
        })
    }

    /// x - log(sum e^x) over `dim`.
    pub fn log_softmax(&self, dim: isize) -> Result<Var> {
        let _span = forward_span("log_softmax");
        let y = log_softmax(self.value(), dim)?;
        Var::record(&[self], y.clone(), || {
            let y = Saved::tensor(&y);
            SoftmaxBackward { name: "log_softmax", y, dim, gradient: log_softmax_backward }
        })
    }
}
