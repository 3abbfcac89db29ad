//! Options of a subcommand by name, and where each value comes from.
//!
//! An option may be typed, stand in the TOML file of `--config`, or come from the checkpoint or model of `--load`; the
//! first of these that states it decides. The merged options become words again, which clap parses like typed ones, so
//! that names, values, defaults and conflicts are checked in one place.

pub(super) mod absent;
pub(super) mod changed;
pub(super) mod config_file;
pub(super) mod imported;
pub(super) mod merged;
pub(super) mod other_optimizers;
mod read;
pub(super) mod remembered;
pub(super) mod spellings;

use ferrotron::{Error, ErrorKind};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;

/// Options that state the same thing: one of them replaces all of them that a lower source states. A flag that is
/// switched off states nothing about the others.
const SYNONYMS: &[&[&str]] = &[
    &["activation", "swiglu"],
    &["train-iters", "train-samples"],
    &["lr-decay-iters", "lr-decay-samples"],
    &["lr-warmup-iters", "lr-warmup-samples", "lr-warmup-fraction"],
    &["lr-wsd-decay-iters", "lr-wsd-decay-samples"],
    &["valid-fraction", "split"],
    &[
        "data",
        "data-path",
        "data-args-path",
        "train-data-path",
        "valid-data-path",
        "test-data-path",
        "per-split-data-args-path",
    ],
    &["dtype", "bf16", "fp16"],
];

/// The source of an option's value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    Typed,
    /// The file of `--config`, by its path.
    File(String),
    /// The checkpoint of `--load`, in words.
    Checkpoint(String),
    /// The Hugging Face folder of `--load`, in words.
    Folder(String),
}

/// Values by the options' long names, without dashes: a bool, a scalar, or an array of scalars.
#[derive(Debug, Clone, Default)]
pub struct Options(BTreeMap<String, (Value, Source)>);

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Typed => f.write_str("the command line"),
            Source::File(name) | Source::Checkpoint(name) | Source::Folder(name) => {
                f.write_str(name)
            }
        }
    }
}

impl Source {
    /// The error of a source that states something wrong.
    pub fn refuse(&self, why: impl fmt::Display) -> Error {
        let op = match self {
            Source::Typed => "",
            Source::File(_) => "--config",
            Source::Checkpoint(_) | Source::Folder(_) => "--load",
        };
        Error::config(op, format!("{self}: {why}"))
    }
}

impl Options {
    /// States an option.
    fn insert(&mut self, name: &str, value: Value, source: &Source) {
        self.0.insert(name.to_string(), (value, source.clone()));
    }

    /// Gives an option that a source states another value.
    fn set_value(&mut self, name: &str, value: Value) {
        if let Some((old, _)) = self.0.get_mut(name) {
            *old = value;
        }
    }

    /// Adds to these options those of a lower source that these do not decide.
    pub fn over(mut self, lower: Options) -> Options {
        let decided = |name: &str| {
            let same = SYNONYMS.iter().find(|names| names.contains(&name));
            self.contains(name) || same.is_some_and(|names| self.states_any(names))
        };
        let kept: Vec<_> = lower.0.into_iter().filter(|(name, _)| !decided(name)).collect();
        self.0.extend(kept);
        self
    }

