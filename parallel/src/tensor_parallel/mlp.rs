//! The feed-forward layer of a block with sharded hidden features.

use ferrotron_autograd::Var;
use ferrotron_nn::{Activation, MlpConfig, Module, Scope};
use ferrotron_tensor::{At, Result};

use super::{Branch, ColumnParallelLinear, RowParallelLinear, TensorParallel};

/// proj(activation(fc(x))) like [`ferrotron_nn::Mlp`], with one all-reduce at the end: Shoeybi et al., figure 3a.
/// Gate and up of SwiGLU and GeGLU are sharded separately, so that a rank holds matching features.
#[derive(Debug, Clone, Module)]
pub struct ParallelMlp {
    path: String,
    fc: ColumnParallelLinear,
    proj: RowParallelLinear,
    activation: Activation,
}

impl ParallelMlp {
    /// Creates the two layers. Errors if a width is 0.
    pub fn new(scope: &Scope, tp: &TensorParallel, config: &MlpConfig) -> Result<ParallelMlp> {
        let MlpConfig { hidden, ffn_hidden, activation, bias, init, residual_init } = *config;
        let (name, blocks) = activation.first_layer();
        let outputs = vec![ffn_hidden; blocks];
        let (fc, proj) = (scope.child(name), scope.child("proj"));
        Ok(ParallelMlp {
            path: scope.path().to_string(),
            fc: ColumnParallelLinear::new(&fc, tp, hidden, &outputs, bias, init)?,
            proj: RowParallelLinear::new(&proj, tp, ffn_hidden, hidden, bias, residual_init)?,
            activation,
        })
    }

    /// (B, T, C) -> (B, T, C), with T/tp positions on both sides with sequence parallelism.
    pub fn forward(&self, x: &Var) -> Result<Var> {
        self.forward_onto(None, x).map(Branch::into_var)
    }

    /// [`ParallelMlp::forward`], with the residual if the last product can add it: see [`Branch`].
    pub fn forward_onto(&self, residual: Option<&Var>, x: &Var) -> Result<Branch> {
        if self.activation == Activation::GeluTanh {
            let x = self.fc.forward_gelu(x)?; // (B, T, F/tp)
            return self.proj.forward_of_gelu_onto(residual, &x); // (B, T, C)
        }
        let x = self.fc.forward(x)?; // (B, T, F/tp), or (B, T, 2F/tp) if gated
        let x = self.activation.apply(&x).at(&self.path)?; // (B, T, F/tp)
        self.proj.forward_onto(residual, &x) // (B, T, C)
    }
}
