//! Adapts each model to the command line: its configuration by options, its data, its report.

use ferrotron::models::bert::Bert;
use ferrotron::models::data::tasks::WikiTextConfig;
use ferrotron::models::evaluate::Evaluation;
use ferrotron::models::gpt::Gpt;
use ferrotron::models::hugging_face::{self, FolderWeights, ReadParam};
use ferrotron::models::run::{EvaluationTask, RunConfig, RunResult};
use ferrotron::models::stop::StopFlag;
use ferrotron::models::support::ModelSizes;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::models::traffic::{StepTraffic, expected_traffic};
use ferrotron::models::trainer::{Model, Trainer};
use ferrotron::parallel::mesh::ParallelDims;
use ferrotron::{Error, Result};
use std::path::Path;

use super::args::data::DataSource;
use super::args::train::TrainArgs;
use super::bert_input::{self, BertInput, HeldOut};
use super::run_samples::{OrderLength, RunInput, RunSamples, SampleScope};
use super::sample::SampleTask;
use super::tasks::GptTask;
use super::{closing_report, gpt_input};

/// A model that the command line trains.
pub trait TrainedModel: Model {
    /// Number of token ids, with those that the model adds to a tokenizer's.
    fn vocab_size(tokenizer: &Tokenizer) -> Result<usize>;

    /// The configuration that the options give.
    fn config(args: &TrainArgs, vocab_size: usize) -> Result<Self::Config>;

    /// The sizes that layouts must suit.
    fn sizes(config: &Self::Config) -> ModelSizes;

    /// The configuration of the model in a Hugging Face folder.
    fn folder_config(folder: &Path) -> Result<Self::Config>;

    /// Opens the weights of a Hugging Face folder.
    fn folder_weights(folder: &Path, config: &Self::Config) -> Result<FolderWeights>;

    /// Opens the weights of a Hugging Face folder for a model that gets a new head.
    fn pretrained_weights(folder: &Path, config: &Self::Config) -> Result<FolderWeights>;

    /// Writes the model into a Hugging Face folder, as a family by its `model_type` or as the first that holds it. `read`
    /// returns the parameters.
    fn export(&self, family: Option<&str>, folder: &Path, read: &mut ReadParam) -> Result<()>;

    /// The bytes that this rank sends in a step, if they are known before.
    fn traffic(trainer: &Trainer<Self>, seq_length: usize) -> Result<Option<StepTraffic>>;

    /// Opens the data; `warn` is told of files that are left out.
    fn open(
        args: &TrainArgs,
        source: &DataSource,
        order: &OrderLength,
        tokenizer: &Tokenizer,
        warn: impl Fn(&str),
    ) -> Result<RunInput>;

    /// The samples of a run.
    fn samples(input: &RunInput, run: &RunConfig, scope: &SampleScope) -> Result<RunSamples>;

    /// The tasks on which the model is evaluated during the run in a layout.
    ///
    /// # Errors
    /// A model without tasks; tasks whose data cannot be read, or that the layout excludes.
    fn tasks(
        args: &TrainArgs,
        _: &Tokenizer,
        _: &Self::Config,
        _: &ParallelDims,
    ) -> Result<Vec<Box<dyn EvaluationTask<Self>>>> {
        if args.tensorboard.log_samples_to_tensorboard {
            let message = "a bert writes no text: leave it out";
            return Err(Error::config("--log-samples-to-tensorboard", message));
        }
        if args.evaluation.eval_tasks.is_empty() {
            return Ok(Vec::new());
        }
        let message = "has tasks of a GPT: the accuracy of a BERT in RACE is that of --valid-data, with --task race";
        Err(Error::config("--eval-tasks", message))
    }

    /// Prints the results; of a model that can, with a sample of so many tokens, which is returned.
    fn report(
        trainer: &Trainer<Self>,
        input: &RunInput,
        tokenizer: &Tokenizer,
        outcome: &RunResult,
        sampling: (usize, &StopFlag),
    ) -> Result<Option<String>>;

    /// The result of an evaluation in words.
    fn evaluation_line(evaluation: &Evaluation) -> String;
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

    fn folder_config(folder: &Path) -> Result<Self::Config> {
        hugging_face::read_config(folder)
    }

    fn folder_weights(folder: &Path, config: &Self::Config) -> Result<FolderWeights> {
        hugging_face::weights(folder, config)
    }

    fn pretrained_weights(_: &Path, _: &Self::Config) -> Result<FolderWeights> {
        Err(Error::config("--pretrained-checkpoint", "is for a BERT: leave it out"))
    }

    fn export(&self, family: Option<&str>, folder: &Path, read: &mut ReadParam) -> Result<()> {
        hugging_face::export_from(self, family, folder, read)
    }

