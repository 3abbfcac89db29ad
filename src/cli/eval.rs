//! `ferrotron eval`.

use clap::Args;
use ferrotron::models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron::models::data::{DataConfig, Dataset, Validation};
use ferrotron::models::evaluate::{Evaluation, evaluate};
use ferrotron::models::stop::StopFlag;
use ferrotron::parallel::mesh::Mesh;
use ferrotron::{Error, Result};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

use super::corpus;
use super::device_args::DeviceArgs;
use super::generate::Loaded;
use super::options::values;
use super::output;

#[derive(Debug, Args)]
pub struct EvalArgs {
    /// Run folder or checkpoint [default: the newest of runs/]
    #[arg(long, value_name = "PATH")]
    load: Option<PathBuf>,
    /// Data whose last part is evaluated [default: what the run was trained on]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    data: Vec<PathBuf>,
    /// Share of the data that is evaluated; 1 takes all [default: that of the run, or 0.1]
    #[arg(long, value_name = "SHARE")]
    split: Option<f64>,
    /// Tokens per sequence [default: the longest that the model takes]
    #[arg(long, value_name = "N")]
    seq_length: Option<usize>,
    /// Sequences that go through the model at once
    #[arg(long, value_name = "N", default_value_t = 8)]
    micro_batch_size: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Measures the loss over every token of the validation part.
pub fn eval(args: &EvalArgs) -> Result<ExitCode> {
    let (loaded, tokenizer) = Loaded::with_tokenizer(args.load.as_ref(), &args.device)?;
    let saved = |name: &str| values(&loaded.options, name).unwrap_or_default();
    let data = if args.data.is_empty() {
        saved("--data").into_iter().map(PathBuf::from).collect()
    } else {
        args.data.clone()
    };
    let saved_split = saved("--split").first().and_then(|text| text.to_str()?.parse().ok());
    let split = args.split.or(saved_split).unwrap_or(0.1);
    // All of it is what training would get if nothing were kept for validation.
    let whole = split == 1.0;
    let kept = if whole { 0.0 } else { split };
    let dataset = if data.is_empty() {
        Dataset::from_text(&corpus::text(), &tokenizer, kept)?
    } else {
        Dataset::open(&DataConfig { data, validation_data: Vec::new(), split: kept }, &tokenizer)?
    };
    let source = if whole { Some(dataset.train) } else { dataset.validation };
    let source = source.ok_or_else(|| Error::config("--split", "0 leaves nothing to evaluate"))?;
    let seq_length = args.seq_length.unwrap_or(loaded.gpt.config().max_position_embeddings);
    let validation = Validation::new(source, seq_length)?;
    let micro_batch_size = args.micro_batch_size;
    let sizes = BatchSize::new(BatchSizeConfig { micro_batch_size, ..BatchSizeConfig::default() })?;
    // A signal ends the process: there is nothing to save.
    let never = StopFlag::default();
    let found = evaluate(&[loaded.gpt], &Mesh::single(), &validation, sizes, &never)?;
    let Some(Evaluation { loss, perplexity, tokens }) = found else {
        return Ok(ExitCode::FAILURE);
    };
    output::line(&if args.json {
        json!({ "loss": loss, "perplexity": perplexity, "tokens": tokens }).to_string()
    } else {
        format!("loss {loss:.4} over {tokens} tokens (perplexity {perplexity:.2})")
    });
    Ok(ExitCode::SUCCESS)
}
