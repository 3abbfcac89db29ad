//! Checks of every operation on variables and of the engine, in one program.
//!
//! Operations are rows of [`table`]; [`gradients`], [`regions`], [`hooks`], [`dtypes`] and [`threads`] iterate it.

mod anomaly;
mod coverage;
mod dtypes;
mod engine;
mod gradients;
mod hooks;
mod inputs;
mod leaves;
mod methods;
mod regions;
mod saved;
mod scores;
mod shards;
mod table;
mod threads;
