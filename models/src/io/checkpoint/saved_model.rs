//! The model of a checkpoint: the name of its architecture, and its configuration as JSON.

use ferrotron_tensor::{Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A checkpoint's record of its model.
///
/// ```
/// use ferrotron_models::checkpoint::SavedModel;
/// use serde::{Deserialize, Serialize};
/// #[derive(Debug, PartialEq, Serialize, Deserialize)]
/// struct Mlp {
///     width: usize,
/// }
/// let saved = SavedModel::new("mlp", &Mlp { width: 8 })?;
/// assert_eq!(saved.config_as::<Mlp>("mlp")?, Mlp { width: 8 });
/// let error = saved.config_as::<Mlp>("gpt").unwrap_err().to_string();
/// assert_eq!(error, "checkpoint: it holds a model of architecture 'mlp', not 'gpt'");
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SavedModel {
    /// Name of the architecture.
    #[serde(default = "gpt")]
    pub architecture: String,
    /// The configuration.
    #[serde(rename = "model")]
    pub config: Value,
}

/// The architecture of checkpoints that do not name one: the first version of the format had no other.
fn gpt() -> String {
    "gpt".into()
}

impl SavedModel {
    /// Describes a model by its architecture and configuration.
    ///
    /// # Errors
    /// A configuration that JSON cannot hold.
    pub fn new(architecture: &str, config: &impl Serialize) -> Result<SavedModel> {
        let config = serde_json::to_value(config).map_err(|error| {
            let message = format!("the configuration of '{architecture}' has no JSON: {error}");
            Error::value("checkpoint", message)
        })?;
        Ok(SavedModel { architecture: architecture.into(), config })
    }

    /// The configuration, if the model is of `architecture`.
    ///
    /// # Errors
    /// Another architecture; fields that `C` does not have, or has otherwise.
    pub fn config_as<C: DeserializeOwned>(&self, architecture: &str) -> Result<C> {
        self.check_architecture(architecture)?;
        serde_json::from_value(self.config.clone()).map_err(|error| {
            let message = format!("its configuration of '{architecture}' cannot be read: {error}");
            Error::io("checkpoint", message)
        })
    }

    /// Errors, naming both values of each field that differs, unless a model of `config` has the same weights. Fields
    /// in `ignored` may differ; those that an earlier version did not have are compared by their defaults.
    pub fn check<C: Serialize + DeserializeOwned>(
        &self,
        architecture: &str,
        config: &C,
        ignored: &[&str],
    ) -> Result<()> {
        self.check_architecture(architecture)?;
        let wanted = SavedModel::new(architecture, config)?.config;
        let own = match self.config_as::<C>(architecture) {
            Ok(own) => SavedModel::new(architecture, &own)?.config,
            Err(_) => self.config.clone(), // a configuration of other fields, which differ
        };
        let missing = Value::Null;
        let differs = |name: &str, value: &Value| {
            let saved = own.get(name).unwrap_or(&missing);
            (saved != value && !ignored.contains(&name))
                .then(|| format!("{name} {saved} there, {value} here"))
        };
        let differences: Vec<String> = match wanted.as_object() {
            Some(fields) => {
                fields.iter().filter_map(|(name, value)| differs(name, value)).collect()
            }
            None if wanted == own => Vec::new(),
            None => vec![format!("{own} there, {wanted} here")],
        };
        match differences.is_empty() {
            true => Ok(()),
            false => Err(Error::config("checkpoint", differences.join("; "))),
        }
    }

    fn check_architecture(&self, wanted: &str) -> Result<()> {
        if self.architecture == wanted {
            return Ok(());
        }
        let found = &self.architecture;
        let message = format!("it holds a model of architecture '{found}', not '{wanted}'");
        Err(Error::config("checkpoint", message))
    }
}