    fn traffic(trainer: &Trainer<Gpt>, seq_length: usize) -> Result<Option<StepTraffic>> {
        Ok(Some(expected_traffic(trainer, seq_length)?))
    }

    fn open(
        args: &TrainArgs,
        source: &DataSource,
        order: &OrderLength,
        tokenizer: &Tokenizer,
        warn: impl Fn(&str),
    ) -> Result<RunInput> {
        gpt_input::open(args, source, order, tokenizer, warn)
    }

    fn samples(input: &RunInput, run: &RunConfig, scope: &SampleScope) -> Result<RunSamples> {
        gpt_input::samples(input, run, scope)
    }

    fn tasks(
        args: &TrainArgs,
        tokenizer: &Tokenizer,
        config: &Self::Config,
        layout: &ParallelDims,
    ) -> Result<Vec<Box<dyn EvaluationTask<Gpt>>>> {
        let seq_length = args.model.seq_length()?;
        let overlapping_eval = args.evaluation.overlapping_eval.min(seq_length);
        let windows = WikiTextConfig { seq_length, overlapping_eval };
        let micro = args.optimization.micro_batch_size;
        let open = |task| -> Result<Box<dyn EvaluationTask<Gpt>>> {
            Ok(Box::new(GptTask::new(&task, tokenizer, windows, config, micro)?))
        };
        let mut tasks =
            args.evaluation.tasks()?.into_iter().map(open).collect::<Result<Vec<_>>>()?;
        if args.tensorboard.log_samples_to_tensorboard {
            tasks.push(Box::new(SampleTask::new(args, tokenizer, layout)?));
        }
        Ok(tasks)
    }

    fn report(
        trainer: &Trainer<Gpt>,
        input: &RunInput,
        tokenizer: &Tokenizer,
        outcome: &RunResult,
        sampling: (usize, &StopFlag),
    ) -> Result<Option<String>> {
        let stream = input.evaluated_stream();
        closing_report::gpt(trainer, stream, tokenizer, outcome, sampling)
    }

    fn evaluation_line(evaluation: &Evaluation) -> String {
        closing_report::gpt_line(evaluation)
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

    fn folder_config(folder: &Path) -> Result<Self::Config> {
        hugging_face::bert::read_config(folder)
    }

    fn folder_weights(folder: &Path, config: &Self::Config) -> Result<FolderWeights> {
        hugging_face::bert::weights(folder, config)
    }

    fn pretrained_weights(folder: &Path, config: &Self::Config) -> Result<FolderWeights> {
        hugging_face::bert::pretrained_weights(folder, config)
    }

    fn export(&self, family: Option<&str>, folder: &Path, read: &mut ReadParam) -> Result<()> {
        hugging_face::bert::export_from(self, family, folder, read)
    }

    fn traffic(_: &Trainer<Bert>, _: usize) -> Result<Option<StepTraffic>> {
        Ok(None)
    }

    fn open(
        args: &TrainArgs,
        source: &DataSource,
        order: &OrderLength,
        tokenizer: &Tokenizer,
        warn: impl Fn(&str),
    ) -> Result<RunInput> {
        if args.data.documents(tokenizer)?.is_some() {
            let message = "a bert takes sentences, which are not packed: leave it out";
            return Err(Error::config("--reset-attention-mask", message));
        }
        let (dataset, bert) =
            bert_input::open(args, source, order.state.as_deref(), tokenizer, warn)?;
        Ok(RunInput::of_bert(dataset, bert))
    }

    fn samples(input: &RunInput, run: &RunConfig, scope: &SampleScope) -> Result<RunSamples> {
        let missing = || Error::config("data", "bert needs documents");
        let BertInput { train, held_out, test, .. } = input.bert.clone().ok_or_else(missing)?;
        let batch = scope.eval_batch as u64;
        let first = |held_out: HeldOut, iters: Option<u64>| {
            let samples = iters.map_or(u64::MAX, |all| all.saturating_mul(batch));
            let wanted = run.intervals.eval_interval > 0 && samples > 0;
            wanted.then(|| held_out.first(samples))
        };
        let named =
            |(name, set): (Option<String>, HeldOut)| Some((name, first(set, run.eval_iters)?));
        let validation = held_out.into_iter().filter_map(named).collect();
        let test = test.and_then(|test| first(test, scope.test_iters));
        RunSamples::new(train, validation, test, None)
    }

    fn report(
        _: &Trainer<Bert>,
        _: &RunInput,
        _: &Tokenizer,
        outcome: &RunResult,
        _: (usize, &StopFlag),
    ) -> Result<Option<String>> {
        closing_report::bert(outcome);
        Ok(None)
    }

    fn evaluation_line(evaluation: &Evaluation) -> String {
        closing_report::bert_line(evaluation)
    }
}