    /// The value of an option, if a source states it.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).map(|(value, _)| value)
    }

    /// The words of an option's value; none if no source states it.
    pub fn values(&self, name: &str) -> Vec<String> {
        match self.get(name) {
            Some(Value::Array(values)) => values.iter().map(text).collect(),
            value => value.map(text).into_iter().collect(),
        }
    }

    pub fn contains(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Whether a source states one of these options, other than a flag that it switches off.
    pub fn states_any(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.get(name).is_some_and(|value| *value != Value::Bool(false)))
    }

    /// Whether someone has given this option for the run, other than a flag that is switched off: a checkpoint that remembers
    /// it does not count.
    pub fn is_given(&self, name: &str) -> bool {
        let is_given = |(value, source): &(Value, Source)| {
            *value != Value::Bool(false) && matches!(source, Source::Typed | Source::File(_))
        };
        self.0.get(name).is_some_and(is_given)
    }

    /// Forgets options; returns the names of those that there were.
    pub fn remove(&mut self, names: &[&str]) -> Vec<String> {
        let removed = names.iter().filter_map(|name| self.0.remove_entry(*name));
        removed.map(|(name, _)| name).collect()
    }

    /// Names and values, of all sources.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(name, (value, _))| (name.as_str(), value))
    }

    /// The values that a checkpoint has decided for the options `names`, as they would be typed.
    pub fn remembered_words(&self, names: &[&str]) -> Vec<String> {
        let remembered = names
            .iter()
            .filter(|name| matches!(self.0.get(**name), Some((_, Source::Checkpoint(_)))));
        remembered.map(|name| format!("--{name} {}", self.values(name).join(" "))).collect()
    }

    /// The options as words of a command line.
    pub fn words(&self) -> Vec<OsString> {
        let words = self.iter().flat_map(|(name, value)| match value {
            Value::Bool(true) => vec![format!("--{name}")],
            Value::Bool(false) => Vec::new(), // a flag's default
            Value::Array(_) if self.values(name).iter().any(|value| value.starts_with('-')) => {
                self.values(name).iter().map(|value| format!("--{name}={value}")).collect()
            }
            Value::Array(_) => [format!("--{name}")].into_iter().chain(self.values(name)).collect(),
            scalar => vec![format!("--{name}={}", text(scalar))],
        });
        words.map(OsString::from).collect()
    }

    /// Appends to an error the options that it is about and that were not typed, with their sources.
    pub fn name_sources(&self, error: Error) -> Error {
        if !matches!(error.kind(), ErrorKind::Config | ErrorKind::Io) {
            return error;
        }
        let message = error.to_string();
        let about = |name: &&String| {
            error.op().trim_start_matches('-') == **name
                || mentions(&message, &format!("--{name}"))
                || (name.contains('-') && mentions(&message, name))
        };
        let untyped = self.0.iter().filter(|(_, (_, source))| *source != Source::Typed);
        let mut sources: Vec<(&Source, Vec<String>)> = Vec::new();
        for (name, (_, source)) in untyped.filter(|(name, _)| about(name)) {
            match sources.iter_mut().find(|(known, _)| *known == source) {
                Some((_, names)) => names.push(format!("--{name}")),
                None => sources.push((source, vec![format!("--{name}")])),
            }
        }
        if sources.is_empty() {
            return error;
        }
        let parts = sources.into_iter().map(|(source, names)| {
            let verb = if names.len() == 1 { "is" } else { "are" };
            format!("{} {verb} from {source}", names.join(", "))
        });
        let parts = parts.collect::<Vec<_>>().join("; ");
        Error::new(error.kind(), "", format!("{message} ({parts})"))
    }
}

