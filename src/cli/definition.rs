//! The definition of the command line, by which options of any source are read.

use clap::builder::Resettable;
use clap::{Arg, ArgAction, ArgMatches, value_parser};
use ferrotron::Result;
use std::ffi::OsString;

use super::{options::Options, usage};

/// The command line with its subcommands, whose flags take `--flag` and `--flag=false`.
pub struct Definition(clap::Command);

impl Definition {
    /// The definition made of what `command` derives from types.
    pub fn new(command: clap::Command) -> Definition {
        Definition(with_values_of_flags(command))
    }

    /// The whole command line.
    pub fn whole(&self) -> clap::Command {
        self.0.clone()
    }

    /// The same without what options do to one another.
    pub fn lenient(&self) -> clap::Command {
        self.whole().mut_subcommands(|subcommand| {
            subcommand.mut_args(|arg| {
                arg.required(false)
                    .requires(Resettable::Reset)
                    .conflicts_with(Resettable::Reset)
                    .overrides_with(Resettable::Reset)
            })
        })
    }

    /// The definition of a subcommand, or of one below it, as `checkpoint ls`.
    pub fn subcommand(&self, name: &str) -> clap::Command {
        let below = |command: &clap::Command, name| command.find_subcommand(name).cloned();
        let found = name.split(' ').try_fold(self.whole(), |command, name| below(&command, name));
        found.expect("the name of a subcommand")
    }

    /// The command that the words of a call name, without their values: `ferrotron checkpoint ls`.
    pub fn command_in(&self, words: &[OsString]) -> String {
        let (mut command, mut names) = (&self.0, String::from("ferrotron"));
        for word in words.iter().skip(1) {
            if let Some(below) = command.find_subcommand(word) {
                names = format!("{names} {}", below.get_name());
                command = below;
            }
        }
        names
    }

    /// Parses the words of a subcommand, each on its own. Errors with one line if the words do not parse.
    pub fn words_of(
        &self,
        name: &str,
        words: impl Iterator<Item = OsString>,
    ) -> std::result::Result<ArgMatches, String> {
        let words = ["ferrotron", name].map(OsString::from).into_iter().chain(words);
        let refuse = |error| usage::explain(&error, &format!("ferrotron {name}"));
        let matches = self.lenient().try_get_matches_from(words).map_err(refuse)?;
        let found = matches.subcommand().map(|(_, matches)| matches.clone());
        Ok(found.unwrap_or_default())
    }

    /// Parses the merged options of a subcommand.
    ///
    /// # Errors
    /// An option with a value that it cannot have, or without one that it needs.
    pub fn parse(&self, name: &str, options: &Options) -> Result<ArgMatches> {
        let words = ["ferrotron", name].map(OsString::from).into_iter().chain(options.words());
        let matches = self.whole().try_get_matches_from(words);
        let refuse = |error| usage::refuse(&error, &format!("ferrotron {name}"));
        matches.map_err(|error| options.name_sources(refuse(error)))
    }
}

/// The help of an option in one line, and the default that stands at the end of it, if one does.
pub fn help_and_default(arg: &Arg) -> (String, Option<String>) {
    let help = arg.get_help().map_or(String::new(), |help| help.to_string());
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    match help.split_once(" [default: ") {
        Some((help, default)) => {
            (help.to_string(), Some(default.trim_end_matches(']').to_string()))
        }
        None => (help, None),
    }
}

/// Lets the flags of all subcommands take `=true` and `=false`.
fn with_values_of_flags(command: clap::Command) -> clap::Command {
    command.mut_subcommands(|subcommand| {
        let subcommand = subcommand.mut_args(|arg| match arg.get_action() {
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
        });
        with_values_of_flags(subcommand)
    })
}
