//! The options of a run that begins with the weights of a Hugging Face folder: its model decides the shape.

use ferrotron::models::bert::Bert;
use ferrotron::models::checkpoint::SavedModel;
use ferrotron::models::gpt::Gpt;
use ferrotron::models::hugging_face::{self, CompanionFiles, ModelKind};
use ferrotron::parallel::agreement::digest;
use ferrotron::{Error, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};

use super::{Options, Source, text};
use crate::cli::architecture::TrainedModel;
use crate::cli::args::data::DataArgs;
use crate::cli::definition::Definition;
use crate::cli::folder_options;
use crate::cli::options::remembered::same_number;

/// Options that a folder only proposes.
const PROPOSED: &[&str] = &["seq-length", "init-method-std"];

/// The folder that `--load` names, if it is one of Hugging Face.
pub fn folder(options: &Options) -> Option<PathBuf> {
    let load = PathBuf::from(options.values("load").pop()?);
    hugging_face::is_folder(&load).then_some(load)
}

/// The options of a run that begins with the weights of `folder`: those `given`, and the shape of its model.
///
/// # Errors
/// A family that is not known; a given option that contradicts the model; `--save` of the same folder.
pub fn merged(given: Options, folder: &Path, definition: &Definition) -> Result<Options> {
    let shape = match hugging_face::model_kind(folder)? {
        ModelKind::Gpt => folder_options::gpt(&Gpt::folder_config(folder)?),
        ModelKind::Bert => folder_options::bert(&Bert::folder_config(folder)?),
    };
    let source = Source::Folder(format!("the Hugging Face folder '{}'", folder.display()));
    let Value::Object(mut map) = shape else { unreachable!("options are a map") };
    for (name, value) in map.iter().filter(|(name, _)| !PROPOSED.contains(&name.as_str())) {
        let own = same_number(&text(value));
        let differs = |word: &String| same_number(word) != own;
        if let Some(word) = given.values(name).iter().find(|word| differs(word)) {
            let message = format!(
                "--{name}: {word} contradicts {source}, whose model has {own}: leave it out"
            );
            return Err(Error::config("", message));
        }
    }
    if given.contains("preset") {
        return Err(Error::config("--preset", format!("{source} decides the sizes: leave it out")));
    }
    let canonical = |path: &Path| path.canonicalize().ok();
    let save = given.values("save").pop().map(PathBuf::from);
    if save.is_some_and(|save| canonical(&save).is_some_and(|save| Some(save) == canonical(folder)))
    {
        let message = format!("is {source}, which stays as it is: give another folder");
        return Err(Error::config("--save", message));
    }
    if !given.states_any(&["tokenizer", "vocab-size"])
        && let Some(tokenizer) = hugging_face::tokenizer_choice(folder)?
    {
        map.insert("tokenizer".into(), tokenizer.to_string().into());
    }
    let shape = Options::from_map(&definition.subcommand("train"), map, &source)?;
    Ok(given.over(shape))
}

/// Errors unless the options say which tokenizer goes with the model of `folder`.
pub fn check_tokenizer(options: &Options, folder: &Path) -> Result<()> {
    if options.states_any(&["tokenizer", "vocab-size"]) {
        return Ok(());
    }
    let message = format!(
        "'{}' has no tokenizer: put its tokenizer.json or vocab.txt there, or name one with --tokenizer",
        folder.display()
    );
    Err(Error::config("--load", message))
}

/// Errors unless a model of `config` computes with the weights of `folder` what the one there does.
pub fn check_config<M: TrainedModel>(folder: &Path, config: &M::Config) -> Result<()> {
    let saved = SavedModel::new(M::ARCHITECTURE, &M::folder_config(folder)?)?;
    saved.check(M::ARCHITECTURE, config, M::TRAINING_FIELDS).map_err(|error| {
        let message =
            format!("'{}' has a model of another shape: {}", folder.display(), error.context());
        Error::config("--load", message)
    })
}

/// The files of `folder` that checkpoints keep for an export: those of the tokenizer only if the run has the same one.
///
/// # Errors
/// A file that cannot be read.
pub fn companions(folder: &Path, data: &DataArgs) -> Result<CompanionFiles> {
    let files = CompanionFiles::read(folder)?;
    let own = hugging_face::tokenizer_choice(folder)?.map(|choice| choice.to_string());
    match data.vocab_size.is_some() || own.as_ref() == Some(&data.tokenizer) {
        true => Ok(files),
        false => Ok(files.without_tokenizer()),
    }
}

/// A text by which ranks compare their folders: a digest of `config.json`, and the identity of the weights.
pub fn identity(folder: &Path) -> String {
    let config = std::fs::read(folder.join("config.json"));
    let config = config.map_or_else(|error| error.to_string(), |bytes| digest(&bytes));
    let weights = hugging_face::weights_identity(folder);
    let weights = weights.unwrap_or_else(|error| error.context().to_string());
    format!("config.json {config}, {weights}")
}
