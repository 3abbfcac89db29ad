//! The values of `config.json`, read and written one by one.

use ferrotron_tensor::{DType, Error, Result};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

use crate::model::config::ActivationKind;

/// Their names of our nonlinearities; the first of each is written.
pub(super) const ACTIVATIONS: [(&str, ActivationKind); 5] = [
    ("gelu_new", ActivationKind::GeluTanh),
    ("gelu_pytorch_tanh", ActivationKind::GeluTanh),
    ("gelu_fast", ActivationKind::GeluTanh),
    ("gelu", ActivationKind::GeluErf),
    ("relu", ActivationKind::Relu),
];

/// The path and contents of `config.json` in `folder`.
pub(super) fn read_json(folder: &Path) -> Result<(PathBuf, Value)> {
    let path = folder.join("config.json");
    let refuse = |what: String| Error::io("hugging_face", format!("'{}' {what}", path.display()));
    let text = std::fs::read(&path).map_err(|error| refuse(format!("cannot be read: {error}")))?;
    let config: Value =
        serde_json::from_slice(&text).map_err(|error| refuse(format!("is damaged: {error}")))?;
    if config.get("model").is_some() && config.get("model_type").is_none() {
        return Err(refuse("belongs to a Ferrotron checkpoint: open its folder".into()));
    }
    Ok((path, config))
}

/// A whole number of `config.json`.
pub(super) fn size(config: &Value, name: &str) -> std::result::Result<usize, String> {
    let value = config[name].as_u64().and_then(|size| usize::try_from(size).ok());
    value.ok_or_else(|| format!("has {name} {}: it must be a whole number", config[name]))
}

/// A number of `config.json`, or `default` if it is not there.
pub(super) fn number(config: &Value, name: &str, default: f64) -> std::result::Result<f64, String> {
    match &config[name] {
        Value::Null => Ok(default),
        value => value.as_f64().ok_or_else(|| format!("has {name} {value}: it must be a number")),
    }
}

/// Errors if a switch of `config.json` is there and is not `supported`.
pub(super) fn only(config: &Value, name: &str, supported: bool) -> std::result::Result<(), String> {
    match config[name].as_bool().unwrap_or(supported) == supported {
        true => Ok(()),
        false => Err(format!("has {name} {}: only {supported} is supported", config[name])),
    }
}

/// The nonlinearity that `config.json` names, or else `default`.
pub(super) fn activation(
    config: &Value,
    name: &str,
    default: &str,
) -> std::result::Result<ActivationKind, String> {
    let given = config[name].as_str().unwrap_or(default);
    let found = ACTIVATIONS.iter().find(|(name, _)| *name == given);
    found.map(|(_, activation)| *activation).ok_or_else(|| {
        let known = ACTIVATIONS.map(|(name, _)| name).join(", ");
        format!("has {name} '{given}': supported are {known}")
    })
}

/// Their name of a nonlinearity; of one that is not in [`ACTIVATIONS`], the first name.
pub(super) fn activation_name(activation: ActivationKind) -> &'static str {
    let found = ACTIVATIONS.iter().find(|(_, ours)| *ours == activation);
    found.unwrap_or(&ACTIVATIONS[0]).0
}

/// The fields of a JSON object; of anything else none.
pub(super) fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

/// The name of a dtype in `config.json`.
pub(super) fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "float64",
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        _ => "float32",
    }
}
