//! `ferrotron export`.

use clap::{Args, ValueEnum};
use ferrotron::Result;
use ferrotron::models::bert::Bert;
use ferrotron::models::finite::first_not_finite;
use ferrotron::models::hugging_face;
use ferrotron::models::tokenizer::Tokenizer;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::cli::args::device::DeviceArgs;
use crate::cli::commands::generate::{Loaded, is_bert, open_checkpoint, read};
use crate::cli::output;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A folder that transformers loads: as GPT2LMHeadModel, or as the class of a BERT
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
    match args.format {
        Format::Hf => {
            let (bad_weight, tokenizer) = match is_bert(&args.load)? {
                true => export_bert(args)?,
                false => export_gpt(args)?,
            };
            if let Some(weight) = bad_weight {
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

/// Writes a GPT; returns a line about its first weight that is not finite, and its tokenizer.
fn export_gpt(args: &ExportArgs) -> Result<(Option<String>, Option<Tokenizer>)> {
    let Loaded { gpt, tokenizer, .. } = Loaded::open(&args.load, &args.device, args.ema)?;
    hugging_face::export(&gpt, &args.output)?;
    Ok((first_not_finite(&gpt)?, tokenizer))
}

/// As [`export_gpt`], of a BERT.
fn export_bert(args: &ExportArgs) -> Result<(Option<String>, Option<Tokenizer>)> {
    let checkpoint = open_checkpoint(&args.load, args.ema)?;
    let bert: Bert = read(&checkpoint, &args.device.open()?, args.device.given_dtype()?)?;
    hugging_face::bert::export(&bert, &args.output)?;
    Ok((first_not_finite(&bert)?, checkpoint.tokenizer().cloned()))
}
