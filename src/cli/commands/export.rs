//! `ferrotron export`.

use clap::{Args, ValueEnum};
use ferrotron::models::bert::Bert;
use ferrotron::models::finite::first_not_finite;
use ferrotron::models::gpt::Gpt;
use ferrotron::models::hugging_face::{self, CompanionFiles};
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::{Error, Result};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::cli::architecture::TrainedModel;
use crate::cli::args::device::DeviceArgs;
use crate::cli::loaded::{Loaded, is_bert};
use crate::cli::options::imported;
use crate::cli::output;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A folder that transformers loads: of a GPT as the first family that holds it, of a BERT as its class
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
    /// Family to write, by its model_type: gpt2, llama, mistral, qwen2, qwen3, gemma2, gpt_neox, bert, megatron-bert
    /// [default: the first that holds the model]
    #[arg(long, value_name = "NAME")]
    family: Option<String>,
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
    let same = |a: &Path, b: &Path| matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b);
    if same(&args.load, &args.output) {
        let message = "is the folder of --load, which would be replaced: give another folder";
        return Err(Error::config("--output", format!("'{}' {message}", args.output.display())));
    }
    match (args.format, is_bert(&args.load)?) {
        (Format::Hf, true) => to_hugging_face::<Bert>(args)?,
        (Format::Hf, false) => to_hugging_face::<Gpt>(args)?,
    }
    output::line(&args.output.display().to_string());
    Ok(ExitCode::SUCCESS)
}

fn to_hugging_face<M: TrainedModel>(args: &ExportArgs) -> Result<()> {
    let loaded = Loaded::<M>::open(&args.load, &args.device, args.ema)?;
    let companions = match &loaded.checkpoint {
        Some(checkpoint) => CompanionFiles::recorded(&checkpoint.progress().extra),
        None => CompanionFiles::read(&args.load)?,
    };
    if hugging_face::is_folder(&args.output) {
        imported::check_config::<M>(&args.output, &loaded.config).map_err(|error| {
            let message = format!("{}; it would be replaced: give another folder", error.context());
            Error::config("--output", message)
        })?;
    }
    loaded.model.export(args.family.as_deref(), &args.output)?;
    if let Some(weight) = first_not_finite(&loaded.model)? {
        output::note(&format!("warning: {weight}; written as it is"));
    }
    companions.write(&args.output)?;
    let Some(tokenizer) = loaded.tokenizer else { return Ok(()) };
    if matches!(tokenizer, Tokenizer::Char(_) | Tokenizer::Byte) {
        output::note(&format!(
            "'{}' has no tokenizer.json: the {} tokenizer exists only in checkpoints, from which generate reads it",
            args.output.display(),
            tokenizer.name()
        ));
    }
    hugging_face::export_tokenizer(&tokenizer, &args.output)
}
