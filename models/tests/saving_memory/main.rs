//! What saves memory: recomputation, offloading and packing. What it says it saves is what the pools count, and
//! nothing else changes, to the bit, but for activations kept in 16 bits.

mod activations;
mod blocks;
mod optimizer_states;
mod recompute;
mod training;
