//! The linear layer y = x W^T + b.

use ferrotron_autograd::Var;
use ferrotron_autograd::ops::linear::Gelu;
use ferrotron_tensor::{At, Error, Result};

use crate::{Init, Module, Param, Scope, WeightDecay};

/// Whether a layer has a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bias {
    /// Has a bias, initialised to zeros.
    Yes,
    /// Has no bias.
    No,
}

/// y = x W^T + b with W (out, in) and b (out).
///
/// ```
/// use ferrotron_autograd::Var;
/// use ferrotron_nn::{Bias, Init, Linear, Scope};
/// use ferrotron_tensor::{DType, Device, Tensor};
/// let device = Device::cpu(1)?;
/// let layer = Linear::new(&Scope::new(&device, DType::F32, 0).child("head"), 3, 5, Bias::Yes, Init::XavierUniform)?;
/// let x = Var::constant(Tensor::zeros(&device, DType::F32, &[2, 3])?);
/// assert_eq!(layer.forward(&x)?.dims(), [2, 5]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, Module)]
pub struct Linear {
    path: String,
    weight: Param,
    bias: Option<Param>,
}

impl Linear {
    /// A layer from `inputs` to `outputs` features. Errors if either is 0.
    pub fn new(
        scope: &Scope,
        inputs: usize,
        outputs: usize,
        bias: Bias,
        init: Init,
    ) -> Result<Linear> {
        if inputs == 0 || outputs == 0 {
            return Err(Error::config(
                "linear",
                format!("sizes must be positive, got {inputs} inputs and {outputs} outputs"),
            )
            .at(scope.path()));
        }
        Ok(Linear {
            path: scope.path().to_string(),
            weight: scope.param("weight", &[outputs, inputs], init, WeightDecay::On),
            bias: (bias == Bias::Yes)
                .then(|| scope.param("bias", &[outputs], Init::Zeros, WeightDecay::Off)),
        })
    }

    /// Declares an output head, one row of weights per token, which Muon leaves to AdamW.
    ///
    /// ```
    /// use ferrotron_nn::{Bias, Init, Linear, Scope};
    /// use ferrotron_tensor::{DType, Device};
    /// let scope = Scope::new(&Device::cpu(1)?, DType::F32, 0);
    /// let head = Linear::new(&scope.child("head"), 8, 50, Bias::No, Init::XavierNormal)?.as_head();
    /// # drop(head);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    #[must_use]
    pub fn as_head(self) -> Linear {
        Linear { weight: self.weight.as_embedding(), ..self }
    }

    /// Declares that the outputs are blocks of these sizes: see [`Param::packed`].
    pub(crate) fn packed(self, blocks: &[usize]) -> Result<Linear> {
        let Linear { path, weight, bias } = self;
        let bias = bias.map(|bias| bias.packed(blocks)).transpose()?;
        Ok(Linear { path, weight: weight.packed(blocks)?, bias })
    }

    /// (.., in) -> (.., out). Parameters kept in f32 are cast to the dtype of `x`. Errors if the last dim of `x` differs.
    pub fn forward(&self, x: &Var) -> Result<Var> {
        let (weight, bias) = self.vars(x)?;
        x.linear(&weight, bias.as_ref()).at(&self.path)
    }

    /// GELU of [`Linear::forward`], tanh form, for [`Linear::forward_of_gelu`]: see [`Var::linear_gelu`].
    pub fn forward_gelu(&self, x: &Var) -> Result<Gelu> {
        let (weight, bias) = self.vars(x)?;
        x.linear_gelu(&weight, bias.as_ref()).at(&self.path)
    }

    /// [`Linear::forward`] of GELU: see [`Gelu::linear`].
    pub fn forward_of_gelu(&self, x: &Gelu) -> Result<Var> {
        let (weight, bias) = self.vars(x.hidden())?;
        x.linear(&weight, bias.as_ref()).at(&self.path)
    }

    /// Weight and bias for activations like `x`.
    fn vars(&self, x: &Var) -> Result<(Var, Option<Var>)> {
        let bias = self.bias.as_ref().map(|bias| bias.var_as(x.dtype())).transpose()?;
        Ok((self.weight.var_as(x.dtype())?, bias))
    }

    /// W (out, in).
    pub fn weight(&self) -> &Param {
        &self.weight
    }

    /// b (out), if there is one.
    pub fn bias(&self) -> Option<&Param> {
        self.bias.as_ref()
    }
}
