//! `--config FILE.toml`: the same keys as the command line, which overrides them.
//!
//! The file's keys are put in front of the options that were typed, so there is one parser, one set of
//! names and one kind of error.

use clap::Command;
use ferrotron::{Error, Result};
use std::ffi::OsString;
use std::path::Path;
use toml::Value;

use super::options::{overridden, values, without};

/// The options of a subcommand with `--config FILE` replaced by what the file says.
pub fn expand(command: &Command, options: &[OsString]) -> Result<Vec<OsString>> {
    let Some(paths) = values(options, "--config") else { return Ok(options.to_vec()) };
    let [path] = &paths[..] else {
        return Err(Error::config("--config", "needs the path of one TOML file"));
    };
    let known =
        |flag: &str| command.get_arguments().any(|argument| argument.get_long() == Some(flag));
    Ok(overridden(&read(Path::new(path), known)?, &without(options, &["--config"])))
}

fn read(path: &Path, known: impl Fn(&str) -> bool) -> Result<Vec<OsString>> {
    let refuse = |why: String| Error::config("--config", format!("{}: {why}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| refuse(error.to_string()))?;
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
        let first = error.message().lines().next().unwrap_or_default().to_string();
        refuse(format!("not TOML: {first}"))
    })?;
    let mut options = Vec::new();
    for (key, value) in table {
        let name = key.replace('_', "-");
        if !known(&name) {
            return Err(refuse(format!("there is no option --{name}")));
        }
        match value {
            Value::Boolean(true) => options.push(format!("--{name}")),
            Value::Boolean(false) => {}
            Value::Array(values) => {
                options.push(format!("--{name}"));
                for value in values {
                    let text = scalar(&value);
                    options.push(text.ok_or_else(|| {
                        refuse(format!("'{key}' holds a value that is no option"))
                    })?);
                }
            }
            value => {
                let text = scalar(&value);
                let text = text.ok_or_else(|| {
                    refuse(format!("'{key}' is a table; keys are the options' names"))
                })?;
                options.push(format!("--{name}={text}"));
            }
        }
    }
    Ok(options.into_iter().map(OsString::from).collect())
}

fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Integer(number) => Some(number.to_string()),
        Value::Float(number) => Some(number.to_string()),
        _ => None,
    }
}
