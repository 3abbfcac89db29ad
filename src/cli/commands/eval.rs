//! `ferrotron eval`.

mod args;
mod bert;
mod tasks;
mod with_progress;

use ferrotron::models::data::{
    Blend, BlendConfig, BlendedDataset, DataConfig, DocumentConfig, DocumentSamples, FiniteSamples,
    TokenSource, Validation,
};
use ferrotron::models::evaluate::Evaluation;
use ferrotron::models::finite::first_not_finite;
use ferrotron::models::gpt::Gpt;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::tensor::At;
use ferrotron::{Error, Result};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

pub use args::EvalArgs;
use args::SplitPart;
use with_progress::evaluate_with_progress;

use crate::cli::args::data::{DataArgs, DataSource};
use crate::cli::corpus;
use crate::cli::definition::Definition;
use crate::cli::gpt_input::windows;
use crate::cli::job::{ModelRank, all_ready, run_on_ranks};
use crate::cli::loaded::{Loaded, is_bert, named_or_newest};
use crate::cli::options::remembered;
use crate::cli::output;
use crate::cli::tasks::Task;

/// The seed of a run that names none: the default of `--seed`.
const DEFAULT_SEED: u32 = 1234;

/// Measures the loss over a part of the data, or evaluates tasks; by several ranks if there are.
pub fn eval(args: &EvalArgs, definition: &Definition) -> Result<ExitCode> {
    let path = named_or_newest(args.load.as_ref())?;
    let tasks = args.tasks()?;
    let is_bert = is_bert(&path)?;
    let of_bert = |(task, _): &(Task, PathBuf)| *task == Task::Race;
    if let Some((task, _)) = tasks.iter().find(|task| of_bert(task) != is_bert) {
        let (own, other) = if is_bert { ("BERT", "GPT") } else { ("GPT", "BERT") };
        let (path, task) = (path.display(), task.name());
        let message = format!("'{path}' holds a {own}, and {task} is a task of a {other}");
        return Err(Error::config("--tasks", message));
    }
    run_on_ranks(&args.ranks, &args.device, |place| {
        match (is_bert, tasks.is_empty()) {
            (true, _) => bert::eval(args, &path, tasks.first(), definition, place)?,
            (false, true) => loss(args, &path, definition, place)?,
            (false, false) => tasks::eval(args, &path, &tasks, place)?,
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// Measures the loss over a part of the data.
fn loss(args: &EvalArgs, path: &Path, definition: &Definition, place: &ModelRank) -> Result<()> {
    let (loaded, batches) = all_ready(place, prepare(args, path, definition, place))?;
    let Evaluation { loss, perplexity, tokens, .. } = batches.evaluate(&loaded, place)?;
    if place.mesh.rank() == 0 {
        output::line(&if args.json {
            json!({ "loss": loss, "perplexity": perplexity, "tokens": tokens }).to_string()
        } else {
            format!("loss {loss:.4} over {tokens} tokens (perplexity {perplexity:.2})")
        });
    }
    Ok(())
}

/// Loads the model and opens the data.
fn prepare(
    args: &EvalArgs,
    path: &Path,
    definition: &Definition,
    place: &ModelRank,
) -> Result<(Loaded<Gpt>, Batches)> {
    let loaded = Loaded::<Gpt>::open_on(path, &args.device, args.ema, place)?;
    // Files of tokens need none.
    let ids = || Tokenizer::Null(loaded.config.vocab_size);
    let tokenizer = loaded.tokenizer.clone().unwrap_or_else(ids);
    let saved = loaded
        .checkpoint
        .as_ref()
        .map(|checkpoint| remembered::of_checkpoint(checkpoint, definition))
        .transpose()?;
    let (saved, _) = saved.unwrap_or_default();
    let seq_length = args.sequence_length(loaded.config.max_position_embeddings)?;
    let is_run = loaded.checkpoint.as_ref().is_some_and(|checkpoint| !checkpoint.run().is_null());
    let (source, origin) = args.data_config(&saved, is_run)?;
    let of_run = DataArgs::from_options(&saved);
    let samples = args.samples(&saved)?;
    let evaluated = match source {
        DataSource::Files(config) => {
            let warn = |warning: &str| place.warn(warning);
            files(args, &config, &tokenizer, samples, seq_length, warn)
        }
        DataSource::Sets(config) => {
            let packing = of_run.packing.config(seq_length);
            // Validation has other samples in each evaluation of the run.
            let is_megatron = saved.values("data-order") == ["megatron"];
            let seed =
                saved.values("seed").pop().map_or(Some(DEFAULT_SEED), |seed| seed.parse().ok());
            let wanted = is_megatron && args.part() == SplitPart::Test && samples.is_some();
            let order = seed.filter(|_| wanted).map(|seed: u32| (seed, 1));
            sets(args.part(), &config, &tokenizer, packing.is_some()).and_then(|blend| {
                match (blend.num_sets(), packing, samples, order) {
                    (1, None, None, None) => Ok(Evaluated::Stream(blend.tokens())),
                    (..) => {
                        windows(&blend, seq_length, samples, packing, order).map(Evaluated::Samples)
                    }
                }
            })
        }
    };
    let evaluated = evaluated.at(origin)?;
    let documents = of_run.documents(&tokenizer)?;
    let batches =
        Batches { evaluated, seq_length, micro_batch_size: args.micro_batch_size, documents };
    Ok((loaded, batches))
}

/// Opens the part of files that is evaluated.
fn files(
    args: &EvalArgs,
    config: &DataConfig,
    tokenizer: &Tokenizer,
    samples: Option<u64>,
    seq_length: usize,
    warn: impl Fn(&str),
) -> Result<Evaluated> {
    corpus::warn_of_pairs(config.data.iter().map(PathBuf::as_path), &warn);
    let dataset = corpus::open(config, tokenizer, warn)?;
    let source = match args.part() {
        SplitPart::Valid if args.valid_fraction == Some(1.0) => dataset.train,
        SplitPart::Valid => dataset.validation.ok_or_else(|| {
            let message =
                "leaves no token of this data to evaluate: give a larger share, or 1 for all";
            Error::config("--valid-fraction", message)
        })?,
        SplitPart::Train => dataset.train,
        SplitPart::Test => {
            let message = "test is a part of data sets, and nothing reads that of --data: evaluate its file by --data FILE \
                           --valid-fraction 1";
            return Err(Error::config("--split-part", message));
        }
    };
    match samples {
        None => Ok(Evaluated::Stream(source)),
        Some(samples) => {
            let windows = Validation::new(source, seq_length)?.first(samples)?;
            Ok(Evaluated::Samples(Box::new(windows)))
        }
    }
}

/// Opens the part of data sets that is evaluated.
fn sets(
    part: SplitPart,
    config: &BlendConfig,
    tokenizer: &Tokenizer,
    pairs: bool,
) -> Result<Blend> {
    config.check_tokenizer(tokenizer)?;
    let open = if pairs { BlendedDataset::open_pairs } else { BlendedDataset::open };
    let BlendedDataset { training, validation, test } = open(config, tokenizer.vocab_size())?;
    let (found, names) = match part {
        SplitPart::Train => (Some(training), ""),
        SplitPart::Valid => (validation, "--valid-data-path"),
        SplitPart::Test => (test, "--test-data-path"),
    };
    found.ok_or_else(|| {
        let message = format!(
            "the run has held out nothing for this part: neither by {names} nor by --split; name data by --data"
        );
        Error::config("--split-part", message)
    })
}

/// The tokens that are evaluated.
enum Evaluated {
    Stream(TokenSource),
    /// Windows of several sets or some of one, or fine-tuning samples, whose completions count.
    Samples(Box<dyn FiniteSamples>),
}

/// The data of an evaluation, and how it is cut.
struct Batches {
    evaluated: Evaluated,
    seq_length: usize,
    micro_batch_size: usize,
    /// The treatment of the ends of documents, as in the run.
    documents: Option<DocumentConfig>,
}

impl Batches {
    /// Evaluates all of it.
    ///
    /// # Errors
    /// A loss that is not finite, with the weight or else the batch that it comes from.
    fn evaluate(&self, loaded: &Loaded<Gpt>, place: &ModelRank) -> Result<Evaluation> {
        let found = match &self.evaluated {
            Evaluated::Stream(source) => self.of(loaded, place, source)?,
            Evaluated::Samples(samples) => self.ended(loaded, place, &**samples)?,
        };
        if found.loss.is_finite() {
            return Ok(found);
        }
        let context = match place.mesh.world().size() {
            1 => match (first_not_finite(&loaded.model)?, &self.evaluated) {
                (Some(weight), _) => weight,
                (None, Evaluated::Stream(source)) => self.first_bad_batch(loaded, place, source)?,
                (None, Evaluated::Samples(_)) => {
                    format!("all weights are finite, and {} overflows", loaded.scope.dtype())
                }
            },
            // Each rank has a part of the weights.
            _ => "evaluate with one rank to find the weight or the batch".to_string(),
        };
        Err(Error::value("eval", format!("the loss is {}: {context}", found.loss)))
    }

    fn of(
        &self,
        loaded: &Loaded<Gpt>,
        place: &ModelRank,
        source: &TokenSource,
    ) -> Result<Evaluation> {
        self.ended(loaded, place, &Validation::new(source.clone(), self.seq_length)?)
    }

    /// Evaluates samples, in which documents end as in the run.
    fn ended(
        &self,
        loaded: &Loaded<Gpt>,
        place: &ModelRank,
        samples: &dyn FiniteSamples,
    ) -> Result<Evaluation> {
        match self.documents {
            Some(config) => self.samples(loaded, place, &DocumentSamples::new(samples, config)),
            None => self.samples(loaded, place, samples),
        }
    }

    fn samples(
        &self,
        loaded: &Loaded<Gpt>,
        place: &ModelRank,
        samples: &dyn FiniteSamples,
    ) -> Result<Evaluation> {
        evaluate_with_progress(loaded, samples, self.micro_batch_size, place)
    }

    fn first_bad_batch(
        &self,
        loaded: &Loaded<Gpt>,
        place: &ModelRank,
        source: &TokenSource,
    ) -> Result<String> {
        let (size, length) = (self.seq_length as u64 * self.micro_batch_size as u64, source.len());
        // Each batch predicts `size` tokens; the first follows from the last one before it.
        for (batch, start) in (0..length - 1).step_by(size as usize).enumerate() {
            let end = length.min(start + size + 1);
            let loss = self.of(loaded, place, &source.slice(start..end)?)?.loss;
            if !loss.is_finite() {
                return Ok(format!(
                    "first in batch {batch}, tokens {start} to {}, though all weights are finite: {} overflows",
                    end - 1,
                    loaded.scope.dtype()
                ));
            }
        }
        Ok("the sum over all batches overflows".into())
    }
}
