//! Gradients of softmax and log-softmax, from their values.

use ferrotron_tensor::ops::softmax::{
    log_softmax, log_softmax_backward, softmax, softmax_backward,
};
use ferrotron_tensor::{Result, Tensor};

use crate::{Grads, Saved, Var};

impl Var {
    /// e^x / sum e^x over `dim`.
    pub fn softmax(&self, dim: isize) -> Result<Var> {
        let y = softmax(self.value(), dim)?;
        Var::record(&[self], y.clone(), || {
            let y = Saved::tensor(&y);
            move |dy: Tensor, dx: &mut Grads| dx.give(0, softmax_backward(&y.value()?, dy, dim)?)
        })
    }

    /// x - log(sum e^x) over `dim`.
    pub fn log_softmax(&self, dim: isize) -> Result<Var> {
        let y = log_softmax(self.value(), dim)?;
        Var::record(&[self], y.clone(), || {
            let y = Saved::tensor(&y);
            move |dy: Tensor, dx: &mut Grads| {
                dx.give(0, log_softmax_backward(&y.value()?, dy, dim)?)
            }
        })
    }
}
