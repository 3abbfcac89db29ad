//! Checks of models, checkpoints and the trainer that need no process of their own, in one program.

mod any_model;
mod bert;
mod checkpoint_sizes;
mod generate_on_ranks;
mod memory;
mod mixed_precision;
#[path = "../common/numbers.rs"]
mod numbers;
mod profile;
mod saving_memory;
mod varying_shapes;
mod weights_file;
