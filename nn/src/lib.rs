//! Layers, losses, initialisation, optimizers and schedules.
//!
//! A layer is a struct of [`Param`]s with a `forward`; there is no registration and no state besides the parameters.
//! All other inputs of a pass are in a [`Context`].
#![deny(missing_docs)]

mod attention;
mod attention_heads;
mod axis;
mod buffer_config;
mod buffers;
mod context;
mod dropout;
mod embedding;
mod init;
mod linear;
mod loss_scale;
mod mlp;
mod norm;
mod optimizer;
mod param;
mod param_group;
pub mod schedule;

pub use attention::{Attention, AttentionConfig, KvCache};
pub use attention_heads::AttentionHeads;
pub use axis::{Axis, AxisSet};
pub use buffer_config::{BufferConfig, GradDType, ShardUnit, Sharding};
pub use buffers::ParamAndGradBuffer;
pub use context::{Context, DimShard, Mode};
pub use dropout::Dropout;
pub use embedding::Embedding;
pub use init::Init;
pub use linear::{Bias, Linear};
pub use loss_scale::{LossScale, LossScaler};
pub use mlp::{Activation, Mlp, MlpConfig};
pub use norm::{LayerNorm, Norm, RmsNorm};
pub use optimizer::{
    AdafactorConfig, MASTER, Optimizer, OptimizerConfig, ReduceSums, Rounding, ShardedSum,
    StepConfig, StepSize, UpdateConfig, WeightUpdate,
};
pub use param::{Module, Param, Scope, WeightDecay};
pub use param_group::ParamAndGradBucket;

pub use ferrotron_tensor::ops::outcome::clip_coefficient;
