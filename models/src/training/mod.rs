//! Training: steps, runs, batch sizes, evaluation and benchmarks.

pub mod batch_size;
pub mod bench;
pub mod evaluate;
mod loss;
pub(crate) mod microbatch;
pub(crate) mod model;
pub mod plot;
pub mod run;
pub mod run_lock;
mod stage;
pub mod stop;
pub mod trainer;
