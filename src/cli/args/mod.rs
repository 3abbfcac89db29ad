//! Groups of options, which subcommands share.

pub(super) mod bert;
pub(super) mod data;
pub(super) mod device;
pub(super) mod evaluation;
pub(super) mod learning_rate;
pub(super) mod model;
pub(super) mod offload;
pub(super) mod optimizer;
pub(super) mod packing;
pub(super) mod parallel;
pub(super) mod precision;
pub(super) mod ranks;
pub(super) mod run;
pub(super) mod tensorboard;
pub(super) mod train;
