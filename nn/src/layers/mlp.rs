//! The feed-forward layer of a transformer block.

use ferrotron_autograd::Var;
use ferrotron_tensor::{At, Result};

use crate::{Bias, Init, Linear, Module, Scope};

/// The nonlinearity of an [`Mlp`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// GELU, tanh form: GPT-2.
    GeluTanh,
    /// GELU, exact form.
    GeluErf,
    /// max(x, 0)
    Relu,
    /// silu(gate) * up: Shazeer, arXiv 2002.05202; Llama.
    SwiGlu,
    /// gelu(gate) * up, with GELU in its tanh form: Shazeer, arXiv 2002.05202; Gemma.
    GeGlu,
}

impl Activation {
    /// The name of the first layer, and its number of outputs per hidden feature.
    pub fn first_layer(self) -> (&'static str, usize) {
        match self {
            Activation::SwiGlu | Activation::GeGlu => ("gate_up", 2),
            _ => ("fc", 1),
        }
    }

    /// (.., F) -> (.., F). SwiGLU and GeGLU take gate and up, (.., 2F).
    pub fn apply(self, x: &Var) -> Result<Var> {
        match self {
            Activation::GeluTanh => x.gelu_tanh(),
            Activation::GeluErf => x.gelu_erf(),
            Activation::Relu => x.relu(),
            Activation::SwiGlu => x.swiglu(),
            Activation::GeGlu => x.geglu(),
        }
    }
}

/// Configuration of an [`Mlp`].
#[derive(Debug, Clone, Copy)]
pub struct MlpConfig {
    /// Width of input and output.
    pub hidden: usize,
    /// Hidden width, F.
    pub ffn_hidden: usize,
    /// The nonlinearity.
    pub activation: Activation,
    /// Whether both layers have a bias.
    pub bias: Bias,
    /// Initialisation of the first layer.
    pub init: Init,
    /// Initialisation of the second layer, whose output is added to the residual stream.
    pub residual_init: Init,
}

impl MlpConfig {
    /// GELU in tanh form with biases; initial weights have deviation 0.02.
    pub const fn new(hidden: usize, ffn_hidden: usize) -> MlpConfig {
        let init = Init::Normal { std: 0.02 };
        MlpConfig {
            hidden,
            ffn_hidden,
            activation: Activation::GeluTanh,
            bias: Bias::Yes,
            init,
            residual_init: init,
        }
    }
}

/// proj(activation(fc(x))). With SwiGLU and GeGLU the first layer computes gate and up together: the first half of its
/// outputs is the gate.
///
/// ```
/// use ferrotron_autograd::Var;
/// use ferrotron_nn::{Activation, Bias, Mlp, MlpConfig, Module, Scope};
/// use ferrotron_tensor::{DType, Device, Tensor};
/// let device = Device::cpu(1)?;
/// let config = MlpConfig { activation: Activation::SwiGlu, bias: Bias::No, ..MlpConfig::new(8, 16) };
/// let mlp = Mlp::new(&Scope::new(&device, DType::F32, 1234).child("mlp"), &config)?;
/// let x = Var::constant(Tensor::zeros(&device, DType::F32, &[2, 5, 8])?);
/// assert_eq!(mlp.forward(&x)?.dims(), [2, 5, 8]);
/// assert_eq!(mlp.params()[0].name(), "mlp.gate_up.weight");
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, Module)]
pub struct Mlp {
    path: String,
    fc: Linear,
    proj: Linear,
    activation: Activation,
}

impl Mlp {
    /// Creates the two layers. Errors if a width is 0.
    pub fn new(scope: &Scope, config: &MlpConfig) -> Result<Mlp> {
        let (name, blocks) = config.activation.first_layer();
        let blocks = vec![config.ffn_hidden; blocks];
        let (fc, width) = (scope.child(name), blocks.iter().sum());
        Ok(Mlp {
            path: scope.path().to_string(),
            fc: Linear::new(&fc, config.hidden, width, config.bias, config.init)?
                .packed(&blocks)?,
            proj: Linear::new(
                &scope.child("proj"),
                config.ffn_hidden,
                config.hidden,
                config.bias,
                config.residual_init,
            )?,
            activation: config.activation,
        })
    }

    /// (B, T, C) -> (B, T, C)
    pub fn forward(&self, x: &Var) -> Result<Var> {
        if self.activation == Activation::GeluTanh {
            let x = self.fc.forward_gelu(x)?; // (B, T, F)
            return self.proj.forward_of_gelu(&x); // (B, T, C)
        }
        let x = self.fc.forward(x)?; // (B, T, F), or (B, T, 2F) if gated
        let x = self.activation.apply(&x).at(&self.path)?; // (B, T, F)
        self.proj.forward(&x) // (B, T, C)
    }
}
