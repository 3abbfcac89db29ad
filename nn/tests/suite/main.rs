//! Checks of the layers, of initial values and of the optimizers, in one program.

// `#[derive(Module)]` writes `::ferrotron::nn`.
extern crate ferrotron_nn as ferrotron;

mod adafactor;
mod adafactor_reference;
mod cross_attention;
mod derive;
mod freeze;
mod gradients;
mod initial;
mod layers;
mod losses;
mod mixed_precision;
mod muon;
mod optimizers;
mod position_bias;
mod refused_steps;
mod rules;
mod sharding;
mod unused;
