//! Training: steps, runs, batch sizes, evaluation and benchmarks.

pub mod batch_size;
pub mod bench;
pub mod evaluate;
pub mod plot;
pub mod run;
pub mod run_lock;
pub mod stop;
pub mod trainer;
