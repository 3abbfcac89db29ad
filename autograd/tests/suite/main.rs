//! Checks of every operation on variables and of the engine, in one program.
//!
//! Operations are rows of [`table`]; [`gradients`], [`regions`], [`dtypes`] and [`threads`] iterate it.

mod coverage;
mod dtypes;
mod gradients;
mod inputs;
mod regions;
mod table;
mod threads;
