//! `ferrotron eval`.

use clap::Args;
use ferrotron::models::data::{DataConfig, Dataset, Validation};
use ferrotron::models::evaluate::evaluate;
use ferrotron::{Error, Result};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

use super::corpus;
use super::device_args::DeviceArgs;
use super::generate::Loaded;

#[derive(Debug, Args)]
pub struct EvalArgs {
    /// Run folder or checkpoint [default: the newest of runs/]
    #[arg(long, value_name = "PATH")]
    load: Option<PathBuf>,
    /// Data whose last part is evaluated [default: the corpus that the program carries]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    data: Vec<PathBuf>,
    /// Share of the data that is evaluated; 1 takes all
    #[arg(long, value_name = "SHARE", default_value_t = 0.1)]
    split: f64,
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
    let whole = args.split >= 1.0;
    let split = if whole { 0.0 } else { args.split };
    let dataset = if args.data.is_empty() {
        Dataset::from_text(&corpus::text(), &tokenizer, split)?
    } else {
        Dataset::open(
            &DataConfig { data: args.data.clone(), validation_data: Vec::new(), split },
            &tokenizer,
        )?
    };
    let source = if whole { Some(dataset.train) } else { dataset.validation };
    let source = source.ok_or_else(|| Error::config("--split", "0 leaves nothing to evaluate"))?;
    let seq_length = args.seq_length.unwrap_or(loaded.gpt.config().max_position_embeddings);
    let found =
        evaluate(&loaded.gpt, &Validation::new(source, seq_length, args.micro_batch_size)?, None)?;
    if args.json {
        let report =
            json!({ "loss": found.loss, "perplexity": found.perplexity, "tokens": found.tokens });
        println!("{report}");
    } else {
        println!(
            "loss {:.4} over {} tokens (perplexity {:.2})",
            found.loss, found.tokens, found.perplexity
        );
    }
    Ok(ExitCode::SUCCESS)
}