/// A scalar as it would be typed.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Whether `message` has `name` as a word.
fn mentions(message: &str, name: &str) -> bool {
    let inside = |c: char| c.is_alphanumeric() || c == '-' || c == '_';
    message.match_indices(name).any(|(at, _)| {
        let (before, after) = (&message[..at], &message[at + name.len()..]);
        !before.ends_with(inside) && !after.starts_with(inside)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, definition::Definition};
    use clap::CommandFactory;
    use serde_json::json;

    fn definition() -> clap::Command {
        Definition::new(Cli::command()).subcommand("train")
    }

    fn options(source: Source, value: Value) -> Options {
        let map = value.as_object().unwrap().clone();
        Options::from_map(&definition(), map, &source).unwrap()
    }

    fn typed(value: Value) -> Options {
        options(Source::Typed, value)
    }

    #[test]
    fn a_higher_source_replaces_lists_and_synonyms_whole() {
        let lower = json!({ "data": ["a.txt", "b.txt"], "lr": 1, "swiglu": true, "rampup_batch_size": [1, 2, 3] });
        let higher =
            typed(json!({ "data": ["c.txt"], "activation": "relu", "sequence-parallel": false }));
        let merged = higher.over(options(Source::File("run.toml".into()), lower));
        let words = "--activation=relu --data c.txt --lr=1 --rampup-batch-size 1 2 3";
        assert_eq!(merged.words(), words.split(' ').map(OsString::from).collect::<Vec<_>>());
    }

    #[test]
    fn a_flag_that_is_off_states_only_itself() {
        let lower = json!({ "dtype": "bf16", "activation": "relu", "seed": 7 });
        let higher = typed(json!({ "fp16": false, "swiglu": false }));
        let merged = higher.over(options(Source::File("run.toml".into()), lower));
        let words = ["--activation=relu", "--dtype=bf16", "--seed=7"];
        assert_eq!(merged.words(), words.map(OsString::from));
        let off = typed(json!({ "bf16": false })).over(typed(json!({ "bf16": true })));
        assert!(off.words().is_empty(), "{:?}", off.words());
    }

    /// Two precisions of one source exclude each other, and a flag that is off is none.
    #[test]
    fn one_precision_is_computed_in() {
        use crate::cli::args::device::DeviceArgs;
        use clap::FromArgMatches;
        for (line, want) in [
            ("--dtype bf16 --fp16=false", "bf16"),
            ("--fp16=false --dtype bf16", "bf16"),
            ("--dtype bf16 --bf16", "bf16"),
            ("--bf16 --fp16 --bf16=false", "f16"),
            ("--bf16 --fp16", "--bf16 and --fp16 exclude each other: give one of them"),
            ("--fp16 --bf16", "--bf16 and --fp16 exclude each other: give one of them"),
            ("--bf16 --dtype f64", "--dtype f64 and --bf16 exclude each other: give one of them"),
        ] {
            let words = line.split(' ').map(OsString::from);
            let matches = Definition::new(Cli::command()).words_of("train", words).unwrap();
            let definition = definition();
            let found = Options::from_matches(&definition, &matches, &Source::Typed).unwrap();
            let matches = Definition::new(Cli::command()).parse("train", &found).unwrap();
            let matches = matches.subcommand_matches("train").unwrap();
            let args = DeviceArgs::from_arg_matches(matches).unwrap();
            let dtype = args.dtype().map_or_else(|error| error.to_string(), |d| d.to_string());
            assert_eq!(dtype, want, "{line}");
        }
        let typed = typed(json!({ "bf16": true }));
        let saved = json!({ "dtype": "f64", "fp16": true });
        let merged = typed.over(options(Source::Checkpoint("the checkpoint 'k'".into()), saved));
        assert_eq!(merged.words(), [OsString::from("--bf16")]);
    }

    #[test]
    fn what_is_no_option_is_refused_by_name() {
        for (value, part) in [
            (json!({ "no_such_key": 1 }), "there is no option --no-such-key"),
            (json!({ "lr": true }), "'lr' needs a value"),
            (json!({ "swiglu": "yes" }), "'swiglu' must be true or false"),
            (json!({ "lr": { "max": 1 } }), "'lr' is a table"),
            (json!({ "data": [["a"]] }), "'data' holds a value that is no option"),
            (json!({ "lr": null }), "'lr' holds a value that is no option"),
        ] {
            let definition = definition();
            let map = value.as_object().unwrap().clone();
            let error = Options::from_map(&definition, map, &Source::File("run.toml".into()));
            let error = error.unwrap_err().to_string();
            assert!(error.starts_with("--config: run.toml: ") && error.contains(part), "{error}");
        }
    }

    #[test]
    fn an_error_names_the_sources_of_what_was_not_typed() {
        let file = options(Source::File("run.toml".into()), json!({ "min-lr": 2, "seed": 1 }));
        let saved = json!({ "lr": "1", "data": ["a"], "local-sgd-steps": 8 });
        let saved = options(Source::Checkpoint("the checkpoint 'k'".into()), saved);
        let options = typed(json!({ "seq-length": 0 })).over(file).over(saved);
        for (error, suffix) in [
            (
                Error::config("schedule", "--min-lr 2 is above --lr 1"),
                " (--lr is from the checkpoint 'k'; --min-lr is from run.toml)",
            ),
            (Error::config("--seq-length", "must be positive, got 0"), ""),
            (Error::io("data", "no file"), " (--data is from the checkpoint 'k')"),
            (
                Error::config("train", "not a multiple of local-sgd-steps 8"),
                " (--local-sgd-steps is from the checkpoint 'k')",
            ),
        ] {
            let want = format!("{error}{suffix}");
            assert_eq!(options.name_sources(error).to_string(), want);
        }
    }
}
