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

/// The samples for training and those for evaluations.
#[derive(Clone)]
pub struct BertInput {
    pub train: Arc<dyn Samples>,
    pub held_out: Option<HeldOut>,
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
    let (train, validation) = corpus::open_documents(config, tokenizer, warn)?;
    let dataset = Dataset {
        train: train.token_source(),
        validation: validation.as_ref().map(Documents::token_source),
    };
    let (special, length) = (tokenizer.special_tokens()?, args.model.seq_length()?);
    let train = Arc::new(SentencePairs::new(train, special, length, args.optimization.seed)?);
    let held_out = validation.filter(|_| evaluates(args));
    let held_out = held_out.map(|held_out| HeldOutPairs::new(held_out, special, length));
    let held_out = held_out.transpose()?.map(HeldOut::Pairs);
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
    config.check_tokenizer(tokenizer)?;
    let sets = BlendedDataset::open_sentences(config, tokenizer.vocab_size())?;
    let dataset = sets.streams();
    let BlendedDataset { training, validation, test } = sets;
    let (special, length) = (tokenizer.special_tokens()?, args.model.seq_length()?);
    let train = SentencePairs::of_blend(&training, special, length, args.optimization.seed)?;
    order_state.iter().for_each(|state| train.resume_order(state));
    let held_out = |blend: Option<Blend>, part: &str, option: &'static str| {
        let Some(blend) = blend.filter(|_| evaluates(args)) else { return Ok(None) };
        let pairs = HeldOutPairs::of_blend(&blend, special, length)?;
        match (&pairs, config) {
            (Some(_), _) => {}
            (None, BlendConfig::Shared(..)) => warn(&format!(
                "--split: no document held out for {part} has two sentences, so {part} has no loss: give a larger share"
            )),
            (None, BlendConfig::PerSplit { .. }) => {
                let message = "no document has two sentences: name other sets, or leave it out";
                return Err(Error::config(option, message));
            }
        }
        Ok(pairs.map(HeldOut::Pairs))
    };
    let input = BertInput {
        train: Arc::new(train),
        held_out: held_out(validation, "validation", "--valid-data-path")?,
        test: held_out(test, "testing", "--test-data-path")?,
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
    let held_out = held_out.map(HeldOut::Race);
    Ok((dataset, BertInput { train, held_out, test: None, order_crc32: None }))
}
