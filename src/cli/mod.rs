//! The command line: one file per subcommand, one per group of options.

mod adafactor_args;
mod bench;
mod bytes;
mod config_file;
mod corpus;
mod device_args;
mod doctor;
mod eval;
mod export;
mod generate;
mod job;
mod memory;
mod memory_limits;
mod model_args;
mod offload_args;
mod options;
mod output;
mod parallel_args;
mod precision_args;
mod progress;
mod run_folder;
mod schedule;
mod train;
mod train_args;

use clap::{CommandFactory, Parser, Subcommand};
use ferrotron::parallel::launch::COMMUNICATION_FAILED;
use ferrotron::{Error, ErrorKind, Result};
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

/// Pre-train GPT-class models, from one laptop core up.
#[derive(Debug, Parser)]
#[command(name = "ferrotron", version, args_override_self = true, disable_help_subcommand = true)]
struct Cli {
    /// TOML file with options by name; what is typed overrides it
    #[arg(long, value_name = "FILE", global = true)]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a model; without options, a small one on a corpus that the program carries
    #[command(allow_negative_numbers = true)]
    Train(Box<train_args::TrainArgs>),
    /// Continue a text with a trained model
    #[command(allow_negative_numbers = true)]
    Generate(generate::GenerateArgs),
    /// Measure a trained model's loss on data
    #[command(allow_negative_numbers = true)]
    Eval(eval::EvalArgs),
    /// Write a trained model in another format
    Export(export::ExportArgs),
    /// Tell what a run takes of memory before it starts
    #[command(allow_negative_numbers = true)]
    Memory(Box<memory::MemoryArgs>),
    /// Time training steps
    Bench(bench::BenchArgs),
    /// Draw and time the schedule of a pipeline
    #[command(allow_negative_numbers = true)]
    Schedule(schedule::ScheduleArgs),
    /// Say what this machine offers for GPUs, and what is missing
    Doctor(doctor::DoctorArgs),
}

/// Says what went wrong, and where if `place` is not empty; returns the exit code: as for flags that do not parse, 2 for
/// what the user asked for.
pub fn failed(place: &str, error: &Error) -> ExitCode {
    output::note(&format!("ferrotron: {place}{error}"));
    ExitCode::from(match error.kind() {
        ErrorKind::Config => 2,
        ErrorKind::Communication => COMMUNICATION_FAILED,
        _ => 1,
    })
}

/// Runs the program; the exit code is that of a run that was asked to stop, or 0.
pub fn run(arguments: Vec<OsString>) -> Result<ExitCode> {
    let definition = Cli::command();
    let subcommand = arguments.get(1).and_then(|name| definition.find_subcommand(name));
    let mut rank = None;
    let (arguments, saved) = match subcommand {
        None => (arguments, Vec::new()), // help, version, or an error of the parser
        Some(subcommand) => {
            let options = config_file::expand(subcommand, &arguments[2..])?;
            let (options, saved) = match subcommand.get_name() {
                "train" => {
                    rank = job::rank_environment()?;
                    train::with_saved_options(&options, rank.as_ref())?
                }
                "memory" => train::with_saved_options(&options, None)?,
                _ => (options, Vec::new()),
            };
            (arguments[..2].iter().cloned().chain(options).collect(), saved)
        }
    };
    match Cli::parse_from(arguments).command {
        Command::Train(args) => train::train(&args, saved, rank),
        Command::Generate(args) => generate::generate(&args),
        Command::Eval(args) => eval::eval(&args),
        Command::Export(args) => export::export(&args),
        Command::Memory(args) => memory::memory(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Schedule(args) => schedule::schedule(&args),
        Command::Doctor(args) => doctor::doctor(&args),
    }
}
