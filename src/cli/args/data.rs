//! The options that name the data of a run, and how they go together.

use clap::{Args, ValueEnum};
use ferrotron::models::data::{
    BlendConfig, BlendPaths, DataChange, DataConfig, DocumentConfig, Split,
};
use ferrotron::models::memory::DocumentResets;
use ferrotron::models::tokenizer::{Tokenizer, TokenizerChoice};
use ferrotron::{Error, Result};
use std::path::PathBuf;

use crate::cli::args::packing::PackingArgs;
use crate::cli::options::Options;

/// Megatron's proportions for training, validation and testing.
const MEGATRON_SPLIT: [f64; 3] = [969.0, 30.0, 1.0];

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Data")]
pub struct DataArgs {
    /// Text, nanoGPT .bin, llm.c shards or Megatron's PREFIX.idx and .bin; several files, or those of a folder, are one
    /// stream [default: a small corpus that the program carries]
    #[arg(long, alias = "train-data", value_name = "PATH", num_args = 1..)]
    data: Vec<PathBuf>,
    /// Megatron's data sets (PREFIX.idx and .bin), as PREFIX .. or WEIGHT PREFIX WEIGHT PREFIX ..; each is divided by
    /// --split, and without weights sets count by their size
    #[arg(long, value_name = "PREFIX", num_args = 1..)]
    data_path: Vec<String>,
    /// A file with the words of --data-path
    #[arg(long, value_name = "FILE")]
    data_args_path: Option<PathBuf>,
    /// Data sets for training alone, as --data-path
    #[arg(long, value_name = "PREFIX", num_args = 1..)]
    train_data_path: Vec<String>,
    /// Data sets for validation beside --train-data-path, as --data-path
    #[arg(long, value_name = "PREFIX", num_args = 1..)]
    valid_data_path: Vec<String>,
    /// Data sets for testing beside --train-data-path, as --data-path; they are evaluated once, behind the
    /// last step
    #[arg(long, value_name = "PREFIX", num_args = 1..)]
    test_data_path: Vec<String>,
    /// A JSON file with the words of these three as "train", "valid" and "test"
    #[arg(long, value_name = "FILE")]
    per_split_data_args_path: Option<PathBuf>,
    /// Order of the samples of --data-path and --train-data-path: computed, or that of Megatron-LM with the same files,
    /// --split, --seed, --seq-length and number of samples
    #[arg(long, value_name = "ORDER", default_value = "computed")]
    pub data_order: DataOrder,
    /// Files for validation beside --data [default: the last part of the data]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    valid_data: Vec<PathBuf>,
    #[command(flatten)]
    split: SplitArgs,
    #[command(flatten)]
    pub packing: PackingArgs,
    /// Let tokens attend to those of their own document alone; a document ends with its end-of-document token
    #[arg(long)]
    reset_attention_mask: bool,
    /// Let positions count from 0 in each document; rotary positions are relative and do not change
    #[arg(long)]
    reset_position_ids: bool,
    /// Leave the token behind the end of a document out of the loss
    #[arg(long)]
    eod_mask_loss: bool,
    /// The end-of-document token [default: the tokenizer's]
    #[arg(long, value_name = "ID")]
    eod_id: Option<u32>,
    /// Resume although data, split or tokenizer are not those of the run. From the next sample on, the order is that of
    /// the new data, which the next checkpoint records
    #[arg(long, requires = "load")]
    allow_data_change: bool,
    /// Tokenizer: byte, char, gpt2, or the path of a Hugging Face tokenizer.json or of BERT's vocab.txt
    #[arg(long, value_name = "TOKENIZER", default_value = "char")]
    pub tokenizer: String,
    /// Number of token ids of token files, which then need no tokenizer [default: the tokenizer's]
    #[arg(long, value_name = "N")]
    pub vocab_size: Option<usize>,
}

/// The order of training samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DataOrder {
    /// A permutation that is a function of the seed.
    Computed,
    /// The indices of Megatron-LM.
    Megatron,
}

