//! Checks of the layers, of initial values and of the optimizers, in one program.

// `#[derive(Module)]` writes `::ferrotron::nn`.
extern crate ferrotron_nn as ferrotron;

mod adafactor;
mod adafactor_reference;
mod derive;
mod freeze;
mod gradients;
mod initial;
mod layers;
mod losses;
mod mixed_precision;
mod muon;
mod optimizers;
mod refused_steps;
mod rules;
mod sharding;
mod unused;
