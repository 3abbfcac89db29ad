//! The command line: one file per subcommand, one per group of options.

mod architecture;
mod args;
mod bert_input;
mod bytes;
mod closing_report;
mod commands;
mod configuration;
mod corpus;
mod definition;
mod exit_signals;
mod folder_options;
mod gpt_input;
mod job;
mod loaded;
mod log_writer;
mod memory_limits;
#[cfg(test)]
mod option_tables;
mod options;
mod output;
mod plan;
mod progress;
mod rank_environment;
mod report;
mod resume;
mod run_config;
mod run_folder;
mod run_samples;
mod run_tokenizer;
mod sample;
mod stored_model;
mod tasks;
mod terminal;
mod usage;
mod validation_sets;

pub use log_writer::finish;
pub use output::failed;

use clap::error::ErrorKind as ParseErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use ferrotron::Result;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use definition::Definition;
use options::{Options, Source};

/// Pre-train GPT-class models, from one laptop core up.
#[derive(Debug, Parser)]
#[command(
    name = "ferrotron",
    version,
    args_override_self = true,
    disable_help_subcommand = true,
    after_help = "Start with `ferrotron train`, which needs no options. `ferrotron COMMAND -h` lists those of a command."
)]
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
    Train(Box<args::train::TrainArgs>),
    /// Continue a text with a trained model
    #[command(allow_negative_numbers = true)]
    Generate(commands::generate::GenerateArgs),
    /// Measure a trained model's loss on data, or its results in tasks
    #[command(allow_negative_numbers = true)]
    Eval(commands::eval::EvalArgs),
    /// Answer OpenAI's completion requests with a trained model
    #[cfg(feature = "serve")]
    Serve(commands::serve::ServeArgs),
    /// Write a trained model in another format
    Export(commands::export::ExportArgs),
    /// Make token files of JSON lines, Parquet and text
    Tokenize(commands::tokenize::TokenizeArgs),
    /// List, verify, compare and delete checkpoints
    #[command(allow_negative_numbers = true)]
    Checkpoint(commands::checkpoint::CheckpointArgs),
    /// Tell what a run takes of memory before it starts
    #[command(allow_negative_numbers = true)]
    Memory(Box<commands::memory::MemoryArgs>),
    /// Predict how long a training step takes on a cluster, before it is rented
    #[command(allow_negative_numbers = true)]
    Simulate(Box<commands::simulate::SimulateArgs>),
    /// Search the fastest layout of a training on a cluster
    #[command(allow_negative_numbers = true)]
    Plan(Box<commands::plan::PlanArgs>),
    /// Time training steps
    Bench(Box<commands::bench::BenchArgs>),
    /// Draw and time the schedule of a pipeline
    #[command(allow_negative_numbers = true)]
    Schedule(commands::schedule::ScheduleArgs),
    /// Draw runs in one page: curves, results, options, schedules
    Report(commands::report::ReportArgs),
    /// Say what this machine offers: instruction sets, GPUs, libraries, and what is missing
    Doctor(commands::doctor::DoctorArgs),
    /// Print a script with which a shell completes commands and options
    Completions(commands::completions::CompletionsArgs),
}

/// Runs the program; the exit code is that of a run that was asked to stop, or 0.
pub fn run(arguments: Vec<OsString>) -> Result<ExitCode> {
    args::run::program_start();
    exit_signals::outlive_file_size_limit();
    let definition = Definition::new(Cli::command());
    let refuse = |error| usage::refuse(&error, &definition.command_in(&arguments));
    // What is missing or in conflict may be decided by a file or a checkpoint.
    let typed = definition.lenient().try_get_matches_from(&arguments).map_err(|error| {
        if error.kind() == ParseErrorKind::DisplayHelp {
            definition.whole().get_matches_from(&arguments);
        }
        refuse(error)
    })?;
    let Some((name, typed)) = typed.subcommand() else { unreachable!("clap asks for one") };
    let subcommand = definition.subcommand(name);
    let mut options = Options::from_matches(&subcommand, typed, &Source::Typed)?;
    if let Some(path) = typed.get_one::<PathBuf>("config") {
        options = options.over(options::config_file::read(&subcommand, path)?);
    }
    // No file can state an option without a name.
    let matches =
        match subcommand.has_subcommands() || subcommand.get_positionals().next().is_some() {
            true => {
                let matches = definition.whole().try_get_matches_from(&arguments);
                matches.map_err(refuse)?
            }
            false => definition.parse(name, &options)?,
        };
    let command = Cli::from_arg_matches(&matches).map_err(refuse)?.command;
    let ended = match command {
        Command::Train(args) => return commands::train::train(&args, options, &definition),
        Command::Memory(args) => return commands::memory::memory(&args, options, &definition),
        Command::Simulate(args) => {
            return commands::simulate::simulate(&args, options, &definition);
        }
        Command::Generate(args) => commands::generate::generate(&args),
        Command::Eval(args) => commands::eval::eval(&args, &definition),
        #[cfg(feature = "serve")]
        Command::Serve(args) => commands::serve::serve(&args),
        Command::Export(args) => commands::export::export(&args),
        Command::Tokenize(args) => commands::tokenize::tokenize(&args),
        Command::Checkpoint(args) => commands::checkpoint::checkpoint(&args),
        Command::Plan(args) => commands::plan::plan(&args, &options),
        Command::Bench(args) => commands::bench::bench(&args),
        Command::Schedule(args) => commands::schedule::schedule(&args),
        Command::Report(args) => commands::report::report(&args, &definition),
        Command::Doctor(args) => commands::doctor::doctor(&args),
        Command::Completions(args) => commands::completions::completions(&args, definition.whole()),
    };
    ended.map_err(|error| options.name_sources(error))
}
