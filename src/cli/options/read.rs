//! Reads options from words that clap has parsed, and from maps: TOML files and checkpoints.

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use ferrotron::Result;
use serde_json::{Map, Value};

use crate::cli::options::{Options, Source, absent, spellings};

impl Options {
    /// The options in the words that clap has parsed into `matches`; defaults do not count.
    ///
    /// # Errors
    /// A value that is not UTF-8, which no checkpoint could remember.
    pub fn from_matches(
        definition: &Command,
        matches: &ArgMatches,
        source: &Source,
    ) -> Result<Options> {
        let mut options = Options::default();
        for arg in definition.get_arguments() {
            let (Some(name), id) = (arg.get_long(), arg.get_id().as_str()) else { continue };
            if matches.value_source(id) != Some(ValueSource::CommandLine) {
                continue;
            }
            let text = |word: &std::ffi::OsStr| match word.to_str() {
                Some(text) => Ok(text.to_string()),
                None => Err(source.refuse(format!("--{name}: {word:?} is not UTF-8"))),
            };
            let words = matches.get_raw(id).into_iter().flatten().map(text);
            let mut words = words.collect::<Result<Vec<String>>>()?;
            let value = match words.pop() {
                Some(word) if is_flag(arg) => Value::Bool(word == "true"),
                Some(word) if words.is_empty() && !takes_several(arg) => Value::String(word),
                last => words.into_iter().chain(last).collect(),
            };
            options.insert(name, value, source);
        }
        spellings::replace(&mut options, definition, source)?;
        Ok(options)
    }

    /// The options of a map, whose keys may have `_` for `-`.
    ///
    /// # Errors
    /// A key that is no option; a value that no option can have, or not this one.
    pub fn from_map(
        definition: &Command,
        map: Map<String, Value>,
        source: &Source,
    ) -> Result<Options> {
        let is_scalar = |value: &Value| value.is_string() || value.is_number();
        let mut options = Options::default();
        for (key, value) in map {
            let name = key.replace('_', "-");
            let named = |arg: &&Arg| {
                let names =
                    arg.get_long().into_iter().chain(arg.get_all_aliases().into_iter().flatten());
                names.into_iter().any(|known| known == name)
            };
            let found = definition.get_arguments().find(named);
            let Some((arg, name)) = found.and_then(|arg| Some((arg, arg.get_long()?))) else {
                let none = || format!("there is no option --{name}");
                return Err(source.refuse(absent::remedy(&name).unwrap_or_else(none)));
            };
            let why = match &value {
                Value::Object(_) => Some("is a table; keys are the options' names"),
                Value::Bool(_) if is_flag(arg) => None,
                Value::Bool(_) => Some("needs a value, not true or false"),
                _ if is_flag(arg) => Some("must be true or false"),
                Value::Array(values) if values.iter().all(is_scalar) => None,
                value if is_scalar(value) => None,
                _ => Some("holds a value that is no option"),
            };
            if let Some(why) = why {
                return Err(source.refuse(format!("'{key}' {why}")));
            }
            if options.contains(name) {
                return Err(source.refuse(format!("'{key}' states --{name} once more")));
            }
            let value = match value {
                Value::Array(_) => value,
                one if takes_several(arg) => Value::Array(vec![one]),
                one => one,
            };
            options.insert(name, value, source);
        }
        spellings::replace(&mut options, definition, source)?;
        Ok(options)
    }
}

/// Whether an option is a flag, which `--flag=false` switches off.
fn is_flag(arg: &Arg) -> bool {
    arg.get_num_args().is_some_and(|count| count.min_values() == 0)
}

fn takes_several(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append)
}
