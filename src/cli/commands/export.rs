//! `ferrotron export`.

use clap::{Args, ValueEnum};
use ferrotron::models::bert::Bert;
use ferrotron::models::finite::not_finite_in;
use ferrotron::models::gpt::Gpt;
use ferrotron::models::hugging_face::{self, CompanionFiles};
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::{Error, Result};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::cli::architecture::TrainedModel;
use crate::cli::args::device::DeviceArgs;
use crate::cli::loaded::is_bert;
use crate::cli::options::imported;
use crate::cli::output;
use crate::cli::rank_environment::rank_environment;
use crate::cli::stored_model::StoredModel;

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

/// Writes the model in the asked format. Of several ranks the first does, as it takes the memory of a few parameters only.
pub fn export(args: &ExportArgs) -> Result<ExitCode> {
    if rank_environment()?.is_some_and(|rank| rank.rank > 0) {
        return Ok(ExitCode::SUCCESS);
    }
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
    let StoredModel { model, config, tokenizer, mut weights } =
        StoredModel::<M>::open(&args.load, &args.device, args.ema)?;
    let companions = match weights.checkpoint() {
        Some(checkpoint) => CompanionFiles::recorded(&checkpoint.progress().extra),
        None => CompanionFiles::read(&args.load)?,
    };
    if hugging_face::is_folder(&args.output) {
        imported::check_config::<M>(&args.output, &config).map_err(|error| {
            let message = format!("{}; it would be replaced: give another folder", error.context());
            Error::config("--output", message)
        })?;
    }
    // The first in the order of the forward pass explains the others.
    let mut damaged: Vec<(String, String)> = Vec::new();
    model.export(args.family.as_deref(), &args.output, &mut |param| {
        let value = weights.read(param)?;
        damaged
            .extend(not_finite_in(param.name(), &value)?.map(|what| (param.name().into(), what)));
        Ok(value)
    })?;
    let first = model.params().into_iter().find_map(|param| {
        damaged.iter().find(|(name, _)| name == param.name()).map(|(_, what)| what)
    });
    if let Some(weight) = first {
        output::note(&format!("warning: {weight}; written as it is"));
    }
    companions.write(&args.output)?;
    let Some(tokenizer) = tokenizer else { return Ok(()) };
    if matches!(tokenizer, Tokenizer::Char(_) | Tokenizer::Byte) {
        output::note(&format!(
            "'{}' has no tokenizer.json: the {} tokenizer exists only in checkpoints, from which generate reads it",
            args.output.display(),
            tokenizer.name()
        ));
    }
    hugging_face::export_tokenizer(&tokenizer, &args.output)
}