/// The data that options name.
#[derive(Debug, Clone, PartialEq)]
pub enum DataSource {
    /// Files, or the program's own corpus if there are none.
    Files(DataConfig),
    /// Megatron's data sets.
    Sets(BlendConfig),
}

/// The part of the data to hold out, given in one of two ways.
#[derive(Debug, Clone, Args)]
pub struct SplitArgs {
    /// Fraction of the tokens, at the end, that is held out for validation; 0 trains on all [default: 0.1]
    #[arg(long, value_name = "SHARE", conflicts_with = "split")]
    valid_fraction: Option<f64>,
    /// The split as proportions for training, validation and testing, such as 90,5,5; those left out are 0. The test part
    /// of data sets is evaluated once, behind the last step; of --data, nothing reads it
    #[arg(long, value_name = "TRAIN,VALID,TEST", num_args = 1.., value_delimiter = ',', value_parser = proportion)]
    split: Option<Vec<f64>>,
}

fn proportion(text: &str) -> std::result::Result<f64, std::num::ParseFloatError> {
    text.trim().parse()
}

impl SplitArgs {
    /// Reads the options of a run.
    pub fn from_options(options: &Options) -> SplitArgs {
        let numbers = |name: &str| {
            let values = options.values(name);
            let texts = values.iter().flat_map(|text| text.split(','));
            texts.map(|text| proportion(text).ok()).collect::<Option<Vec<f64>>>()
        };
        SplitArgs {
            valid_fraction: numbers("valid-fraction").and_then(|found| found.first().copied()),
            split: numbers("split").filter(|found| !found.is_empty()),
        }
    }

    /// Errors for a fraction or proportions that are none.
    pub fn split(&self) -> Result<Split> {
        match (self.split.as_deref(), self.valid_fraction) {
            (Some(&[share]), _) if share > 0.0 && share < 1.0 => {
                let message = format!(
                    "{share} alone is a proportion, by which all data is for training: give 100 for that, or \
                     --valid-fraction {share} to hold that share out"
                );
                Err(Error::config("--split", message))
            }
            (Some(&[training]), _) => Split::proportions([training, 0.0, 0.0]),
            (Some(&[training, validation]), _) => Split::proportions([training, validation, 0.0]),
            (Some(&[training, validation, test]), _) => {
                Split::proportions([training, validation, test])
            }
            (Some(parts), _) => {
                let message = format!(
                    "takes proportions for training, validation and testing, such as 90,5,5, got {} of them",
                    parts.len()
                );
                Err(Error::config("--split", message))
            }
            (None, Some(fraction)) => Split::valid_fraction(fraction),
            (None, None) => Ok(Split::default()),
        }
    }
}

impl DataArgs {
    /// The options of a run that name data sets or their parts.
    pub fn from_options(options: &Options) -> DataArgs {
        let paths = |name| options.values(name).into_iter().map(PathBuf::from);
        let words = |name| options.values(name);
        let is_on = |name| options.states_any(&[name]);
        DataArgs {
            data: paths("data").collect(),
            data_path: words("data-path"),
            data_args_path: paths("data-args-path").next(),
            train_data_path: words("train-data-path"),
            valid_data_path: words("valid-data-path"),
            test_data_path: words("test-data-path"),
            per_split_data_args_path: paths("per-split-data-args-path").next(),
            data_order: DataOrder::Computed,
            packing: PackingArgs::from_options(options),
            reset_attention_mask: is_on("reset-attention-mask"),
            reset_position_ids: is_on("reset-position-ids"),
            eod_mask_loss: is_on("eod-mask-loss"),
            eod_id: words("eod-id").first().and_then(|id| id.parse().ok()),
            valid_data: paths("valid-data").collect(),
            split: SplitArgs::from_options(options),
            allow_data_change: false,
            tokenizer: String::new(),
            vocab_size: None,
        }
    }

    /// Whether the data is the program's own corpus.
    pub fn is_built_in(&self) -> bool {
        self.stated().is_empty()
    }

