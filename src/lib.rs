//! Ferrotron pre-trains GPT-class models. Its autograd knows about collectives, so that the same model
//! code gives the same loss in every layout.
//!
//! This crate is the façade: it re-exports the crates that do the work and a [`prelude`].
//!
//! ```
//! use ferrotron::prelude::*;
//!
//! let device = Device::cpu(2)?;
//! let scope = Scope::new(&device, DType::F32, 1234);
//! let layer = Linear::new(&scope.child("head"), 3, 2, Bias::Yes, Init::XavierUniform)?;
//! let x = Var::constant(Tensor::from_slice(&device, &[1.0_f32, 2.0, 3.0], &[1, 3])?);
//! layer.forward(&x)?.square()?.sum_all()?.backward()?;
//! assert!(layer.weight().leaf().gradient()?.is_some());
//! # Ok::<(), ferrotron::Error>(())
//! ```
//!
//! # Features
//!
//! | feature | adds |
//! |---|---|
//! | `plot` | the loss curve in the folder of a run |
//! | `tokenizers` | GPT-2's byte pairs and Hugging Face's `tokenizer.json` |
//! | `preprocess` | token files of JSON lines, Parquet and text; brings `tokenizers` |
//! | `serve` | the command `serve` of the program |
//! | `cli`, the default | all of these, and the program `ferrotron` with its command line |
//!
//! A library or program that brings its own command line turns the default off. Development builds need optimised
//! kernels:
//!
//! ```toml
//! [dependencies]
//! ferrotron = { version = "0.1", default-features = false }
//!
//! # Tensors need optimised kernels, in development builds too.
//! [profile.dev.package."*"]
//! opt-level = 3
//! ```
#![deny(missing_docs)]
#![forbid(unsafe_code)]

pub use ferrotron_autograd as autograd;
pub use ferrotron_cuda as cuda;
pub use ferrotron_models as models;
#[cfg(feature = "mpi")]
pub use ferrotron_mpi as mpi;
pub use ferrotron_nn as nn;
pub use ferrotron_parallel as parallel;
#[cfg(feature = "cli")]
pub use ferrotron_planner as planner;
pub use ferrotron_tensor as tensor;

pub use ferrotron_autograd::{
    GradcheckOptions, Leaf, Var, checkpoint, detect_anomaly, gradcheck, gradcheck_leaves, no_grad,
};
pub use ferrotron_tensor::{DType, Device, Error, ErrorKind, MemoryKind, Result, Tensor};

/// The names that most programs need.
pub mod prelude {
    pub use ferrotron_autograd::{
        Backward, GradcheckOptions, InputGrads, Leaf, Var, checkpoint, detect_anomaly, gradcheck,
        gradcheck_leaves, no_grad,
    };
    pub use ferrotron_models::checkpoint::ModuleWeights;
    pub use ferrotron_models::gpt::{Gpt, GptConfig};
    pub use ferrotron_nn::{
        Activation, Attention, AttentionConfig, Bias, Context, CrossAttention, Dropout, Embedding,
        Init, LayerNorm, Linear, Mlp, MlpConfig, Mode, Module, Norm, Optimizer, OptimizerConfig,
        Param, ParamAndGradBuffer, RmsNorm, Scope, StepConfig, WeightDecay, clip_coefficient,
    };
    pub use ferrotron_tensor::ops::argsort::SortOrder;
    pub use ferrotron_tensor::ops::reduce::KeepDims;
    pub use ferrotron_tensor::{At, DType, Device, Error, RandomKey, Result, ShardSpec, Tensor};
}

/// The examples of the documentation, compiled and run.
#[cfg(doctest)]
mod documentation {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../docs/bert.md")]
    struct BertPage;
    #[doc = include_str!("../docs/custom-op.md")]
    struct CustomOp;
    #[doc = include_str!("../docs/data.md")]
    struct Data;
    #[doc = include_str!("../docs/gpu.md")]
    struct Gpu;
    #[doc = include_str!("../docs/numerics.md")]
    struct Numerics;
    #[doc = include_str!("../docs/parallelism.md")]
    struct Parallelism;
    #[doc = include_str!("../docs/your-own-model.md")]
    struct YourOwnModel;
    #[doc = include_str!("../docs/your-own-optimizer.md")]
    struct YourOwnOptimizer;
}
