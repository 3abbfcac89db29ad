//! Recomputation, offloading and packing save exactly the memory that they claim, by the pools' counts. Nothing else
//! changes, to the bit, except with activations kept in 16 bits.

mod activations;
mod blocks;
mod optimizer_states;
mod recompute;
mod training;
