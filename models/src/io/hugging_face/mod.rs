//! GPT-2 and [BERT](bert) in and out of Hugging Face's format: a folder with `config.json` and `model.safetensors`.
//!
//! | ours | theirs |
//! |---|---|
//! | `wte.weight`, `wpe.weight` | the same |
//! | `blocks.3.norm_1`, `norm_2` | `h.3.ln_1`, `ln_2` |
//! | `blocks.3.attn.qkv`, `attn.proj` | `h.3.attn.c_attn`, `attn.c_proj`, weights transposed |
//! | `blocks.3.mlp.fc`, `mlp.proj` | `h.3.mlp.c_fc`, `mlp.c_proj`, weights transposed |
//! | `norm_f` | `ln_f` |
//!
//! Their `Conv1D` keeps weights as (in, out), our layers as (out, in). Queries, keys and values follow one
//! another along the outputs on both sides. Names begin with `transformer.` in what `transformers` writes
//! and do not in the Hub's `gpt2`; both are read, the first is written. The causal masks of old files
//! (`h.3.attn.bias`, `attn.masked_bias`) are no weights and skipped; `lm_head.weight` is the token
//! embedding.

pub mod bert;
mod config;
mod export;
mod import;

pub use config::read_config;
pub use export::{export, export_tokenizer};
pub use import::{common_dtype, import, is_folder, read_tokenizer, stored_dtypes};

/// The prefix of every name but the head's.
const PREFIX: &str = "transformer.";

/// The head's weight: tied, so it is not stored, or stored twice.
const HEAD: &str = "lm_head.weight";

/// The layers that `transformers` keeps as (in, out), with our names.
const CONV1D: [(&str, &str); 4] = [
    ("attn.c_attn", "attn.qkv"),
    ("attn.c_proj", "attn.proj"),
    ("mlp.c_fc", "mlp.fc"),
    ("mlp.c_proj", "mlp.proj"),
];

const NORMS: [(&str, &str); 2] = [("ln_1", "norm_1"), ("ln_2", "norm_2")];

/// Whether a weight is the other way round there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Orientation {
    Same,
    Transposed,
}

/// The name, without the prefix, and the orientation that one of our parameters has there.
fn their_name(ours: &str) -> Option<(String, Orientation)> {
    let (layer, kind) = ours.rsplit_once('.')?;
    let (layer, orientation) = match layer.strip_prefix("blocks.") {
        None if layer == "norm_f" => ("ln_f".to_string(), Orientation::Same),
        None if matches!(layer, "wte" | "wpe") => (layer.to_string(), Orientation::Same),
        None => return None,
        Some(rest) => {
            let (block, layer) = rest.split_once('.')?;
            let find = |table: &[(&'static str, &str)]| {
                table.iter().find(|(_, ours)| *ours == layer).map(|(theirs, _)| *theirs)
            };
            let (theirs, orientation) = match find(&NORMS) {
                Some(theirs) => (theirs, Orientation::Same),
                None if kind == "weight" => (find(&CONV1D)?, Orientation::Transposed),
                None => (find(&CONV1D)?, Orientation::Same),
            };
            (format!("h.{block}.{theirs}"), orientation)
        }
    };
    Some((format!("{layer}.{kind}"), orientation))
}

#[cfg(test)]
mod tests;
