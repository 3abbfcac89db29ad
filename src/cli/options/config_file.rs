//! `--config FILE.toml`: options by their names.

use clap::Command;
use ferrotron::Result;
use std::path::Path;

use crate::cli::options::{Options, Source};

/// The options of a subcommand that stand in a TOML file.
pub fn read(definition: &Command, path: &Path) -> Result<Options> {
    let source = Source::File(path.display().to_string());
    let text = std::fs::read_to_string(path).map_err(|error| source.refuse(error))?;
    let map = toml::from_str(&text).map_err(|error: toml::de::Error| {
        let first = error.message().lines().next().unwrap_or_default();
        source.refuse(format!("not TOML: {first}"))
    })?;
    Options::from_map(definition, map, &source)
}
