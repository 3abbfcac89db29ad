//! The command line: one file per subcommand, one per group of options.

mod bench;
mod config_file;
mod corpus;
mod device_args;
mod eval;
mod export;
mod generate;
mod model_args;
mod progress;
mod train;
mod train_args;

use clap::{Parser, Subcommand};
use ferrotron::Result;
use std::ffi::OsString;
use std::process::ExitCode;

/// Pre-train GPT-class models, from one laptop core up.
#[derive(Debug, Parser)]
#[command(name = "ferrotron", version, args_override_self = true, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a model; without options, a small one on a corpus that the program carries
    Train(Box<train_args::TrainArgs>),
    /// Continue a text with a trained model
    Generate(generate::GenerateArgs),
    /// Measure a trained model's loss on data
    Eval(eval::EvalArgs),
    /// Write a trained model in another format
    Export(export::ExportArgs),
    /// Time training steps
    Bench(bench::BenchArgs),
}

/// Runs the program; the exit code is that of a run that was asked to stop, or 0.
pub fn run(arguments: Vec<OsString>) -> Result<ExitCode> {
    let arguments = config_file::expand(arguments)?;
    let (arguments, options) = train::with_saved_options(arguments)?;
    match Cli::parse_from(arguments).command {
        Command::Train(args) => train::train(&args, options),
        Command::Generate(args) => generate::generate(&args),
        Command::Eval(args) => eval::eval(&args),
        Command::Export(args) => export::export(&args),
        Command::Bench(args) => bench::bench(&args),
    }
}
