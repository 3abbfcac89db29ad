//! `config.json`, both ways.

use ferrotron_tensor::{DType, Error, Result};
use serde_json::Value;
use std::path::Path;

use super::families::{Family, family};
use super::json::{dtype_name, read_json};
use super::model_kind::model_type_of;
use crate::model::config::GptConfig;

/// The configuration of the language model in `folder`. Dropout is a matter of training and stays 0.
///
/// # Errors
/// A folder without a readable `config.json`; a family or a variant of one that is not supported, by name.
pub fn read_config(folder: &Path) -> Result<GptConfig> {
    read_family(folder).map(|(_, config)| config)
}

/// The family of the model in `folder`, with its configuration.
pub(super) fn read_family(folder: &Path) -> Result<(&'static Family, GptConfig)> {
    let (path, config) = read_json(folder)?;
    let refuse = |what: String| Error::io("hugging_face", format!("'{}' {what}", path.display()));
    let family =
        family(model_type_of(&config)).map_err(|what| refuse(format!("describes {what}")))?;
    let config = (family.read)(&config).map_err(refuse)?;
    config.validate()?;
    Ok((family, config))
}

/// The contents of `config.json` for a model of `family`.
pub(super) fn write_config(family: &Family, config: &GptConfig, dtype: DType) -> Value {
    let mut fields = (family.write)(config);
    fields.insert("architectures".into(), vec![family.class].into());
    fields.insert("model_type".into(), family.model_type.into());
    fields.insert("dtype".into(), dtype_name(dtype).into());
    Value::Object(fields)
}
