//! LayerNorm and RMSNorm.

use ferrotron_autograd::Var;
use ferrotron_tensor::{At, Result};

use crate::{Bias, Init, Module, Param, Scope, WeightDecay};

/// The gain of a norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NormGain {
    /// w, which starts at 1.
    #[default]
    Weight,
    /// 1 + w, where w starts at 0: Megatron-LM's layernorm-1p, and Gemma. 16 bits hold numbers around 0 more exactly.
    OnePlusWeight,
}

impl NormGain {
    fn weight(self, scope: &Scope, width: usize) -> Param {
        let init = match self {
            NormGain::Weight => Init::Ones,
            NormGain::OnePlusWeight => Init::Zeros,
        };
        scope.param("weight", &[width], init, WeightDecay::Off)
    }

    fn value(self, weight: &Param) -> Result<Var> {
        match self {
            NormGain::Weight => weight.var(),
            NormGain::OnePlusWeight => weight.var()?.centered_gain(),
        }
    }
}

/// LayerNorm over the last dim: Ba et al., arXiv 1607.06450.
#[derive(Debug, Clone, Module)]
pub struct LayerNorm {
    path: String,
    #[module(skip)]
    gain: NormGain,
    weight: Param,
    bias: Option<Param>,
    eps: f64,
}

impl LayerNorm {
    /// A norm of `width` features; `eps` is added to the variance.
    pub fn new(scope: &Scope, width: usize, bias: Bias, eps: f64) -> LayerNorm {
        Self::with_gain(scope, width, bias, eps, NormGain::Weight)
    }

    /// A norm of `width` features with the given gain; `eps` is added to the variance.
    pub fn with_gain(
        scope: &Scope,
        width: usize,
        bias: Bias,
        eps: f64,
        gain: NormGain,
    ) -> LayerNorm {
        LayerNorm {
            path: scope.path().to_string(),
            gain,
            weight: gain.weight(scope, width),
            bias: (bias == Bias::Yes)
                .then(|| scope.param("bias", &[width], Init::Zeros, WeightDecay::Off)),
            eps,
        }
    }

    /// (.., width) -> (.., width)
    pub fn forward(&self, x: &Var) -> Result<Var> {
        // In the order of `visit`, in which sharded parameters are gathered.
        let weight = self.gain.value(&self.weight)?;
        let bias = self.bias.as_ref().map(Param::var).transpose()?;
        x.layer_norm(&weight, bias.as_ref(), self.eps).at(&self.path)
    }
}

/// RMSNorm over the last dim: Zhang and Sennrich, arXiv 1910.07467.
#[derive(Debug, Clone, Module)]
pub struct RmsNorm {
    path: String,
    #[module(skip)]
    gain: NormGain,
    weight: Param,
    eps: f64,
}

impl RmsNorm {
    /// A norm of `width` features; `eps` is added to the mean of the squares.
    pub fn new(scope: &Scope, width: usize, eps: f64) -> RmsNorm {
        Self::with_gain(scope, width, eps, NormGain::Weight)
    }

    /// A norm of `width` features with the given gain; `eps` is added to the mean of the squares.
    pub fn with_gain(scope: &Scope, width: usize, eps: f64, gain: NormGain) -> RmsNorm {
        let weight = gain.weight(scope, width);
        RmsNorm { path: scope.path().to_string(), gain, weight, eps }
    }

    /// (.., width) -> (.., width)
    pub fn forward(&self, x: &Var) -> Result<Var> {
        x.rms_norm(&self.gain.value(&self.weight)?, self.eps).at(&self.path)
    }
}

/// Either norm, selected by a model's configuration.
#[derive(Debug, Clone, Module)]
#[expect(
    clippy::large_enum_variant,
    reason = "a model has few norms, and its tensors are elsewhere"
)]
pub enum Norm {
    /// Subtracts the mean; has a bias if asked for.
    Layer(LayerNorm),
    /// Subtracts no mean and has no bias.
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
