//! Tensor and sequence parallelism: layers sharded over the ranks along the tensor axis.
//!
//! Shoeybi et al., arXiv 1909.08053, section 3 (tensor parallel); Korthikanti et al., arXiv 2205.05198,
//! section 4.2 (sequence parallel). A layer in a group of one is the plain layer.
//!
//! ```text
//!               x whole on every rank                        x: every rank has some positions
//!                       |                                                |
//!     copy_to_tp (backward: all-reduce)             gather_from_sp (backward: reduce-scatter)
//!                       |                                                |
//!   ColumnParallelLinear: some outputs                     ColumnParallelLinear
//!                       |                                                |
//!     attention heads, or an activation                   heads, or an activation
//!                       |                                                |
//!    RowParallelLinear: some inputs                          RowParallelLinear
//!                       |                                                |
//!   reduce_from_tp (forward: all-reduce)         reduce_scatter_to_sp (backward: all-gather)
//! ```

mod attention;
mod branch;
mod cross_entropy;
mod embedding;
mod linear;
pub mod mappings;
mod mlp;
mod sharding;

pub use attention::ParallelAttention;
pub use branch::Branch;
pub use cross_entropy::HeadParams;
pub use embedding::VocabParallelEmbedding;
pub use linear::{ColumnParallelLinear, RowParallelLinear};
pub use mlp::ParallelMlp;
pub use sharding::{SequenceParallel, TensorParallel};
