//! Automatic differentiation: variables with history, leaves that collect gradients, the backward engine, checkpoint
//! regions and gradient checks.
//!
//! ```
//! use ferrotron_autograd::{Leaf, Var};
//! use ferrotron_tensor::{Device, Tensor};
//!
//! let device = Device::cpu(1)?;
//! let w = Leaf::new("w", Tensor::from_slice(&device, &[2.0_f64, -1.0], &[2])?);
//! let x = Var::constant(Tensor::from_slice(&device, &[3.0_f64, 5.0], &[2])?);
//!
//! let loss = w.var()?.mul(&x)?.sum_all()?;
//! loss.backward()?;
//! assert_eq!(loss.value().item()?, 1.0);
//! assert_eq!(w.gradient()?.unwrap().to_f64()?, [3.0, 5.0]);
//! # Ok::<(), ferrotron_tensor::Error>(())
//! ```
//!
//! There is no global tape. A [`Var`] owns its node, and a node owns the values that its gradient needs; unreferenced
//! nodes are freed. Second-order gradients are not supported.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod checkpoint;
mod engine;
mod gradcheck;
mod leaf;
mod lock;
mod loss_gradient;
pub mod ops;
mod saved;
mod span;
mod spec;
mod var;

pub use checkpoint::{checkpoint, checkpoint_discard_output};
pub use engine::anomaly::detect_anomaly;
pub use engine::calls::CallCounts;
pub use engine::deferred::{DeferredGrads, WeightGrads};
pub use engine::node::{Backward, Cotangents, InputGrads};
pub use engine::recording::no_grad;
pub use engine::{GradientEdge, backward};
pub use ferrotron_tensor::ops::matmul::Accum;
pub use gradcheck::{GradcheckOptions, Mismatch, gradcheck, gradcheck_leaves};
pub use leaf::{Fetch, GradientReduction, HookId, Leaf, SharedFlatBuffer, missing_gradients};
pub use lock::lock;
pub use loss_gradient::LossGradient;
pub use saved::Saved;
pub use saved::hooks::saved_tensors_hooks;
pub use saved::packing::{
    ActivationCompression, ActivationCompressionConfig, Offloaded, Offloader, ZeroEncoding,
};
pub use saved::slot::{Packed, SavedKind, SavedTensorHandle};
pub use span::forward_span;
pub use var::Var;
