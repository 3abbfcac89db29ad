//! Attaches a loss to a value, so that backward through the value also goes through the loss.
//!
//! A stage of a pipeline hands its activation on and never sees the loss of the last stage. A loss term of its own, such
//! as the balancing loss of a router, gets its gradient when the gradient of the activation arrives.

use ferrotron_tensor::{Error, Result, Tensor};

use crate::{InputGrads, LossGradient, Var};

impl Var {
    /// The value of `self`. Backward passes its gradient on unchanged, and starts backward of the scalar `loss` with
    /// `gradient`.
    ///
    /// With y = attach(x, l): dx = dy, dl = `gradient`.
    ///
    /// ```
    /// use ferrotron_autograd::{Leaf, Var};
    /// use ferrotron_tensor::{Device, Tensor};
    /// let x = Leaf::new("x", Tensor::from_slice(&Device::cpu(1)?, &[3.0_f64, 4.0], &[2])?);
    /// let loss = x.var()?.square()?.sum_all()?;
    /// let y = x.var()?.attach_loss(&loss, 0.5)?;
    /// y.sum_all()?.backward()?;
    /// assert_eq!(x.gradient()?.unwrap().to_vec::<f64>()?, [1.0 + 3.0, 1.0 + 4.0]);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    ///
    /// # Errors
    /// A loss that is not a scalar.
    pub fn attach_loss(&self, loss: &Var, gradient: impl Into<LossGradient>) -> Result<Var> {
        if !loss.dims().is_empty() {
            let message = format!("the loss must be a scalar, got {:?}", loss.dims());
            return Err(Error::shape("attach_loss", message));
        }
        let gradient = gradient.into();
        let (device, dtype) = (loss.value().device().clone(), loss.value().dtype());
        Var::record(&[self, loss], self.value().clone(), || {
            move |dy: Tensor, grads: &mut InputGrads| {
                grads.accumulate(0, dy)?;
                grads.accumulate(1, gradient.tensor(&device, dtype, &[])?)
            }
        })
    }
}
