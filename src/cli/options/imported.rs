//! The options of a run that begins with weights: of a Hugging Face folder by `--load`, or of a BERT that is fine-tuned by
//! `--pretrained-checkpoint`. The model there decides the shape.

use ferrotron::models::bert::Bert;
use ferrotron::models::checkpoint::{Checkpoint, SavedModel};
use ferrotron::models::gpt::Gpt;
use ferrotron::models::hugging_face::{self, CompanionFiles, ModelKind};
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::models::trainer::{Model, Trainer};
use ferrotron::parallel::agreement::digest;
use ferrotron::{DType, Error, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};

use super::{Options, Source, text};
use crate::cli::architecture::TrainedModel;
use crate::cli::args::data::DataArgs;
use crate::cli::definition::Definition;
use crate::cli::folder_options;
use crate::cli::options::remembered::same_number;
use crate::cli::resume::identity as checkpoint_identity;

/// Options that weights only propose.
const PROPOSED: &[&str] = &["seq-length", "init-method-std"];

/// Options of heads, which a task replaces.
const HEADS: &[&str] = &["bert-no-binary-head", "task"];

const PRETRAINED: &str = "--pretrained-checkpoint";

/// The weights with which a run begins.
#[derive(Debug, Clone)]
pub enum Imported {
    /// The weights of a Hugging Face folder, which goes on being trained.
    Folder(PathBuf),
    /// The weights of a Hugging Face folder that gets a new head.
    PretrainedFolder(PathBuf),
    /// The weights of a checkpoint that gets a new head, by its own folder.
    PretrainedCheckpoint(PathBuf),
}

impl Imported {
    /// The weights that the options of a new run name, if they do.
    ///
    /// # Errors
    /// Two of them; a checkpoint that is not there; a task without weights that it can begin with, or the other way round.
    pub fn find(options: &Options) -> Result<Option<Imported>> {
        let path = |name| options.values(name).pop().map(PathBuf::from);
        let folder = path("load").filter(|load| hugging_face::is_folder(load));
        let (pretrained, has_task) = (path("pretrained-checkpoint"), options.contains("task"));
        let refuse = |option, message: String| Err(Error::config(option, message));
        match (folder, pretrained) {
            (Some(folder), Some(_)) => {
                let message =
                    format!("and --load {} both name weights: leave one out", folder.display());
                refuse(PRETRAINED, message)
            }
            (None, Some(_)) if !has_task => refuse(
                PRETRAINED,
                "needs --task race: to go on with pre-training, give --load".into(),
            ),
            (None, Some(path)) if hugging_face::is_folder(&path) => {
                match hugging_face::model_kind(&path)? {
                    ModelKind::Bert => Ok(Some(Imported::PretrainedFolder(path))),
                    ModelKind::Gpt => refuse(
                        PRETRAINED,
                        format!("'{}' holds a GPT, and the task needs a BERT", path.display()),
                    ),
                }
            }
            (None, Some(path)) => {
                let named = |error: Error| {
                    Error::new(error.kind(), PRETRAINED, error.context().to_string())
                };
                let checkpoint = Checkpoint::peek(&path).map_err(named)?;
                Bert::config_from(&checkpoint).map_err(named)?;
                Ok(Some(Imported::PretrainedCheckpoint(checkpoint.folder().to_path_buf())))
            }
            (Some(folder), None) if has_task && !has_choices(&folder)? => {
                let folder = folder.display();
                let message = format!(
                    "goes with {PRETRAINED} {folder}: --load would go on with its pre-training"
                );
                refuse("--task", message)
            }
            (folder, None) => Ok(folder.map(Imported::Folder)),
        }
    }

    /// A line for the user.
    pub fn note(&self) -> String {
        match self {
            Imported::Folder(path) => {
                format!("the weights of '{}', and a new optimizer state", path.display())
            }
            Imported::PretrainedFolder(path) | Imported::PretrainedCheckpoint(path) => {
                format!("the weights of '{}', a new head and a new optimizer state", path.display())
            }
        }
    }

    /// A line for the user if a run of `dtype` rounds the weights: f64 has more digits than its master weights.
    pub fn rounded_line(&self, dtype: DType) -> Option<String> {
        let (Imported::Folder(path) | Imported::PretrainedFolder(path)) = self else { return None };
        // What cannot be read is told where the weights are.
        let is_f64 = |stored: Vec<DType>| stored.contains(&DType::F64);
        let rounds = dtype != DType::F64 && hugging_face::stored_dtypes(path).is_ok_and(is_f64);
        let line = format!(
            "weights of '{}' are f64 and are rounded: --dtype f64 keeps them",
            path.display()
        );
        rounds.then_some(line)
    }

