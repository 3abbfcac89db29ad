//! Rotary positions in `config.json`: the base, the rotated share of a head and the scaling of frequencies.
//!
//! Version 5 of `transformers` has one object `rope_parameters`; version 4 has the base under a name of its own, and the
//! scaling in `rope_scaling`. Both are read, and both are written: version 4 passes over the first in silence.

use ferrotron_nn::RopeScaling;
use serde_json::{Map, Value, json};

use crate::io::hugging_face::json::{number, size};
use crate::model::config::GptConfig;

/// Rotary positions.
pub(super) struct Rope {
    pub base: f64,
    /// Share of a head that is rotated.
    pub percent: f64,
    pub scaling: Option<RopeScaling>,
}

/// The rotary positions of `config`, where version 4 calls the base and the share as given.
pub(super) fn read_rope(
    config: &Value,
    base: &str,
    share: &str,
    default_share: f64,
) -> Result<Rope, String> {
    let object = |name: &str| Some(&config[name]).filter(|value| value.is_object());
    let fields = object("rope_parameters").or_else(|| object("rope_scaling"));
    let fields = fields.unwrap_or(&Value::Null);
    let either = |ours: &str, name: &str, default: f64| {
        let default = number(config, name, default)?;
        number(fields, ours, default)
    };
    let kind = fields["rope_type"].as_str().or(fields["type"].as_str()).unwrap_or("default");
    let scaling = match kind {
        "default" => None,
        "llama3" => Some(RopeScaling {
            factor: required(fields, "factor")?,
            low_freq_factor: required(fields, "low_freq_factor")?,
            high_freq_factor: required(fields, "high_freq_factor")?,
            original_max_position_embeddings: size(fields, "original_max_position_embeddings")?,
        }),
        other => {
            return Err(format!("has rope_type '{other}': supported are default and llama3"));
        }
    };
    Ok(Rope {
        base: either("rope_theta", base, 10_000.0)?,
        percent: either("partial_rotary_factor", share, default_share)?,
        scaling,
    })
}

fn required(fields: &Value, name: &str) -> Result<f64, String> {
    fields[name].as_f64().ok_or_else(|| format!("has a scaling of rotary positions without {name}"))
}

/// Adds the rotary positions of `config`; version 4 calls the base as given.
pub(super) fn write_rope(config: &GptConfig, base: &str, fields: &mut Map<String, Value>) {
    let mut parameters = json!({ "rope_type": "default", "rope_theta": config.rotary_base });
    if config.rotary_percent < 1.0 {
        parameters["partial_rotary_factor"] = config.rotary_percent.into();
    }
    fields.insert(base.to_string(), config.rotary_base.into());
    fields.insert("rope_scaling".into(), Value::Null);
    if let Some(scaling) = &config.rope_scaling {
        let scaling = json!({
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        });
        if let (Value::Object(all), Value::Object(scaling)) = (&mut parameters, &scaling) {
            all.extend(scaling.clone());
        }
        fields.insert("rope_scaling".into(), scaling);
    }
    fields.insert("rope_parameters".into(), parameters);
}
