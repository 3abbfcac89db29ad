//! Checks of operations and methods against naive arithmetic in f64, in one program.

mod attention;
mod attention_bias;
mod attention_masks;
mod edge_cases;
mod methods;
mod norms;
#[path = "../reference/mod.rs"]
mod reference;
mod ring_attention;
mod rotary;
mod vocab_shards;
