//! BERT in and out of Hugging Face's format: a folder with `config.json` and `model.safetensors`.
//!
//! | ours | theirs, `model_type` bert | `model_type` megatron-bert |
//! |---|---|---|
//! | norms | behind the residual additions | before attention and MLP |
//! | `wte`, `wpe`, `wse` | `bert.embeddings.word_embeddings`, `position_embeddings`, `token_type_embeddings` | the same |
//! | `embedding_norm` | `bert.embeddings.LayerNorm` | |
//! | `blocks.3.norm_1` | `bert.encoder.layer.3.attention.output.LayerNorm` | `attention.ln` |
//! | `blocks.3.norm_2` | `output.LayerNorm` | `ln` |
//! | `blocks.3.attn.qkv` | `attention.self.query`, `key`, `value` | the same |
//! | `blocks.3.attn.proj` | `attention.output.dense` | the same |
//! | `blocks.3.mlp.fc`, `mlp.proj` | `intermediate.dense`, `output.dense` | the same |
//! | `norm_f` | | `bert.encoder.ln` |
//! | `mlm_head.transform`, `norm`, `bias` | `cls.predictions.transform.dense`, `transform.LayerNorm`, `bias` | the same |
//! | `pooler`, `binary_head` | `bert.pooler.dense`, `cls.seq_relationship` | the same |
//! | `multichoice_head` | `classifier` | the same |
//!
//! A model with the head for the order is `BertForPreTraining` there, one without it `BertForMaskedLM`, and one that
//! chooses among answers `BertForMultipleChoice`. Old files have
//! `gamma` and `beta` for the weight and bias of norms. `cls.predictions.decoder` is the token embedding and the bias
//! once more.

mod config;

use ferrotron_nn::{Module, Scope};
use ferrotron_tensor::{DType, Device, Error, Result};
use std::path::Path;

use super::export::{ReadParam, write_folder};
use super::files::open_files;
use super::mapping::{Form, Mapping};
use super::weights::{CurrentName, FolderWeights, Naming, stored_weights};
use crate::model::bert::{Bert, BertConfig, NormPlacement};

use config::{parse, write_config};

/// A weight of the head for the order, by which its presence is known.
const ORDER_HEAD: &str = "cls.seq_relationship.weight";

/// Tensors that are stored twice, each with its original.
const TIED: [(&str, &str); 2] = [
    ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ("cls.predictions.decoder.bias", "cls.predictions.bias"),
];

/// Layers outside of the blocks.
const LAYERS: [(&str, &str); 11] = [
    ("wte", "bert.embeddings.word_embeddings"),
    ("wpe", "bert.embeddings.position_embeddings"),
    ("wse", "bert.embeddings.token_type_embeddings"),
    ("embedding_norm", "bert.embeddings.LayerNorm"),
    ("norm_f", "bert.encoder.ln"),
    ("mlm_head", "cls.predictions"),
    ("mlm_head.transform", "cls.predictions.transform.dense"),
    ("mlm_head.norm", "cls.predictions.transform.LayerNorm"),
    ("pooler", "bert.pooler.dense"),
    ("binary_head", "cls.seq_relationship"),
    ("multichoice_head", "classifier"),
];

/// Layers of a block; the norms are those of [`NormPlacement::Post`] and [`NormPlacement::Pre`].
const POST_NORMS: [(&str, &str); 2] =
    [("norm_1", "attention.output.LayerNorm"), ("norm_2", "output.LayerNorm")];
const PRE_NORMS: [(&str, &str); 2] = [("norm_1", "attention.ln"), ("norm_2", "ln")];
const BLOCK: [(&str, &str); 3] = [
    ("attn.proj", "attention.output.dense"),
    ("mlp.fc", "intermediate.dense"),
    ("mlp.proj", "output.dense"),
];

