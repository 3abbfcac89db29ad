//! `ferrotron export`.

use clap::{Args, ValueEnum};
use ferrotron::Result;
use ferrotron::models::checkpoint::Checkpoint;
use ferrotron::models::gpt::Gpt;
use ferrotron::models::hugging_face;
use ferrotron::nn::{Module, Scope};
use std::path::PathBuf;
use std::process::ExitCode;

use super::device_args::DeviceArgs;

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
    /// What to write
    #[arg(long, value_enum, default_value = "hf")]
    format: Format,
    /// Folder to write
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Writes the model in the asked format.
pub fn export(args: &ExportArgs) -> Result<ExitCode> {
    let device = args.device.open()?;
    let gpt = if hugging_face::is_folder(&args.load) {
        hugging_face::import(&args.load, &device, args.device.dtype()?)?
    } else {
        let checkpoint = Checkpoint::open(&args.load)?;
        let gpt = Gpt::new(&Scope::new(&device, checkpoint.dtype()?, 0), checkpoint.config())?;
        checkpoint.load_params(&gpt.params())?;
        gpt
    };
    match args.format {
        Format::Hf => hugging_face::export(&gpt, &args.output)?,
    }
    println!("{}", args.output.display());
    Ok(ExitCode::SUCCESS)
}
