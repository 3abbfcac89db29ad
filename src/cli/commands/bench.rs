//! `ferrotron bench`.

use clap::Args;
use ferrotron::models::bench::{BenchConfig, bench as measure};
use ferrotron::{Error, Result};
use std::process::ExitCode;

use crate::cli::args::device::{DeviceArgs, ExecutionArgs};
use crate::cli::args::model::ModelArgs;
use crate::cli::output;

#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Number of token ids [default: 50304, GPT-2's 50257 padded to a multiple of 128]
    #[arg(long, value_name = "N", default_value_t = 50_304)]
    vocab_size: usize,
    /// Samples per step
    #[arg(long, value_name = "N", default_value_t = 4)]
    micro_batch_size: usize,
    /// Timed steps
    #[arg(long, value_name = "N", default_value_t = 5)]
    steps: usize,
    /// Steps before those
    #[arg(long, value_name = "N", default_value_t = 2)]
    warmup: usize,
    /// Print one JSON object, which is what bench always prints
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    execution: ExecutionArgs,
}

/// Prints one JSON line.
pub fn bench(args: &BenchArgs) -> Result<ExitCode> {
    if args.steps == 0 || args.micro_batch_size == 0 || args.vocab_size == 0 {
        return Err(Error::config(
            "bench",
            "--steps, --micro-batch-size and --vocab-size must be positive",
        ));
    }
    let device = args.device.open()?;
    let config = BenchConfig {
        micro_batch_size: args.micro_batch_size,
        seq_length: args.model.seq_length()?,
        steps: args.steps,
        warmup: args.warmup,
        dtype: args.device.dtype()?,
        execution: args.execution.execution(&args.device)?,
        ..BenchConfig::new(args.model.config(args.vocab_size)?)
    };
    let report = measure(&config, &device)?;
    let line =
        serde_json::to_string(&report).map_err(|error| Error::io("bench", error.to_string()))?;
    output::line(&line);
    Ok(ExitCode::SUCCESS)
}
