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
//!
//! A model with the head for the order is `BertForPreTraining` there, one without it `BertForMaskedLM`. Old files have
//! `gamma` and `beta` for the weight and bias of norms. `cls.predictions.decoder` is the token embedding and the bias
//! once more.

mod config;

use ferrotron_nn::{Module, Scope};
use ferrotron_tensor::{DType, Device, Error, Result, Tensor};
use std::collections::BTreeMap;
use std::path::Path;

use super::export::write_folder;
use super::import::{Stored, describe, open_files, read};
use crate::io::tensor_file::{Fault, TensorFile};
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
const LAYERS: [(&str, &str); 10] = [
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

/// Names of the tensors there that follow one another in one of our parameters.
fn their_names(ours: &str, placement: NormPlacement) -> Option<Vec<String>> {
    let (layer, kind) = ours.rsplit_once('.')?;
    let find = |table: &[(&str, &'static str)], layer: &str| {
        table.iter().find(|(ours, _)| *ours == layer).map(|(_, theirs)| *theirs)
    };
    let Some(rest) = layer.strip_prefix("blocks.") else {
        return Some(vec![format!("{}.{kind}", find(&LAYERS, layer)?)]);
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
    Some(layers.iter().map(|layer| format!("bert.encoder.layer.{block}.{layer}.{kind}")).collect())
}

/// The weights of `files` by the names of new files; buffers are none.
fn stored_weights(files: &[TensorFile]) -> BTreeMap<String, Stored> {
    let mut stored = BTreeMap::new();
    for (file, opened) in files.iter().enumerate() {
        for key in opened.names() {
            let name = match key.rsplit_once('.') {
                Some((norm, "gamma")) => format!("{norm}.weight"),
                Some((norm, "beta")) => format!("{norm}.bias"),
                _ => key.clone(),
            };
            if name != "bert.embeddings.position_ids" {
                stored.insert(name, (file, key));
            }
        }
    }
    stored
}

/// The configuration of the BERT in `folder`, whose weights tell whether it has a head for the order. Dropout is a
/// matter of training and stays 0.
///
/// # Errors
/// A folder without a readable `config.json` or weights; a model other than BERT or a variant that is not supported, by
/// name.
pub fn read_config(folder: &Path) -> Result<BertConfig> {
    let files = open_files(folder).map_err(failed)?;
    parse(folder, stored_weights(&files).contains_key(ORDER_HEAD))
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
    let mut files = open_files(folder).map_err(failed)?;
    let stored = stored_weights(&files);
    let config = parse(folder, stored.contains_key(ORDER_HEAD))?;
    // Every weight is read, so the seed decides nothing.
    let bert = Bert::new(&Scope::new(device, dtype, 0), &config)?;
    let mut source = Source { folder, files: &mut files, stored, open: 0 };
    source.fill(&bert, device).map_err(failed)?;
    Ok(bert)
}

fn failed(fault: Fault) -> Error {
    Error::io("hugging_face", fault)
}

/// The weight files of a folder, with what was not read yet.
struct Source<'a> {
    folder: &'a Path,
    files: &'a mut [TensorFile],
    stored: BTreeMap<String, Stored>,
    /// The one file that may be open.
    open: usize,
}

impl Source<'_> {
    fn fill(&mut self, bert: &Bert, device: &Device) -> std::result::Result<(), Fault> {
        let config = bert.config();
        for (copy, original) in TIED {
            self.check_copy(copy, original, device)?;
        }
        if !config.binary_head {
            self.stored.retain(|name, _| !name.starts_with("bert.pooler."));
        }
        for param in bert.params() {
            let names = their_names(param.name(), config.norm_placement)
                .ok_or_else(|| format!("BERT has no '{}'", param.name()))?;
            let mut dims = param.leaf().dims().to_vec();
            dims[0] /= names.len();
            let parts = names.iter().map(|name| self.take(name, &dims, device));
            let parts = parts.collect::<std::result::Result<Vec<Tensor>, Fault>>()?;
            let write = |target: &mut Tensor| {
                for (i, part) in parts.iter().enumerate() {
                    let part = part.cast(target.dtype())?;
                    target.narrow_mut(0, i * dims[0], dims[0], |rows| rows.copy_from(&part))?;
                }
                Ok(())
            };
            param.leaf().write_value(write).map_err(|error| error.to_string())?;
        }
        let Some(name) = self.stored.keys().next() else { return Ok(()) };
        let folder = self.folder.display();
        Err(format!("'{folder}' has a tensor '{name}' that this model has not"))
    }

    /// Reads a tensor of `dims`, once.
    fn take(
        &mut self,
        name: &str,
        dims: &[usize],
        device: &Device,
    ) -> std::result::Result<Tensor, Fault> {
        let folder = self.folder.display();
        let (file, key) =
            self.stored.remove(name).ok_or_else(|| format!("'{folder}' has no tensor '{name}'"))?;
        let found = describe(&self.files[file], &key)?.1;
        if found != dims {
            return Err(format!(
                "'{key}' in '{folder}' is {found:?}, but config.json makes it {dims:?}"
            ));
        }
        if self.open != file {
            self.files[self.open].close();
            self.open = file;
        }
        read(&mut self.files[file], &key, device)
    }

    /// Errors unless `copy`, if it is stored, holds the bytes of `original`.
    fn check_copy(
        &mut self,
        copy: &str,
        original: &str,
        device: &Device,
    ) -> std::result::Result<(), Fault> {
        let Some((file, key)) = self.stored.remove(copy) else { return Ok(()) };
        let Some((first_file, first)) = self.stored.get(original).cloned() else { return Ok(()) };
        let again = read(&mut self.files[file], &key, device)?;
        let value = read(&mut self.files[first_file], &first, device)?;
        let same = |a: &Tensor, b: &Tensor| Ok::<_, Error>(a.bytes()? == b.bytes()?);
        let same_bytes = same(&again, &value).map_err(|error| error.to_string())?;
        if again.dims() != value.dims() || again.dtype() != value.dtype() || !same_bytes {
            let folder = self.folder.display();
            return Err(format!(
                "'{copy}' in '{folder}' differs from '{original}': an output layer of its own is not supported here"
            ));
        }
        Ok(())
    }
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
    let (params, placement) = (bert.params(), bert.config().norm_placement);
    let mut tensors = Vec::new();
    for param in &params {
        let Some(names) = their_names(param.name(), placement) else {
            return Err(Error::config("hugging_face", format!("BERT has no '{}'", param.name())));
        };
        let value = param.leaf().value()?;
        let rows = value.dims()[0] / names.len();
        for (i, name) in names.into_iter().enumerate() {
            tensors.push((name, value.narrow(0, i * rows, rows)?));
        }
    }
    let config = write_config(bert.config(), params[0].compute_dtype());
    write_folder(folder, &config, tensors)
}

#[cfg(test)]
mod tests;
