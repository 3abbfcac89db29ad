//! Layers: self- and cross-attention, linear, norms, embedding, MLP, dropout.

pub(crate) mod attention;
pub(crate) mod attention_bias;
pub(crate) mod attention_config;
pub(crate) mod attention_heads;
pub(crate) mod cached_attention;
pub(crate) mod cross_attention;
pub(crate) mod dropout;
pub(crate) mod embedding;
pub(crate) mod kv_cache;
pub(crate) mod linear;
pub(crate) mod mlp;
pub(crate) mod norm;
pub(crate) mod position_bias;
pub(crate) mod rope_scaling;
pub(crate) mod rotary_tables;
