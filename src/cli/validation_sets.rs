//! Validation sets that are evaluated each by itself: their names, and what keeps one from being evaluated.

use ferrotron::models::data::{Blend, BlendConfig, DataConfig, distinct_names};
use ferrotron::{Error, Result};
use std::path::{Path, PathBuf};

/// The option that asks for a loss of each set.
pub const SEVERAL: &str = "--multiple-validation-sets";

/// The blends for validation by the losses that a run reports: one for all sets without a name or, if `several`, each set
/// by itself with its name. Tells `warn` of the sets that go without.
///
/// # Errors
/// With `several`: no validation sets; a set of which `--split` holds nothing out.
pub fn blends_of_losses(
    config: &BlendConfig,
    validation: Option<Blend>,
    several: bool,
    warn: impl Fn(&str),
) -> Result<Vec<(Option<String>, Blend)>> {
    match (validation, several) {
        (None, false) => Ok(Vec::new()),
        (None, true) => Err(none_held_out()),
        (Some(blend), false) => {
            warn_of_missing(config, &blend, "validation", warn);
            Ok(vec![(None, blend)])
        }
        (Some(blend), true) => {
            check_all_held_out(config, &blend)?;
            Ok(blend.named_sets()?.into_iter().map(|(name, set)| (Some(name), set)).collect())
        }
    }
}

/// The error of a run without validation sets.
fn none_held_out() -> Error {
    let message = "needs sets for validation: name them by --valid-data-path, or by --valid-data beside --data, or hold \
                   parts of --data-path out by --split";
    Error::config(SEVERAL, message)
}

/// Tells `warn` of the sets of which `--split` holds nothing out for a part that other sets have.
pub fn warn_of_missing(config: &BlendConfig, blend: &Blend, part: &str, warn: impl Fn(&str)) {
    let missing = not_held_out(config, blend);
    if !missing.is_empty() {
        let names = quoted(&missing);
        warn(&format!(
            "warning: --split holds nothing of {names} out for {part}, which goes without"
        ));
    }
}

/// The names of sets of `config` of which `--split` holds nothing out, as `blend` has none of them.
fn not_held_out(config: &BlendConfig, blend: &Blend) -> Vec<String> {
    let BlendConfig::Shared(paths, _) = config else { return Vec::new() };
    let held_out: Vec<&str> = blend.set_names().collect();
    let names = paths.prefixes.iter().map(|path| path.display().to_string());
    names.filter(|name| !held_out.contains(&name.as_str())).collect()
}

/// Names in quotation marks, separated by commas.
pub fn quoted(names: &[String]) -> String {
    names.iter().map(|name| format!("'{name}'")).collect::<Vec<_>>().join(", ")
}

/// Errors for sets of which `--split` holds nothing out for validation, as `blend` has none of them.
fn check_all_held_out(config: &BlendConfig, blend: &Blend) -> Result<()> {
    let missing = not_held_out(config, blend);
    if missing.is_empty() {
        return Ok(());
    }
    let message = format!(
        "--split holds nothing of {} out for validation: give a larger share, or join it with another set",
        quoted(&missing)
    );
    Err(Error::config(SEVERAL, message))
}

/// Errors for sets for validation alone that have weights, with which they are one blend.
pub fn check_without_weights(config: &BlendConfig) -> Result<()> {
    match config {
        BlendConfig::PerSplit { validation: Some(paths), .. } if paths.weights.is_some() => {
            let message =
                format!("sets with weights are one: leave the weights of {} out", paths.option);
            Err(Error::config(SEVERAL, message))
        }
        _ => Ok(()),
    }
}

/// The name of each path of `--valid-data`.
pub fn names_of_files(config: &DataConfig) -> Result<Vec<String>> {
    let paths: Vec<&Path> = config.validation_data.iter().map(PathBuf::as_path).collect();
    if paths.is_empty() {
        return Err(none_held_out());
    }
    distinct_names("--valid-data", &paths)
}
