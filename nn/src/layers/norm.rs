//! LayerNorm and RMSNorm.

use ferrotron_autograd::Var;
use ferrotron_tensor::{At, Result};

use crate::{Bias, Init, Module, Param, Scope, WeightDecay};

/// LayerNorm over the last dim: Ba et al., arXiv 1607.06450.
#[derive(Debug, Clone, Module)]
pub struct LayerNorm {
    path: String,
    weight: Param,
    bias: Option<Param>,
    eps: f64,
}

impl LayerNorm {
    /// A norm of `width` features; `eps` is added to the variance.
    pub fn new(scope: &Scope, width: usize, bias: Bias, eps: f64) -> LayerNorm {
        LayerNorm {
            path: scope.path().to_string(),
            weight: scope.param("weight", &[width], Init::Ones, WeightDecay::Off),
            bias: (bias == Bias::Yes)
                .then(|| scope.param("bias", &[width], Init::Zeros, WeightDecay::Off)),
            eps,
        }
    }

    /// (.., width) -> (.., width)
    pub fn forward(&self, x: &Var) -> Result<Var> {
        // In the order of `visit`, in which sharded parameters are gathered.
        let weight = self.weight.var()?;
        let bias = self.bias.as_ref().map(Param::var).transpose()?;
        x.layer_norm(&weight, bias.as_ref(), self.eps).at(&self.path)
    }
}

/// RMSNorm over the last dim: Zhang and Sennrich, arXiv 1910.07467.
#[derive(Debug, Clone, Module)]
pub struct RmsNorm {
    path: String,
    weight: Param,
    eps: f64,
}

impl RmsNorm {
    /// A norm of `width` features; `eps` is added to the mean of the squares.
    pub fn new(scope: &Scope, width: usize, eps: f64) -> RmsNorm {
        RmsNorm {
            path: scope.path().to_string(),
            weight: scope.param("weight", &[width], Init::Ones, WeightDecay::Off),
            eps,
        }
    }

    /// (.., width) -> (.., width)
    pub fn forward(&self, x: &Var) -> Result<Var> {
        x.rms_norm(&self.weight.var()?, self.eps).at(&self.path)
    }
}

/// Either norm, selected by a model's configuration.
#[derive(Debug, Clone, Module)]
#[expect(
    clippy::large_enum_variant,
    reason = "a model has few norms, and its tensors are elsewhere"
)]
pub enum Norm {
    /// With mean and optional bias.
    Layer(LayerNorm),
    /// Without mean and bias.
    Rms(RmsNorm),
}

impl Norm {
    /// (.., width) -> (.., width)
    pub fn forward(&self, x: &Var) -> Result<Var> {
        match self {
            Norm::Layer(norm) => norm.forward(x),
            Norm::Rms(norm) => norm.forward(x),
        }
    }
}
