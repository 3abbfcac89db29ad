//! The samples of a BERT: masked pairs of segments of text, or the questions of a task.

use ferrotron::models::data::tasks::Race;
use ferrotron::models::data::{
    DataConfig, Dataset, Documents, FiniteSamples, HeldOutPairs, Samples, SentencePairs, Split,
};
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::tensor::At;
use ferrotron::{Error, Result};
use std::path::PathBuf;
use std::sync::Arc;

use super::args::model::TrainTask;
use super::args::train::TrainArgs;
use super::corpus;

/// The samples for training and those for validation.
#[derive(Clone)]
pub struct BertInput {
    pub train: Arc<dyn Samples>,
    pub held_out: Option<HeldOut>,
}

/// Samples for validation.
#[derive(Clone)]
pub enum HeldOut {
    Pairs(HeldOutPairs),
    Race(Race),
}

impl HeldOut {
    /// The first `samples` samples, or all if there are fewer.
    pub fn first(self, samples: u64) -> Box<dyn FiniteSamples> {
        match self {
            HeldOut::Pairs(pairs) => Box::new(pairs.first(samples)),
            HeldOut::Race(race) => Box::new(race.first(samples)),
        }
    }
}

/// Opens the files of `config`, or the program's own corpus: all tokens by which the run recognises its data, and the
/// samples. `warn` is told of files that are left out.
pub fn open(
    args: &TrainArgs,
    config: &DataConfig,
    tokenizer: &Tokenizer,
    warn: impl Fn(&str),
) -> Result<(Dataset, BertInput)> {
    match args.model.task {
        Some(TrainTask::Race) => race(args, config, tokenizer),
        None => pairs(args, config, tokenizer, warn),
    }
}

fn pairs(
    args: &TrainArgs,
    config: &DataConfig,
    tokenizer: &Tokenizer,
    warn: impl Fn(&str),
) -> Result<(Dataset, BertInput)> {
    let (train, validation) = corpus::open_documents(config, tokenizer, warn)?;
    let tokens = |documents: &Documents| documents.token_source(tokenizer.vocab_size());
    let dataset = Dataset {
        train: tokens(&train)?,
        validation: validation.as_ref().map(tokens).transpose()?,
    };
    let (special, length) = (tokenizer.special_tokens()?, args.model.seq_length()?);
    let train = SentencePairs::new(train, special, length, args.optimization.seed)?;
    // Validation data that are too short are refused only by a run that evaluates.
    let iters = args.evaluation.validation_iters(&args.run);
    let evaluates = args.run.eval_interval != Some(0) && iters != Some(0);
    let held_out = validation.filter(|_| evaluates);
    let held_out = held_out.map(|held_out| HeldOutPairs::new(held_out, special, length));
    let held_out = held_out.transpose()?.map(HeldOut::Pairs);
    Ok((dataset, BertInput { train: Arc::new(train), held_out }))
}

fn race(
    args: &TrainArgs,
    config: &DataConfig,
    tokenizer: &Tokenizer,
) -> Result<(Dataset, BertInput)> {
    if config.data.is_empty() {
        let message = "race needs its files: name them by --data, as in --data RACE/train --valid-data RACE/dev";
        return Err(Error::config("--task", message));
    }
    if config.split != Split::default() {
        let message =
            "a task has questions for validation in files of their own: name them by --valid-data";
        return Err(Error::config("--valid-fraction", message));
    }
    let (length, vocab_size) = (args.model.seq_length()?, tokenizer.special_tokens()?.vocab_size);
    let open = |paths: &[PathBuf], option| Race::open(paths, tokenizer, length).at(option);
    let train = open(&config.data, "--data")?;
    let held_out = match &config.validation_data[..] {
        [] => None,
        paths => Some(open(paths, "--valid-data")?),
    };
    let tokens = |race: &Race| race.token_source(vocab_size);
    let validation = held_out.as_ref().map(tokens).transpose()?;
    let dataset = Dataset { train: tokens(&train)?, validation };
    let train = Arc::new(train.shuffled(args.optimization.seed));
    Ok((dataset, BertInput { train, held_out: held_out.map(HeldOut::Race) }))
}
