//! `ferrotron eval`.

mod args;
mod bert;
mod tasks;

use ferrotron::models::data::{
    BlendedDataset, Dataset, DocumentConfig, DocumentSamples, FiniteSamples, PackedSamples,
    TokenSource, Validation,
};
use ferrotron::models::evaluate::{Evaluation, LocalModel, evaluate};
use ferrotron::models::finite::first_not_finite;
use ferrotron::models::gpt::Gpt;
use ferrotron::models::stop::StopFlag;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::tensor::At;
use ferrotron::{Error, Result};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

pub use args::EvalArgs;
use args::Task;

use crate::cli::args::data::{DataArgs, DataSource};
use crate::cli::corpus;
use crate::cli::definition::Definition;
use crate::cli::job::{ModelRank, all_ready, run_on_ranks};
use crate::cli::loaded::{Loaded, is_bert, named_or_newest};
use crate::cli::options::remembered;
use crate::cli::output;

/// Measures the loss over every token of the validation part, or evaluates tasks; by several ranks if there are.
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

/// Measures the loss over every token of the validation part.
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
    let none = || {
        let message = "leaves no token of this data to evaluate: give a larger share, or 1 for all";
        Error::config("--valid-fraction", message)
    };
    let evaluated = match (source, of_run.packing.config(seq_length)) {
        (DataSource::Sets(config), Some(packing)) => config
            .check_tokenizer(&tokenizer)
            .and_then(|()| BlendedDataset::open_pairs(&config, tokenizer.vocab_size()))
            .and_then(|sets| PackedSamples::new(&sets.validation.ok_or_else(none)?, &packing))
            .map(Evaluated::Packed),
        (source, _) => {
            let whole = args.valid_fraction == Some(1.0);
            let evaluated = |dataset: Dataset| match whole {
                true => Ok(dataset.train),
                false => dataset.validation.ok_or_else(none),
            };
            open_streams(source, &tokenizer).and_then(evaluated).map(Evaluated::Stream)
        }
    };
    let evaluated = evaluated.at(origin)?;
    let documents = of_run.documents(&tokenizer)?;
    let batches =
        Batches { evaluated, seq_length, micro_batch_size: args.micro_batch_size, documents };
    Ok((loaded, batches))
}

/// Opens data as streams of tokens.
fn open_streams(source: DataSource, tokenizer: &Tokenizer) -> Result<Dataset> {
    match source {
        DataSource::Files(config) => {
            let paths = config.data.iter().map(PathBuf::as_path);
            corpus::warn_of_pairs(paths, output::note);
            corpus::open(&config, tokenizer, output::note)
        }
        DataSource::Sets(config) => {
            config.check_tokenizer(tokenizer)?;
            Ok(BlendedDataset::open(&config, tokenizer.vocab_size())?.streams())
        }
    }
}

/// The tokens that are evaluated.
enum Evaluated {
    Stream(TokenSource),
    /// Fine-tuning samples, whose completions count.
    Packed(PackedSamples),
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
            Evaluated::Packed(samples) => self.samples(loaded, place, samples)?,
        };
        if found.loss.is_finite() {
            return Ok(found);
        }
        let context = match place.mesh.world().size() {
            1 => match (first_not_finite(&loaded.model)?, &self.evaluated) {
                (Some(weight), _) => weight,
                (None, Evaluated::Stream(source)) => self.first_bad_batch(loaded, place, source)?,
                (None, Evaluated::Packed(_)) => {
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
        let plain = Validation::new(source.clone(), self.seq_length)?;
        let validation: Box<dyn FiniteSamples> = match self.documents {
            Some(config) => Box::new(DocumentSamples::new(plain, config)),
            None => Box::new(plain),
        };
        self.samples(loaded, place, &*validation)
    }

    fn samples(
        &self,
        loaded: &Loaded<Gpt>,
        place: &ModelRank,
        samples: &dyn FiniteSamples,
    ) -> Result<Evaluation> {
        // A signal ends the process: there is nothing to save.
        let never = StopFlag::default();
        let Loaded { model, config, scope, .. } = loaded;
        let (parts, mesh) = (std::slice::from_ref(model), &place.mesh);
        let sizes = place.batch_size(self.micro_batch_size)?;
        let model = LocalModel { parts, config, scope, mesh };
        let found = evaluate(&model, samples, sizes, &never)?;
        Ok(found.expect("an evaluation that is not asked to stop has a result"))
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
