//! Layers, losses, initialisation, optimizers and schedules.
//!
//! A layer is a struct of [`Param`]s with a `forward` and `#[derive(Module)]`; there is no registration and no state
//! besides the parameters.
//! All other inputs of a pass are in a [`Context`].
#![deny(missing_docs)]
#![forbid(unsafe_code)]

// `#[derive(Module)]` writes `::ferrotron::nn`, the name of this crate in the facade. Crates below the facade say `extern
// crate ferrotron_nn as ferrotron`.
extern crate self as ferrotron;

mod context;
mod layers;
pub mod loss;
mod optimizer;
mod params;

pub use ferrotron_derive::Module;

pub use context::{Context, DimShard, Mode};
pub use layers::attention::Attention;
pub use layers::attention_bias::AttentionBias;
pub use layers::attention_config::AttentionConfig;
pub use layers::attention_heads::AttentionHeads;
pub use layers::cross_attention::CrossAttention;
pub use layers::dropout::Dropout;
pub use layers::embedding::Embedding;
pub use layers::kv_cache::KvCache;
pub use layers::linear::{Bias, Linear};
pub use layers::mlp::{Activation, Mlp, MlpConfig};
pub use layers::norm::{LayerNorm, Norm, NormGain, RmsNorm};
pub use layers::position_bias::PositionBias;
pub use layers::rope_scaling::RopeScaling;
pub use optimizer::loss_scale::{LossScale, LossScaleRule, LossScaleState, LossScaler};
pub use optimizer::schedule;
pub use optimizer::{
    AdafactorConfig, Block, CustomRule, EMA, MASTER, MuonConfig, MuonScale, Nesterov, NewtonSchulz,
    Optimizer, OptimizerConfig, Rounding, ShardUnit, StateShape, StateSpec, StepConfig, StepSize,
    StepTensors, UpdateConfig, UpdateRule, UpdateStep, WeightUpdate,
};
pub use params::axis::{Axis, AxisSet};
pub use params::buffer_config::{BufferConfig, GradDType, Sharding, Unused};
#[doc(hidden)] // for the code that `#[derive(Module)]` writes
pub use params::field;
pub use params::init::{Fan, Init};
pub use params::module::Module;
pub use params::options::{ParamOptions, check_option_patterns, option_patterns};
pub use params::param::{Param, WeightDecay};
pub use params::param_and_grad_bucket::{ParamAndGradBucket, unused_error};
pub use params::param_and_grad_buffer::ParamAndGradBuffer;
pub use params::param_patterns::ParamPatterns;
pub use params::random_site::RandomSite;
pub use params::scope::{Scope, random_sites};
pub use params::summary::{ModuleSummary, SummaryRow};

pub use ferrotron_tensor::ops::attention::AttentionMask;
pub use ferrotron_tensor::ops::outcome::clip_coefficient;

/// Exchanges along the tensor axis that update rules need, and that the crate `parallel` carries out.
pub mod shard_exchange {
    pub use crate::optimizer::{
        ExchangeSize, GatheredShard, NoExchange, ShardExchange, ShardedSum, gathered_shards,
    };
}

#[doc(hidden)] // for the code that `#[derive(Module)]` writes
pub mod nn {
    pub use crate::{Module, Param, field};
}
