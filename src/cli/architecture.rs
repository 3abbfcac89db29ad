//! Adapts each model to the command line: its configuration by options, its data, its report.

use ferrotron::models::bert::Bert;
use ferrotron::models::data::{
    DataConfig, Dataset, Documents, FiniteSamples, HeldOutPairs, Samples, SentencePairs,
};
use ferrotron::models::gpt::Gpt;
use ferrotron::models::run::{RunConfig, RunData, RunResult};
use ferrotron::models::stop::StopFlag;
use ferrotron::models::support::ModelSizes;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::models::traffic::{StepTraffic, expected_traffic};
use ferrotron::models::trainer::{Model, Trainer};
use ferrotron::{Error, Result};

use super::args::train::TrainArgs;
use super::{closing_report, corpus};

/// The opened data of a run.
pub struct RunInput {
    /// The tokens for training and validation, one after another.
    pub dataset: Dataset,
    /// Masked pairs of segments of the same, if the model takes them.
    pairs: Option<(SentencePairs, Option<HeldOutPairs>)>,
}

/// The samples of a run.
pub struct RunSamples {
    train: Box<dyn Samples>,
    validation: Option<Box<dyn FiniteSamples>>,
}

impl RunSamples {
    /// The samples as a run takes them.
    pub fn run_data<'a>(&'a self, tokenizer: &'a Tokenizer) -> RunData<'a> {
        let validation = self.validation.as_deref();
        RunData { train: &*self.train, validation, tokenizer: Some(tokenizer) }
    }
}

/// A model that the command line trains.
pub trait TrainedModel: Model {
    /// Number of token ids, with those that the model adds to a tokenizer's.
    fn vocab_size(tokenizer: &Tokenizer) -> Result<usize>;

    /// The configuration that the options give.
    fn config(args: &TrainArgs, vocab_size: usize) -> Result<Self::Config>;

    /// The sizes that layouts must suit.
    fn sizes(config: &Self::Config) -> ModelSizes;

    /// The bytes that this rank sends in a step, if they are known before.
    fn traffic(trainer: &Trainer<Self>, seq_length: usize) -> Option<StepTraffic>;

    /// Opens the data; `warn` is told of files that are left out.
    fn open(
        args: &TrainArgs,
        config: &DataConfig,
        tokenizer: &Tokenizer,
        warn: impl Fn(&str),
    ) -> Result<RunInput>;

    /// The samples of a run, for the seed of their order and the number of samples in a global batch.
    fn samples(input: &RunInput, run: &RunConfig, order: (u64, usize)) -> Result<RunSamples>;

    /// Prints the results; of a model that can, with a sample of so many tokens.
    fn report(
        trainer: &Trainer<Self>,
        dataset: &Dataset,
        tokenizer: &Tokenizer,
        outcome: &RunResult,
        sampling: (usize, &StopFlag),
    ) -> Result<()>;
}

impl TrainedModel for Gpt {
    fn vocab_size(tokenizer: &Tokenizer) -> Result<usize> {
        Ok(tokenizer.vocab_size())
    }

    fn config(args: &TrainArgs, vocab_size: usize) -> Result<Self::Config> {
        args.model.config(vocab_size)
    }

    fn sizes(config: &Self::Config) -> ModelSizes {
        config.into()
    }

    fn traffic(trainer: &Trainer<Gpt>, seq_length: usize) -> Option<StepTraffic> {
        Some(expected_traffic(trainer, seq_length))
    }

    fn open(
        _: &TrainArgs,
        config: &DataConfig,
        tokenizer: &Tokenizer,
        warn: impl Fn(&str),
    ) -> Result<RunInput> {
        Ok(RunInput { dataset: corpus::open(config, tokenizer, warn)?, pairs: None })
    }

    fn samples(
        input: &RunInput,
        run: &RunConfig,
        (seed, batch): (u64, usize),
    ) -> Result<RunSamples> {
        let samples = run.samples(&input.dataset, seed, batch)?;
        let validation = samples.validation.map(|samples| Box::new(samples) as Box<_>);
        Ok(RunSamples { train: Box::new(samples.train), validation })
    }

    fn report(
        trainer: &Trainer<Gpt>,
        dataset: &Dataset,
        tokenizer: &Tokenizer,
        outcome: &RunResult,
        sampling: (usize, &StopFlag),
    ) -> Result<()> {
        closing_report::gpt(trainer, dataset, tokenizer, outcome, sampling)
    }
}

impl TrainedModel for Bert {
    fn vocab_size(tokenizer: &Tokenizer) -> Result<usize> {
        Ok(tokenizer.special_tokens()?.vocab_size)
    }

    fn config(args: &TrainArgs, vocab_size: usize) -> Result<Self::Config> {
        args.bert_config(vocab_size)
    }

    fn sizes(config: &Self::Config) -> ModelSizes {
        config.into()
    }

    fn traffic(_: &Trainer<Bert>, _: usize) -> Option<StepTraffic> {
        None
    }

    fn open(
        args: &TrainArgs,
        config: &DataConfig,
        tokenizer: &Tokenizer,
        warn: impl Fn(&str),
    ) -> Result<RunInput> {
        let (train, validation) = corpus::open_documents(config, tokenizer, warn)?;
        let tokens = |documents: &Documents| documents.token_source(tokenizer.vocab_size());
        let dataset = Dataset {
            train: tokens(&train)?,
            validation: validation.as_ref().map(tokens).transpose()?,
        };
        let (special, length) = (tokenizer.special_tokens()?, args.model.seq_length()?);
        let train = SentencePairs::new(train, special, length, args.optimization.seed)?;
        // Validation data that are too short are refused only by a run that evaluates.
        let evaluates = args.run.eval_interval != Some(0) && args.run.eval_iters.0 != Some(0);
        let held_out = validation.filter(|_| evaluates);
        let held_out = held_out.map(|held_out| HeldOutPairs::new(held_out, special, length));
        Ok(RunInput { dataset, pairs: Some((train, held_out.transpose()?)) })
    }

    fn samples(input: &RunInput, run: &RunConfig, (_, batch): (u64, usize)) -> Result<RunSamples> {
        let missing = || Error::config("data", "bert needs documents");
        let (train, held_out) = input.pairs.clone().ok_or_else(missing)?;
        let samples = run.eval_iters.map_or(u64::MAX, |all| all.saturating_mul(batch as u64));
        let wanted = held_out.filter(|_| run.intervals.eval_interval > 0);
        let validation = wanted.map(|held_out| Box::new(held_out.first(samples)) as Box<_>);
        Ok(RunSamples { train: Box::new(train), validation })
    }

    fn report(
        _: &Trainer<Bert>,
        _: &Dataset,
        _: &Tokenizer,
        outcome: &RunResult,
        _: (usize, &StopFlag),
    ) -> Result<()> {
        closing_report::bert(outcome);
        Ok(())
    }
}
