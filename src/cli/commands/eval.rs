//! `ferrotron eval`.

use clap::Args;
use ferrotron::models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron::models::data::{DataConfig, Split, TokenSource, Validation};
use ferrotron::models::evaluate::{Evaluation, LocalModel, evaluate};
use ferrotron::models::finite::first_not_finite;
use ferrotron::models::gpt::Gpt;
use ferrotron::models::stop::StopFlag;
use ferrotron::parallel::mesh::Mesh;
use ferrotron::tensor::At;
use ferrotron::{Error, Result};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::cli::args::device::DeviceArgs;
use crate::cli::args::train::SplitArgs;
use crate::cli::commands::generate::Loaded;
use crate::cli::corpus;
use crate::cli::definition::Definition;
use crate::cli::options::remembered;
use crate::cli::output;

#[derive(Debug, Args)]
pub struct EvalArgs {
    /// Run folder or checkpoint [default: the newest of runs/]
    #[arg(long, value_name = "PATH")]
    load: Option<PathBuf>,
    /// Data whose last part is evaluated [default: what the run was trained on]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    data: Vec<PathBuf>,
    /// Fraction of the tokens, at the end, that is evaluated; 1 takes all [default: what the run held out, or 0.1]
    #[arg(long, value_name = "SHARE")]
    valid_fraction: Option<f64>,
    /// Tokens per sequence [default: the longest that the model takes]
    #[arg(long, value_name = "N")]
    seq_length: Option<usize>,
    /// Sequences that go through the model at once
    #[arg(long, value_name = "N", default_value_t = 8)]
    micro_batch_size: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Take the moving average of the weights, which a run with --ema-decay keeps
    #[arg(long)]
    ema: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Measures the loss over every token of the validation part.
pub fn eval(args: &EvalArgs, definition: &Definition) -> Result<ExitCode> {
    let (loaded, tokenizer) = Loaded::with_tokenizer(args.load.as_ref(), &args.device, args.ema)?;
    let saved = loaded
        .checkpoint
        .as_ref()
        .map(|checkpoint| remembered::of_checkpoint(checkpoint, definition))
        .transpose()?;
    let (saved, _) = saved.unwrap_or_default();
    let data = if args.data.is_empty() {
        if loaded.checkpoint.as_ref().is_none_or(|checkpoint| checkpoint.run().is_null()) {
            let message = "must be given: --load names no run, which would name its data";
            return Err(Error::config("--data", message));
        }
        saved.values("data").into_iter().map(PathBuf::from).collect()
    } else {
        args.data.clone()
    };
    let given = args.valid_fraction;
    if let Some(share) = given.filter(|share| !(*share > 0.0 && *share <= 1.0)) {
        let message = format!("is the share that is evaluated: above 0, at most 1, got {share}");
        return Err(Error::config("--valid-fraction", message));
    }
    // All of it is what training would get if nothing were kept for validation.
    let whole = given == Some(1.0);
    let split = match given {
        Some(share) => Split::valid_fraction(if whole { 0.0 } else { share })?,
        None => SplitArgs::from_options(&saved).split()?,
    };
    let longest = loaded.gpt.config().max_position_embeddings;
    let seq_length = args.seq_length.unwrap_or(longest);
    if seq_length > longest {
        let message =
            format!("{seq_length} is more than the {longest} tokens that the model takes");
        return Err(Error::config("--seq-length", message));
    }
    // Data for validation alone that the run had is evaluated whole.
    let validation_data = match args.data.is_empty() && given.is_none() {
        true => saved.values("valid-data").into_iter().map(PathBuf::from).collect(),
        false => Vec::new(),
    };
    let config = DataConfig { data, validation_data, split };
    let origin = if args.data.is_empty() { "--data of the run" } else { "" };
    let dataset = corpus::open(&config, &tokenizer, output::note).at(origin)?;
    let source = if whole { Some(dataset.train) } else { dataset.validation };
    let source = source.ok_or_else(|| {
        let message = "leaves no token of this data to evaluate: give a larger share, or 1 for all";
        Error::config("--valid-fraction", message)
    })?;
    let batches = Batches { source, seq_length, micro_batch_size: args.micro_batch_size };
    let Evaluation { loss, perplexity, tokens, .. } = batches.evaluate(&loaded.gpt)?;
    output::line(&if args.json {
        json!({ "loss": loss, "perplexity": perplexity, "tokens": tokens }).to_string()
    } else {
        format!("loss {loss:.4} over {tokens} tokens (perplexity {perplexity:.2})")
    });
    Ok(ExitCode::SUCCESS)
}

/// The data of an evaluation, and how it is cut.
struct Batches {
    source: TokenSource,
    seq_length: usize,
    micro_batch_size: usize,
}

impl Batches {
    /// Evaluates all of it.
    ///
    /// # Errors
    /// A loss that is not finite, with the weight or else the batch that it comes from.
    fn evaluate(&self, gpt: &Gpt) -> Result<Evaluation> {
        let found = self.of(gpt, &self.source)?;
        if found.loss.is_finite() {
            return Ok(found);
        }
        let context = match first_not_finite(gpt)? {
            Some(weight) => weight,
            None => self.first_bad_batch(gpt)?,
        };
        Err(Error::value("eval", format!("the loss is {}: {context}", found.loss)))
    }

    fn of(&self, gpt: &Gpt, source: &TokenSource) -> Result<Evaluation> {
        let validation = Validation::new(source.clone(), self.seq_length)?;
        let micro_batch_size = self.micro_batch_size;
        let sizes = BatchSizeConfig { micro_batch_size, ..BatchSizeConfig::default() };
        // A signal ends the process: there is nothing to save.
        let never = StopFlag::default();
        let (parts, mesh) = (std::slice::from_ref(gpt), &Mesh::single());
        let model = LocalModel { parts, config: gpt.config(), scope: gpt.scope(), mesh };
        let found = evaluate(&model, &validation, BatchSize::new(sizes)?, &never)?;
        Ok(found.expect("an evaluation that is not asked to stop has a result"))
    }

    fn first_bad_batch(&self, gpt: &Gpt) -> Result<String> {
        let (size, length) =
            (self.seq_length as u64 * self.micro_batch_size as u64, self.source.len());
        // Each batch predicts `size` tokens; the first follows from the last one before it.
        for (batch, start) in (0..length - 1).step_by(size as usize).enumerate() {
            let end = length.min(start + size + 1);
            let loss = self.of(gpt, &self.source.slice(start..end)?)?.loss;
            if !loss.is_finite() {
                return Ok(format!(
                    "first in batch {batch}, tokens {start} to {}, though all weights are finite: {} overflows",
                    end - 1,
                    gpt.scope().dtype()
                ));
            }
        }
        Ok("the sum over all batches overflows".into())
    }
}
