//! The samples of a BERT: masked pairs of segments of text or of Megatron's data sets, or the questions of a task.

use ferrotron::models::data::tasks::Race;
use ferrotron::models::data::{
    Blend, BlendConfig, BlendedDataset, DataConfig, Dataset, Documents, FiniteSamples,
    HeldOutPairs, Samples, SentencePairs, Split,
};
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::tensor::At;
use ferrotron::{Error, Result};
use std::path::PathBuf;
use std::sync::Arc;

use super::args::data::{DataOrder, DataSource};
use super::args::model::TrainTask;
use super::args::train::TrainArgs;
use super::corpus;
use super::validation_sets::{
    SEVERAL, blends_of_losses, check_without_weights, names_of_files, quoted, warn_of_missing,
};

/// The part of the data for evaluations during a run, for messages.
const VALIDATION: &str = "validation";

/// The samples for training and those for evaluations.
#[derive(Clone)]
pub struct BertInput {
    pub train: Arc<dyn Samples>,
    /// The sets of evaluations, by name if each is evaluated by itself.
    pub held_out: Vec<(Option<String>, HeldOut)>,
    /// The samples of the evaluation behind the last step.
    pub test: Option<HeldOut>,
    /// A checksum of what decides the order beside the tokens.
    pub order_crc32: Option<u32>,
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

/// Opens the data that `source` names, or the program's own corpus: all tokens by which the run recognises its data, and
/// the samples. `order_state` is the place in the order, from the checkpoint of a resumed run. `warn` is told of files that
/// are left out.
pub fn open(
    args: &TrainArgs,
    source: &DataSource,
    order_state: Option<&[u64]>,
    tokenizer: &Tokenizer,
    warn: impl Fn(&str),
) -> Result<(Dataset, BertInput)> {
    match (args.model.task, source) {
        (Some(TrainTask::Race), DataSource::Files(config)) => race(args, config, tokenizer),
        (Some(TrainTask::Race), DataSource::Sets(_)) => {
            let message = "race has files of questions, not tokens: name them by --data";
            Err(Error::config("--data-path", message))
        }
        (None, DataSource::Files(config)) => pairs(args, config, tokenizer, warn),
        (None, DataSource::Sets(config)) => {
            pairs_of_sets(args, config, order_state, tokenizer, warn)
        }
    }
}

fn pairs(
    args: &TrainArgs,
    config: &DataConfig,
    tokenizer: &Tokenizer,
    warn: impl Fn(&str),
) -> Result<(Dataset, BertInput)> {
    let (train, validation, sets) = match args.evaluation.multiple_validation_sets {
        true => {
            let names = names_of_files(config)?.into_iter().map(Some);
            let (train, all, sets) = corpus::open_documents_with_sets(config, tokenizer, warn)?;
            (train, Some(all), names.zip(sets).collect())
        }
        false => {
            let (train, all) = corpus::open_documents(config, tokenizer, warn)?;
            (train, all.clone(), all.map(|all| (None, all)).into_iter().collect::<Vec<_>>())
        }
    };
    let dataset = Dataset {
        train: train.token_source(),
        validation: validation.as_ref().map(Documents::token_source),
    };
    let (special, length) = (tokenizer.special_tokens()?, args.model.seq_length()?);
    let train = Arc::new(SentencePairs::new(train, special, length, args.optimization.seed)?);
    let remedy = match config.validation_data.is_empty() {
        true => "hold out more with --valid-fraction or --split, or name files by --valid-data",
        false => "give files with documents of several sentences by --valid-data",
    };
    let pairs = |(name, documents): (Option<String>, Documents)| {
        let pairs = HeldOutPairs::new(documents, special, length, remedy).map(HeldOut::Pairs);
        match &name {
            Some(set) => Ok((name.clone(), pairs.at(set)?)),
            None => Ok((None, pairs?)),
        }
    };
    let sets = sets.into_iter().filter(|_| evaluates(args));
    let held_out = sets.map(pairs).collect::<Result<Vec<_>>>()?;
    Ok((dataset, BertInput { train, held_out, test: None, order_crc32: None }))
}

/// Pairs of segments of Megatron's data sets, whose sequences are sentences.
fn pairs_of_sets(
    args: &TrainArgs,
    config: &BlendConfig,
    order_state: Option<&[u64]>,
    tokenizer: &Tokenizer,
    warn: impl Fn(&str),
) -> Result<(Dataset, BertInput)> {
    if args.data.packing.is_on() {
        let message = "packs prompts and completions of a GPT: leave it out";
        return Err(Error::config("--packing", message));
    }
    if args.data.data_order == DataOrder::Megatron {
        let message = "megatron is an order of a GPT's samples: leave it out";
        return Err(Error::config("--data-order", message));
    }
    let several = args.evaluation.multiple_validation_sets;
    if several {
        check_without_weights(config)?;
    }
    config.check_tokenizer(tokenizer)?;
    let sets = BlendedDataset::open_sentences(config, tokenizer.vocab_size())?;
    let dataset = sets.streams();
    let BlendedDataset { training, validation, test } = sets;
    let (special, length) = (tokenizer.special_tokens()?, args.model.seq_length()?);
    let train = SentencePairs::of_blend(&training, special, length, args.optimization.seed)?;
    order_state.iter().for_each(|state| train.resume_order(state));
    let validation = blends_of_losses(config, validation, several, &warn)?;
    test.iter().for_each(|blend| warn_of_missing(config, blend, "testing", &warn));
    // Whole sets without such a document are refused where they are opened.
    let pairs = |blend: &Blend, part: &str| -> Result<Option<HeldOut>> {
        let (pairs, left_out) = HeldOutPairs::of_blend(blend, special, length)?;
        let names = quoted(&left_out);
        if !left_out.is_empty() && several && part == VALIDATION {
            let message = format!(
                "--split holds no document with two sentences of {names} out for validation: give a larger share, or \
                 join it with another set"
            );
            return Err(Error::config(SEVERAL, message));
        }
        if !left_out.is_empty() {
            let end = if pairs.is_some() { "goes without" } else { "has no loss" };
            warn(&format!(
                "warning: --split holds no document with two sentences of {names} out for {part}, which {end}"
            ));
        }
        Ok(pairs.map(HeldOut::Pairs))
    };
    let mut held_out = Vec::new();
    for (name, blend) in validation.into_iter().filter(|_| evaluates(args)) {
        let found = pairs(&blend, VALIDATION)?;
        held_out.extend(found.map(|found| (name, found)));
    }
    let test = test.filter(|_| evaluates(args));
    let test = test.map(|blend| pairs(&blend, "testing")).transpose()?;
    let input = BertInput {
        train: Arc::new(train),
        held_out,
        test: test.flatten(),
        order_crc32: training.weights_crc32(),
    };
    Ok((dataset, input))
}

/// Whether the run evaluates: held-out data that are too short are refused only by one that does.
fn evaluates(args: &TrainArgs) -> bool {
    let iters = args.evaluation.validation_iters(&args.run);
    args.run.eval_interval != Some(0) && iters != Some(0)
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
    let held_out = match args.evaluation.multiple_validation_sets {
        false => held_out.map(|all| (None, HeldOut::Race(all))).into_iter().collect(),
        true => {
            let set = |(name, path): (String, &PathBuf)| {
                let race = open(std::slice::from_ref(path), "--valid-data")?;
                Ok((Some(name), HeldOut::Race(race)))
            };
            let names = names_of_files(config)?.into_iter();
            names.zip(&config.validation_data).map(set).collect::<Result<Vec<_>>>()?
        }
    };
    Ok((dataset, BertInput { train, held_out, test: None, order_crc32: None }))
}
