//! The import of folders of Hugging Face, of any family.

use ferrotron_nn::{Module, Scope};
use ferrotron_tensor::{DType, Device, Error, Result};
use std::path::Path;

use super::bert;
use super::config::{read_config, read_family};
use super::families::Family;
use super::files::{describe, open_files};
use super::json::read_json;
use super::model_kind::{ModelKind, model_kind};
use super::weights::{CurrentName, FolderWeights, Naming, stored_weights};
use crate::io::checked_file::Fault;
use crate::io::tokenizer::{Tokenizer, TokenizerChoice};
use crate::model::gpt::{Gpt, GptConfig};

/// The dtypes of the weights in `folder`, each once, the first stored first.
///
/// # Errors
/// Errors of [`read_config`] or, of a BERT, [`bert::read_config`]; malformed or missing files; a weight that is no
/// floating-point number.
pub fn stored_dtypes(folder: &Path) -> Result<Vec<DType>> {
    let current_name: CurrentName = match model_kind(folder)? {
        ModelKind::Gpt => full_name(read_family(folder)?.0),
        ModelKind::Bert => {
            bert::read_config(folder)?;
            Box::new(bert::current_name)
        }
    };
    let read = || {
        let files = open_files(folder)?;
        let mut dtypes = Vec::new();
        for (file, key) in stored_weights(&files, &current_name).into_values() {
            let (dtype, _) = describe(&files[file], &key)?;
            if !dtypes.contains(&dtype) {
                dtypes.push(dtype);
            }
        }
        Ok(dtypes)
    };
    read().map_err(|fault: Fault| Error::io("hugging_face", fault))
}

/// Imports the language model in `folder`, one file or several, with weights of the given dtype. They are the same
/// bits where they are stored in it, else rounded to nearest. [`stored_dtypes`] and
/// [`common_dtype`](super::common_dtype) say in which dtype nothing is lost.
///
/// ```no_run
/// use ferrotron_models::hugging_face;
/// use ferrotron_tensor::Device;
/// # let folder = std::path::Path::new("models/gpt2");
/// let dtype = hugging_face::common_dtype(&hugging_face::stored_dtypes(folder)?);
/// let gpt = hugging_face::import(folder, &Device::cpu(2)?, dtype)?;
/// println!("{} parameters", gpt.config().num_parameters());
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// # Errors
/// Errors of [`read_config`]; malformed or missing files; tensors that are missing, unknown or of another
/// shape; a head that differs from the token embedding where both are tied.
pub fn import(folder: &Path, device: &Device, dtype: DType) -> Result<Gpt> {
    let config = read_config(folder)?;
    // Every weight is read, so the seed decides nothing.
    let gpt = Gpt::new(&Scope::new(device, dtype, 0), &config)?;
    weights(folder, &config)?.fill(&gpt.params())?;
    Ok(gpt)
}

/// Opens the weights of the language model in `folder`, for a model of `config` in any layout.
///
/// # Errors
/// Malformed or missing files; tensors that are missing or unknown; a head that differs from the token embedding where
/// both are tied.
pub fn weights(folder: &Path, config: &GptConfig) -> Result<FolderWeights> {
    let (family, own) = read_family(folder)?;
    let tied = own.tie_embeddings.then(|| (family.head, family.embedding()));
    let naming = Naming {
        family: family.model_type,
        current_name: full_name(family),
        mapping: Box::new(move |ours, rows| family.mapping(&own, ours, rows)),
        tied: tied.into_iter().collect(),
        left_out: &[],
        optional: &[],
    };
    FolderWeights::open::<Gpt>(folder, naming, config)
}

fn full_name(family: &'static Family) -> CurrentName {
    Box::new(|key| family.full_name(key))
}

/// The tokenizer of `folder`: its `tokenizer.json`, else a BERT's `vocab.txt`, or GPT-2's if the vocabulary of a GPT-2
/// has that size.
///
/// # Errors
/// An unreadable `config.json`; a family that is not known.
pub fn tokenizer_choice(folder: &Path) -> Result<Option<TokenizerChoice>> {
    let kind = model_kind(folder)?;
    let [json, vocabulary] = ["tokenizer.json", "vocab.txt"].map(|name| folder.join(name));
    if json.exists() {
        return Ok(Some(TokenizerChoice::File(json)));
    }
    Ok(match kind {
        ModelKind::Bert => vocabulary.exists().then_some(TokenizerChoice::File(vocabulary)),
        ModelKind::Gpt => {
            let size = read_json(folder)?.1["vocab_size"].as_u64();
            (size == Some(Tokenizer::Gpt2.vocab_size() as u64)).then_some(TokenizerChoice::Gpt2)
        }
    })
}

/// Reads the tokenizer of [`tokenizer_choice`].
///
/// # Errors
/// The errors of [`tokenizer_choice`] and [`Tokenizer::from_file`].
pub fn read_tokenizer(folder: &Path) -> Result<Option<Tokenizer>> {
    let none = || Ok(String::new()); // no such tokenizer depends on a text
    tokenizer_choice(folder)?.map(|choice| choice.build(none)).transpose()
}
