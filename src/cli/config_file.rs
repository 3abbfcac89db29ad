//! `--config FILE.toml`: the same keys as the command line, which overrides them.
//!
//! The file's keys are put in front of the options that were typed, so there is one parser, one set of
//! names and one kind of error.

use ferrotron::{Error, Result};
use std::ffi::OsString;
use std::path::Path;
use toml::Value;

/// Replaces `--config FILE` by what the file says, directly behind the subcommand.
pub fn expand(arguments: Vec<OsString>) -> Result<Vec<OsString>> {
    let Some(at) = arguments.iter().position(|argument| {
        argument.to_str().is_some_and(|text| text == "--config" || text.starts_with("--config="))
    }) else {
        return Ok(arguments);
    };
    let inline =
        arguments[at].to_str().and_then(|text| text.strip_prefix("--config=")).map(OsString::from);
    let width = if inline.is_some() { 1 } else { 2 };
    let Some(path) = inline.or_else(|| arguments.get(at + 1).cloned()) else {
        return Err(Error::config("--config", "needs the path of a TOML file"));
    };
    let mut expanded: Vec<OsString> = arguments.iter().take(2).cloned().collect();
    expanded.extend(read(Path::new(&path))?.into_iter().map(OsString::from));
    let rest = arguments.iter().enumerate().skip(2);
    expanded.extend(
        rest.filter(|(i, _)| *i < at || *i >= at + width).map(|(_, argument)| argument.clone()),
    );
    Ok(expanded)
}

fn read(path: &Path) -> Result<Vec<String>> {
    let refuse = |why: String| Error::config("--config", format!("{}: {why}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| refuse(error.to_string()))?;
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
        let first = error.message().lines().next().unwrap_or_default().to_string();
        refuse(format!("not TOML: {first}"))
    })?;
    let mut arguments = Vec::new();
    for (key, value) in table {
        let flag = format!("--{}", key.replace('_', "-"));
        match value {
            Value::Boolean(true) => arguments.push(flag),
            Value::Boolean(false) => {}
            Value::Array(values) => {
                arguments.push(flag);
                for value in values {
                    arguments.push(scalar(&value).ok_or_else(|| {
                        refuse(format!("'{key}' holds a value that is no option"))
                    })?);
                }
            }
            value => {
                let text = scalar(&value).ok_or_else(|| {
                    refuse(format!("'{key}' is a table; keys are the options' names"))
                })?;
                arguments.extend([flag, text]);
            }
        }
    }
    Ok(arguments)
}

fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Integer(number) => Some(number.to_string()),
        Value::Float(number) => Some(number.to_string()),
        _ => None,
    }
}