/// The tensors there that make the parameter `ours`, of `rows` rows.
fn mapping(ours: &str, rows: usize, placement: NormPlacement) -> Option<Mapping> {
    let (layer, kind) = ours.rsplit_once('.')?;
    let find = |table: &[(&str, &'static str)], layer: &str| {
        table.iter().find(|(ours, _)| *ours == layer).map(|(_, theirs)| *theirs)
    };
    let Some(rest) = layer.strip_prefix("blocks.") else {
        return Some(Mapping::same(format!("{}.{kind}", find(&LAYERS, layer)?), rows));
    };
    let (block, layer) = rest.split_once('.')?;
    let norms = match placement {
        NormPlacement::Post => &POST_NORMS,
        NormPlacement::Pre => &PRE_NORMS,
    };
    let layers = match find(norms, layer).or_else(|| find(&BLOCK, layer)) {
        Some(theirs) => vec![theirs.to_string()],
        None if layer == "attn.qkv" => {
            ["query", "key", "value"].map(|part| format!("attention.self.{part}")).into()
        }
        None => return None,
    };
    let rows = rows / layers.len();
    let name = |layer: &String| (format!("bert.encoder.layer.{block}.{layer}.{kind}"), rows);
    Some(Mapping { parts: layers.iter().map(name).collect(), form: Form::Same })
}

/// The name of a stored tensor in new files; `None` for a buffer.
pub(super) fn current_name(key: &str) -> Option<String> {
    let name = match key.rsplit_once('.') {
        Some((norm, "gamma")) => format!("{norm}.weight"),
        Some((norm, "beta")) => format!("{norm}.bias"),
        _ => key.to_string(),
    };
    (name != "bert.embeddings.position_ids").then_some(name)
}

/// The configuration of the BERT in `folder`, whose weights tell whether it has a head for the order. Dropout is a
/// matter of training and stays 0.
///
/// # Errors
/// A folder without a readable `config.json` or weights; a model other than BERT or a variant that is not supported, by
/// name.
pub fn read_config(folder: &Path) -> Result<BertConfig> {
    let files = open_files(folder).map_err(|fault| Error::io("hugging_face", fault))?;
    parse(
        folder,
        stored_weights(&files, &(Box::new(current_name) as CurrentName)).contains_key(ORDER_HEAD),
    )
}

/// Imports the BERT in `folder`, one file or several, with weights of the given dtype. They are the same bits where
/// they are stored in it, else rounded to nearest.
///
/// ```no_run
/// use ferrotron_models::hugging_face;
/// use ferrotron_tensor::{DType, Device};
/// # let folder = std::path::Path::new("models/bert-base-uncased");
/// let bert = hugging_face::bert::import(folder, &Device::cpu(2)?, DType::F32)?;
/// println!("{} parameters", bert.config().num_parameters());
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// # Errors
/// Errors of [`read_config`]; malformed or missing files; tensors that are missing, unknown or of another shape; an
/// output layer of its own.
pub fn import(folder: &Path, device: &Device, dtype: DType) -> Result<Bert> {
    let config = read_config(folder)?;
    // Every weight is read, so the seed decides nothing.
    let bert = Bert::new(&Scope::new(device, dtype, 0), &config)?;
    weights(folder, &config)?.fill(&bert.params())?;
    Ok(bert)
}

/// Opens the weights of the BERT in `folder`, for a model of `config` in any layout.
///
/// # Errors
/// Malformed or missing files; tensors that are missing or unknown; an output layer of its own.
pub fn weights(folder: &Path, config: &BertConfig) -> Result<FolderWeights> {
    open_weights(folder, config, &[])
}

/// Opens the weights of the BERT in `folder` for a model that is fine-tuned: the head for choices, and the pooler, need not
/// be there.
///
/// # Errors
/// Errors of [`weights`].
pub fn pretrained_weights(folder: &Path, config: &BertConfig) -> Result<FolderWeights> {
    open_weights(folder, config, &["multichoice_head.", "pooler."])
}

fn open_weights(
    folder: &Path,
    config: &BertConfig,
    optional: &'static [&'static str],
) -> Result<FolderWeights> {
    let placement = config.norm_placement;
    let naming = Naming {
        family: "this BERT",
        current_name: Box::new(current_name),
        mapping: Box::new(move |ours, rows| mapping(ours, rows, placement)),
        tied: TIED.map(|(copy, original)| (copy, original.to_string())).into(),
        left_out: match (config.num_choices, config.binary_head) {
            (Some(_), _) => &["cls."],
            (None, true) => &[],
            (None, false) => &["bert.pooler."],
        },
        optional,
    };
    FolderWeights::open::<Bert>(folder, naming, config)
}

/// Writes `bert` into `folder` as `save_pretrained` would. `from_pretrained(folder)` of `BertForPreTraining` or,
/// without a head for the order, `BertForMaskedLM` loads the same numbers. If the norms are before attention and MLP,
/// their `MegatronBert` twins do.
///
/// ```
/// use ferrotron_models::bert::{Bert, BertConfig, NormPlacement};
/// use ferrotron_models::hugging_face;
/// use ferrotron_nn::Scope;
/// use ferrotron_tensor::{DType, Device};
/// # let dir = tempfile::tempdir().unwrap();
/// # let folder = dir.path().join("export");
/// let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1234);
/// let bert = Bert::new(&scope, &BertConfig::new(NormPlacement::Pre, 65, 2, 32, 4, 16))?;
/// hugging_face::bert::export(&bert, &folder)?;
/// assert_eq!(hugging_face::bert::read_config(&folder)?, *bert.config());
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// # Errors
/// A folder that cannot be written or is a checkpoint.
pub fn export(bert: &Bert, folder: &Path) -> Result<()> {
    export_from(bert, None, folder, &mut |param| param.leaf().value())
}

/// Exports as [`export`] does, if `model_type` is the one that the model has there.
///
/// # Errors
/// Errors of [`export`]; another `model_type`.
pub fn export_as(bert: &Bert, model_type: &str, folder: &Path) -> Result<()> {
    export_from(bert, Some(model_type), folder, &mut |param| param.leaf().value())
}

/// Exports as [`export`] or [`export_as`] does a model whose parameters need not be in memory, as
/// [`export_from`](super::export_from) does for a GPT.
///
/// # Errors
/// Errors of [`export_as`] and of `read`.
pub fn export_from(
    bert: &Bert,
    model_type: Option<&str>,
    folder: &Path,
    read: &mut ReadParam,
) -> Result<()> {
    let (params, placement) = (bert.params(), bert.config().norm_placement);
    let own = config::model_type(placement);
    if let Some(model_type) = model_type.filter(|model_type| *model_type != own) {
        let message = format!(
            "this model cannot be a Hugging Face {model_type}: a BERT with its norm-placement is a {own}"
        );
        return Err(Error::config("hugging_face", message));
    }
    let mapped = params.iter().map(|param| {
        let rows = param.shard_spec().global_dims()[0];
        let mapping = mapping(param.name(), rows, placement).ok_or_else(|| {
            Error::config("hugging_face", format!("BERT has no '{}'", param.name()))
        })?;
        Ok((param, mapping))
    });
    let mapped = mapped.collect::<Result<Vec<_>>>()?;
    let config = write_config(bert.config(), params[0].compute_dtype());
    write_folder(folder, &config, &mapped, read)
}

#[cfg(test)]
mod tests;
