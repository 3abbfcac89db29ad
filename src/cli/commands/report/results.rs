//! The results that `ferrotron eval --json` has printed into a file.

use ferrotron::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// The results of a file of `--eval`, by name.
pub struct Results {
    pub name: String,
    pub values: Vec<(String, Value)>,
}

impl Results {
    /// Reads a JSON object, whose inner ones become names with dots.
    pub fn read(path: &Path) -> Result<Results> {
        let name = path.display();
        let text = std::fs::read_to_string(path)
            .map_err(|error| Error::io("report", format!("cannot read {name}: {error}")))?;
        let object =
            serde_json::from_str(&text).ok().filter(Value::is_object).ok_or_else(|| {
                let message =
                    format!("{name} is no JSON object: write what eval --json prints into it");
                Error::config("--eval", message)
            })?;
        let mut values = Vec::new();
        flatten("", object, &mut values);
        Ok(Results { name: name.to_string(), values })
    }
}

fn flatten(prefix: &str, value: Value, values: &mut Vec<(String, Value)>) {
    match value {
        Value::Object(map) => map.into_iter().for_each(|(key, value)| {
            let name = if prefix.is_empty() { key } else { format!("{prefix}.{key}") };
            flatten(&name, value, values);
        }),
        value => values.push((prefix.to_string(), value)),
    }
}
