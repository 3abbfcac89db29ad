//! Gradients of softmax and log-softmax, computed from their saved values.

use ferrotron_tensor::ops::softmax as kernels;
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

/// e^x / sum e^x over `dim`.
pub(crate) fn softmax(x: &Var, dim: isize) -> Result<Var> {
    let _span = forward_span("softmax");
    let y = kernels::softmax(x.value(), dim)?;
    Var::record(&[x], y.clone(), || {
        let y = Saved::tensor(&y);
        SoftmaxBackward { name: "softmax", y, dim, gradient: kernels::softmax_backward }
    })
}

/// x - log(sum e^x) over `dim`.
pub(crate) fn log_softmax(x: &Var, dim: isize) -> Result<Var> {
    let _span = forward_span("log_softmax");
    let y = kernels::log_softmax(x.value(), dim)?;
    Var::record(&[x], y.clone(), || {
        let y = Saved::tensor(&y);
        SoftmaxBackward { name: "log_softmax", y, dim, gradient: kernels::log_softmax_backward }
    })
}
