//! The command line: one file per subcommand, one per group of options.

mod args;
mod bytes;
mod commands;
mod configuration;
mod corpus;
mod job;
mod memory_limits;
#[cfg(test)]
mod option_tables;
mod options;
mod output;
mod progress;
mod report;
mod resume;
mod run_folder;
mod terminal;

use clap::builder::Resettable;
use clap::error::ErrorKind as ParseErrorKind;
use clap::{
    ArgAction, ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand, value_parser,
};
use ferrotron::parallel::launch::COMMUNICATION_FAILED;
use ferrotron::{Error, ErrorKind, Result};
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

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
    /// Measure a trained model's loss on data
    #[command(allow_negative_numbers = true)]
    Eval(commands::eval::EvalArgs),
    /// Write a trained model in another format
    Export(commands::export::ExportArgs),
    /// Tell what a run takes of memory before it starts
    #[command(allow_negative_numbers = true)]
    Memory(Box<commands::memory::MemoryArgs>),
    /// Time training steps
    Bench(commands::bench::BenchArgs),
    /// Draw and time the schedule of a pipeline
    #[command(allow_negative_numbers = true)]
    Schedule(commands::schedule::ScheduleArgs),
    /// Say what this machine offers: instruction sets, GPUs, libraries, and what is missing
    Doctor(commands::doctor::DoctorArgs),
    /// Print a script with which a shell completes commands and options
    Completions(commands::completions::CompletionsArgs),
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
    // What is missing or in conflict may be decided by a file or a checkpoint.
    let typed = lenient().try_get_matches_from(&arguments).unwrap_or_else(|error| {
        if error.kind() == ParseErrorKind::DisplayHelp {
            whole_definition().get_matches_from(&arguments);
        }
        error.exit()
    });
    let Some((name, typed)) = typed.subcommand() else { unreachable!("clap asks for one") };
    let subcommand = definition(name);
    let mut options = Options::from_matches(&subcommand, typed, &Source::Typed)?;
    if let Some(path) = typed.get_one::<PathBuf>("config") {
        options = options.over(options::config_file::read(&subcommand, path)?);
    }
    // No file can state an option without a name.
    let matches = match subcommand.get_positionals().next() {
        Some(_) => whole_definition().get_matches_from(&arguments),
        None => parse(name, &options)?,
    };
    let command = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit()).command;
    let ended = match command {
        Command::Train(args) => return commands::train::train(&args, options),
        Command::Memory(args) => return commands::memory::memory(&args, options),
        Command::Generate(args) => commands::generate::generate(&args),
        Command::Eval(args) => commands::eval::eval(&args),
        Command::Export(args) => commands::export::export(&args),
        Command::Bench(args) => commands::bench::bench(&args),
        Command::Schedule(args) => commands::schedule::schedule(&args),
        Command::Doctor(args) => commands::doctor::doctor(&args),
        Command::Completions(args) => commands::completions::completions(&args, whole_definition()),
    };
    ended.map_err(|error| options.name_sources(error))
}

/// The command line, whose flags take `--flag` and `--flag=false`.
fn whole_definition() -> clap::Command {
    Cli::command().mut_subcommands(|subcommand| {
        subcommand.mut_args(|arg| match arg.get_action() {
            ArgAction::SetTrue => arg
                .action(ArgAction::Set)
                .num_args(0..=1)
                .require_equals(true)
                .value_name("BOOL")
                .value_parser(value_parser!(bool))
                .default_missing_value("true")
                .default_value("false")
                .hide_default_value(true)
                .hide_possible_values(true),
            _ => arg,
        })
    })
}

/// The same without what options do to one another.
fn lenient() -> clap::Command {
    whole_definition().mut_subcommands(|subcommand| {
        subcommand.mut_args(|arg| {
            arg.required(false)
                .requires(Resettable::Reset)
                .conflicts_with(Resettable::Reset)
                .overrides_with(Resettable::Reset)
        })
    })
}

/// The definition of a subcommand.
pub fn definition(name: &str) -> clap::Command {
    let found = whole_definition().find_subcommand(name).cloned();
    found.expect("the name of a subcommand")
}

/// What the words of a subcommand say, each for itself; or why it is none, in one line.
pub fn words_of(
    name: &str,
    words: impl Iterator<Item = OsString>,
) -> std::result::Result<ArgMatches, String> {
    let words = ["ferrotron", name].map(OsString::from).into_iter().chain(words);
    let matches = lenient().try_get_matches_from(words).map_err(|error| one_line(&error))?;
    let found = matches.subcommand().map(|(_, matches)| matches.clone());
    Ok(found.unwrap_or_default())
}

/// Parses the merged options of a subcommand.
///
/// # Errors
/// An option with a value that it cannot have or without one that it needs, unless all were typed: clap then explains
/// itself and ends the program.
pub fn parse(name: &str, options: &Options) -> Result<ArgMatches> {
    let words = ["ferrotron", name].map(OsString::from).into_iter().chain(options.words());
    whole_definition().try_get_matches_from(words).map_err(|error| {
        let plain = Error::config("", one_line(&error));
        let line = plain.to_string();
        let named = options.name_sources(plain);
        if named.to_string() == line { error.exit() } else { named }
    })
}

/// The first paragraph of what clap says.
fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines = text.lines().take_while(|line| !line.is_empty()).map(str::trim);
    let line = lines.collect::<Vec<_>>().join(" ");
    line.strip_prefix("error: ").unwrap_or(&line).to_string()
}
