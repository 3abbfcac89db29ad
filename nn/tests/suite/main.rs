//! Checks of the layers, of initial values and of the optimizers, in one program.

// `#[derive(Module)]` writes `::ferrotron::nn`.
extern crate ferrotron_nn as ferrotron;

mod adafactor;
mod adafactor_reference;
mod cross_attention;
mod derive;
mod dtypes;
mod freeze;
mod gradients;
#[path = "../common/heavy_ball.rs"]
mod heavy_ball;
mod initial;
mod layers;
mod losses;
mod mixed_precision;
mod muon;
mod optimizers;
#[path = "../common/orthogonalized.rs"]
mod orthogonalized;
mod position_bias;
mod random_layers;
mod refused_steps;
mod rules;
mod sharding;
mod unused;
