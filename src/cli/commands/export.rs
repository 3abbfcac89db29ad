//! `ferrotron export`.

use clap::{Args, ValueEnum};
use ferrotron::Result;
use ferrotron::models::finite::first_not_finite;
use ferrotron::models::hugging_face;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::cli::args::device::DeviceArgs;
use crate::cli::commands::generate::Loaded;
use crate::cli::output;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A folder that transformers' GPT2LMHeadModel loads
    Hf,
}

#[derive(Debug, Args)]
pub struct ExportArgs {
    /// Run folder, checkpoint or Hugging Face folder
    #[arg(long, value_name = "PATH")]
    load: PathBuf,
    /// Format to write
    #[arg(long, value_enum, default_value = "hf")]
    format: Format,
    /// Folder to write
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
    /// Take the moving average of the weights, which a run with --ema-decay keeps
    #[arg(long)]
    ema: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Writes the model in the asked format.
pub fn export(args: &ExportArgs) -> Result<ExitCode> {
    let Loaded { gpt, tokenizer, .. } = Loaded::open(&args.load, &args.device, args.ema)?;
    match args.format {
        Format::Hf => {
            hugging_face::export(&gpt, &args.output)?;
            if let Some(weight) = first_not_finite(&gpt)? {
                output::note(&format!("warning: {weight}; written as it is"));
            }
            if let Some(tokenizer) = tokenizer {
                hugging_face::export_tokenizer(&tokenizer, &args.output)?;
            }
        }
    }
    output::line(&args.output.display().to_string());
    Ok(ExitCode::SUCCESS)
}
