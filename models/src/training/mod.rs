//! Training: steps, runs, batch sizes, evaluation and benchmarks.

pub mod batch_size;
pub mod bench;
pub mod evaluate;
pub mod generate_on_ranks;
mod loss;
pub mod loss_curve;
pub(crate) mod microbatch;
pub(crate) mod model;
#[cfg(feature = "plot")]
pub mod plot;
pub mod profile;
pub mod run;
pub mod run_lock;
pub mod score;
mod stage;
pub mod stop;
pub mod trainer;