    fn source(&self) -> Source {
        Source::Folder(match self {
            Imported::Folder(path) | Imported::PretrainedFolder(path) => {
                format!("the Hugging Face folder '{}'", path.display())
            }
            Imported::PretrainedCheckpoint(path) => format!("the checkpoint '{}'", path.display()),
        })
    }

    fn path(&self) -> &Path {
        match self {
            Imported::Folder(path)
            | Imported::PretrainedFolder(path)
            | Imported::PretrainedCheckpoint(path) => path,
        }
    }

    /// The options of a run that begins with these weights: those `given`, and the shape of the model.
    ///
    /// # Errors
    /// A family that is not known; a given option that contradicts the model; `--save` of the same folder; no tokenizer.
    pub fn merged(&self, given: Options, definition: &Definition) -> Result<Options> {
        let shape = match self {
            Imported::Folder(folder) => match hugging_face::model_kind(folder)? {
                ModelKind::Gpt => folder_options::gpt(&Gpt::folder_config(folder)?),
                ModelKind::Bert => folder_options::bert(&Bert::folder_config(folder)?),
            },
            _ => folder_options::bert(&self.model_config::<Bert>()?),
        };
        let folder = self.path();
        let source = self.source();
        let Value::Object(mut map) = shape else { unreachable!("options are a map") };
        if !matches!(self, Imported::Folder(_)) {
            map.retain(|name, _| !HEADS.contains(&name.as_str()));
        }
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
            return Err(Error::config(
                "--preset",
                format!("{source} decides the sizes: leave it out"),
            ));
        }
        let canonical = |path: &Path| path.canonicalize().ok();
        let save = given.values("save").pop().map(PathBuf::from);
        if save.is_some_and(|save| {
            canonical(&save).is_some_and(|save| Some(save) == canonical(folder))
        }) {
            let message = format!("is {source}, which stays as it is: give another folder");
            return Err(Error::config("--save", message));
        }
        if !given.states_any(&["tokenizer", "vocab-size"])
            && !matches!(self, Imported::PretrainedCheckpoint(_))
            && let Some(tokenizer) = hugging_face::tokenizer_choice(folder)?
        {
            map.insert("tokenizer".into(), tokenizer.to_string().into());
        }
        let shape = Options::from_map(&definition.subcommand("train"), map, &source)?;
        Ok(given.over(shape))
    }

    /// The tokenizer that a checkpoint brings along.
    ///
    /// # Errors
    /// A checkpoint that cannot be read.
    pub fn tokenizer(&self) -> Result<Option<Tokenizer>> {
        match self {
            Imported::PretrainedCheckpoint(path) => {
                Ok(Checkpoint::peek(path)?.tokenizer().cloned())
            }
            _ => Ok(None),
        }
    }

    /// Errors unless there is one tokenizer for the model: that of the options, or the checkpoint's own.
    pub fn check_tokenizer(&self, options: &Options) -> Result<()> {
        let stated = options.states_any(&["tokenizer", "vocab-size"]);
        let path = self.path().display();
        match (stated, self.tokenizer()?) {
            (true, Some(_)) => {
                let message = format!("the checkpoint '{path}' brings its own: leave it out");
                Err(Error::config("--tokenizer", message))
            }
            (true, None) | (false, Some(_)) => Ok(()),
            (false, None) => {
                let option =
                    if matches!(self, Imported::Folder(_)) { "--load" } else { PRETRAINED };
                let message = format!(
                    "'{path}' has no tokenizer: put its tokenizer.json or vocab.txt there, or name one with --tokenizer"
                );
                Err(Error::config(option, message))
            }
        }
    }

    /// The configuration of the model there.
    pub fn model_config<M: TrainedModel>(&self) -> Result<M::Config> {
        match self {
            Imported::Folder(folder) | Imported::PretrainedFolder(folder) => {
                M::folder_config(folder)
            }
            Imported::PretrainedCheckpoint(path) => M::config_from(&Checkpoint::peek(path)?),
        }
    }

    /// Errors unless a model of `config` computes with the weights there what the one there does, but for new heads.
    pub fn check_config<M: TrainedModel>(&self, config: &M::Config) -> Result<()> {
        match self {
            Imported::Folder(folder) => check_config::<M>(folder, config),
            _ => {
                let fields = [M::TRAINING_FIELDS, M::HEAD_FIELDS].concat();
                check::<M>(self.path(), PRETRAINED, &self.model_config::<M>()?, config, &fields)
            }
        }
    }

    /// Loads the weights; returns the names of parameters that keep their initial values.
    pub fn load<M: TrainedModel>(&self, trainer: &mut Trainer<M>) -> Result<Vec<String>> {
        match self {
            Imported::Folder(folder) => {
                let mut weights = M::folder_weights(folder, trainer.model())?;
                trainer.load_weights(&mut weights)?;
                Ok(Vec::new())
            }
            Imported::PretrainedFolder(folder) => {
                let mut weights = M::pretrained_weights(folder, trainer.model())?;
                trainer.load_weights(&mut weights)?;
                Ok(weights.fresh().map(String::from).collect())
            }
            Imported::PretrainedCheckpoint(path) => {
                trainer.load_pretrained(&Checkpoint::peek(path)?)
            }
        }
    }

    /// The files that checkpoints keep for an export: those of the tokenizer only if the run has the same one.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn companions(&self, data: &DataArgs) -> Result<CompanionFiles> {
        let folder = match self {
            Imported::Folder(folder) | Imported::PretrainedFolder(folder) => folder,
            Imported::PretrainedCheckpoint(path) => {
                return Ok(CompanionFiles::recorded(&Checkpoint::peek(path)?.progress().extra));
            }
        };
        let files = CompanionFiles::read(folder)?;
        let own = hugging_face::tokenizer_choice(folder)?.map(|choice| choice.to_string());
        match data.vocab_size.is_some() || own.as_ref() == Some(&data.tokenizer) {
            true => Ok(files),
            false => Ok(files.without_tokenizer()),
        }
    }

    /// A fact that ranks must have alike: its name, and a text by which they compare it.
    pub fn fact(&self) -> Result<(String, String)> {
        Ok(match self {
            Imported::Folder(folder) | Imported::PretrainedFolder(folder) => {
                ("the Hugging Face folder".into(), folder_identity(folder))
            }
            Imported::PretrainedCheckpoint(path) => {
                ("the pretrained checkpoint".into(), checkpoint_identity(&Checkpoint::peek(path)?))
            }
        })
    }
}