    /// The options that name training data.
    fn stated(&self) -> Vec<&'static str> {
        [
            ("--data", !self.data.is_empty()),
            ("--data-path", !self.data_path.is_empty()),
            ("--data-args-path", self.data_args_path.is_some()),
            ("--train-data-path", !self.train_data_path.is_empty()),
            ("--per-split-data-args-path", self.per_split_data_args_path.is_some()),
        ]
        .into_iter()
        .filter_map(|(name, given)| given.then_some(name))
        .collect()
    }

    /// The data that the options name.
    ///
    /// # Errors
    /// Options that contradict each other; lists that are none; as [`SplitArgs::split`].
    pub fn source(&self) -> Result<DataSource> {
        let stated = self.stated();
        if let [first, second, ..] = stated[..] {
            let message = format!("{first} names the training data too: leave one of them out");
            return Err(Error::config(second, message));
        }
        let parts = [
            ("--valid-data-path", &self.valid_data_path),
            ("--test-data-path", &self.test_data_path),
        ];
        if let Some((name, _)) = parts.iter().find(|(_, words)| !words.is_empty())
            && self.train_data_path.is_empty()
        {
            let message = "needs --train-data-path: --data goes with --valid-data, and --data-path is divided by --split";
            return Err(Error::config(name, message));
        }
        let Some(paths) = self.blend(stated.first().copied().unwrap_or_default())? else {
            if self.data_order == DataOrder::Megatron {
                let message = "megatron is an order of data sets: name them by --data-path or --train-data-path";
                return Err(Error::config("--data-order", message));
            }
            if self.packing.is_on() {
                let message = "packs data sets of prompts and completions: name them by --data-path or --train-data-path";
                return Err(Error::config("--packing", message));
            }
            if self.data.is_empty() && !self.valid_data.is_empty() {
                let message = "needs --data: the built-in corpus brings its own validation part";
                return Err(Error::config("--valid-data", message));
            }
            return Ok(DataSource::Files(DataConfig {
                data: self.data.clone(),
                validation_data: self.valid_data.clone(),
                split: self.split.split()?,
            }));
        };
        let option = stated[0];
        if self.packing.is_on() && self.data_order == DataOrder::Megatron {
            let message = "megatron is no order of packed samples: leave it or --packing out";
            return Err(Error::config("--data-order", message));
        }
        if !self.valid_data.is_empty() {
            let message = format!(
                "goes with --data: beside {option} give --valid-data-path and --train-data-path"
            );
            return Err(Error::config("--valid-data", message));
        }
        if self.split.valid_fraction.is_some() {
            let message = format!("goes with --data: with {option} give --split, as in 969,30,1");
            return Err(Error::config("--valid-fraction", message));
        }
        if self.split.split.is_some() && matches!(paths, BlendConfig::PerSplit { .. }) {
            let message =
                format!("divides the sets of --data-path: those of {option} have their part");
            return Err(Error::config("--split", message));
        }
        Ok(DataSource::Sets(paths))
    }

    /// The data sets that `option`, the one that names training data, says.
    fn blend(&self, option: &str) -> Result<Option<BlendConfig>> {
        let split = || match self.split.split {
            Some(_) => self.split.split(),
            None => Split::proportions(MEGATRON_SPLIT),
        };
        if option == "--data-path" {
            let paths = BlendPaths::parse("--data-path", &self.data_path)?;
            return Ok(Some(BlendConfig::Shared(paths, split()?)));
        }
        if let Some(file) = &self.data_args_path {
            let paths = BlendPaths::from_file("--data-args-path", file)?;
            return Ok(Some(BlendConfig::Shared(paths, split()?)));
        }
        if let Some(file) = &self.per_split_data_args_path {
            let name = "--per-split-data-args-path";
            let [training, validation, test] = BlendPaths::per_split(name, file)?;
            let none = || Error::config(name, format!("'{}': 'train' is null", file.display()));
            let training = training.ok_or_else(none)?;
            return Ok(Some(BlendConfig::PerSplit { training, validation, test }));
        }
        if option != "--train-data-path" {
            return Ok(None);
        }
        let part = |name, words: &Vec<String>| match words.is_empty() {
            true => Ok(None),
            false => BlendPaths::parse(name, words).map(Some),
        };
        Ok(Some(BlendConfig::PerSplit {
            training: BlendPaths::parse("--train-data-path", &self.train_data_path)?,
            validation: part("--valid-data-path", &self.valid_data_path)?,
            test: part("--test-data-path", &self.test_data_path)?,
        }))
    }

    pub fn change(&self) -> DataChange {
        if self.allow_data_change { DataChange::Allowed } else { DataChange::Refused }
    }

    /// The treatment of the ends of documents, if there is one.
    ///
    /// # Errors
    /// No end-of-document token, or one beyond the vocabulary; one without anything that stops there.
    pub fn documents(&self, tokenizer: &Tokenizer) -> Result<Option<DocumentConfig>> {
        let options = [
            ("--reset-attention-mask", self.reset_attention_mask),
            ("--reset-position-ids", self.reset_position_ids),
            ("--eod-mask-loss", self.eod_mask_loss),
        ];
        let Some((option, _)) = options.iter().find(|(_, given)| *given) else {
            if self.eod_id.is_some() {
                let message =
                    "needs --reset-attention-mask, --reset-position-ids or --eod-mask-loss";
                return Err(Error::config("--eod-id", message));
            }
            return Ok(None);
        };
        if self.packing.is_on() {
            let message =
                "--packing keeps samples apart by itself, and masks prompts: leave it out";
            return Err(Error::config(option, message));
        }
        let Some(end_of_document) = self.eod_id.or(tokenizer.end_of_text()) else {
            let message = format!(
                "needs the token that ends a document, and the {} tokenizer has none: give its number by --eod-id",
                tokenizer.name()
            );
            return Err(Error::config(option, message));
        };
        if end_of_document as usize >= tokenizer.vocab_size() {
            let message = format!(
                "{end_of_document} is no token id of 0 to {}",
                tokenizer.vocab_size().saturating_sub(1)
            );
            return Err(Error::config("--eod-id", message));
        }
        Ok(Some(DocumentConfig {
            end_of_document,
            reset_attention: self.reset_attention_mask,
            reset_positions: self.reset_position_ids,
            mask_loss: self.eod_mask_loss,
        }))
    }

    /// The attention and positions that stop at the ends of documents, or of packed samples.
    pub fn document_resets(&self) -> DocumentResets {
        let packs = self.packing.is_on();
        DocumentResets {
            attention: packs || self.reset_attention_mask,
            positions: packs || self.reset_position_ids,
        }
    }

    /// The tokenizer of a new run. `built_in` is the text of the program's own corpus, and called only if the vocabulary
    /// depends on it.
    ///
    /// # Errors
    /// No token ids; a number of them beside a tokenizer; what [`TokenizerChoice::build`] refuses.
    pub fn tokenizer(&self, built_in: impl FnOnce() -> String) -> Result<Tokenizer> {
        let choice: TokenizerChoice = self.tokenizer.parse()?;
        let refuse = |message: String| Err(Error::config("--vocab-size", message));
        let text = || match self.source()? {
            DataSource::Files(config) if config.data.is_empty() => Ok(built_in()),
            DataSource::Files(config) => config.text(),
            DataSource::Sets(_) => Err(Error::config(
                "--tokenizer",
                "data sets hold tokens, not text from which a char vocabulary could be built: name the tokenizer that they \
                 were made with (gpt2 or a tokenizer.json), or the number of its token ids by --vocab-size",
            )),
        };
        match self.vocab_size {
            None => choice.build(text),
            Some(0) => refuse("must be positive, got 0".into()),
            Some(_) if self.is_built_in() => refuse(
                "needs --data or --data-path with files of tokens: the built-in corpus is text"
                    .into(),
            ),
            Some(size) if choice == TokenizerChoice::Char => Ok(Tokenizer::Null(size)),
            Some(size) => refuse(format!(
                "{size} and --tokenizer {choice} both say how many token ids there are: leave one of them out"
            )),
        }
    }
}