/// Whether the model of a Hugging Face folder chooses among answers.
fn has_choices(folder: &Path) -> Result<bool> {
    Ok(hugging_face::model_kind(folder)? == ModelKind::Bert
        && Bert::folder_config(folder)?.num_choices.is_some())
}

/// Errors if a task is given to a run that was started without one.
pub fn check_task(given: &Options, checkpoint: &Checkpoint) -> Result<()> {
    if !given.contains("task") || !checkpoint.model().config["num_choices"].is_null() {
        return Ok(());
    }
    let folder = checkpoint.folder().display();
    let message =
        format!("needs {PRETRAINED} {folder}: --load would go on with that run, which has no task");
    Err(Error::config("--task", message))
}

/// Errors unless a model of `config` computes with the weights of `folder` what the one there does.
pub fn check_config<M: TrainedModel>(folder: &Path, config: &M::Config) -> Result<()> {
    check::<M>(folder, "--load", &M::folder_config(folder)?, config, M::TRAINING_FIELDS)
}

/// Errors, naming `option`, unless a model of `config` has the shape of the one of `folder`, but for `ignored` fields.
fn check<M: TrainedModel>(
    folder: &Path,
    option: &'static str,
    own: &M::Config,
    config: &M::Config,
    ignored: &[&str],
) -> Result<()> {
    let saved = SavedModel::new(M::ARCHITECTURE, own)?;
    saved.check(M::ARCHITECTURE, config, ignored).map_err(|error| {
        let message =
            format!("'{}' has a model of another shape: {}", folder.display(), error.context());
        Error::config(option, message)
    })
}

/// A text by which ranks compare their folders: a digest of `config.json`, and the identity of the weights.
fn folder_identity(folder: &Path) -> String {
    let config = std::fs::read(folder.join("config.json"));
    let config = config.map_or_else(|error| error.to_string(), |bytes| digest(&bytes));
    let weights = hugging_face::weights_identity(folder);
    let weights = weights.unwrap_or_else(|error| error.context().to_string());
    format!("config.json {config}, {weights}")
}
