//! Options of parameters by name: dtype, learning rate, weight decay and update rule.

use ferrotron_tensor::{DType, Error, Result};
use std::fmt;
use std::sync::Arc;

use crate::OptimizerConfig;

/// Options of a parameter, in place of those of the run: see [`Scope::with_options`](crate::Scope::with_options).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ParamOptions {
    /// The dtype of weight and gradient: f32 in a model of 16 bits, whose other weights have the dtype of the scope.
    /// Norms compute with the f32 weights; other layers cast them to the activations' dtype. The parameter needs no
    /// master weights.
    pub dtype: Option<DType>,
    /// Factor of the learning rate; 0 keeps the value.
    pub lr_multiplier: f64,
    /// Weight decay, also of a bias or norm; `None` leaves it to the optimizer and
    /// [`WeightDecay`](crate::WeightDecay).
    pub weight_decay: Option<f64>,
    /// Another optimizer.
    pub optimizer: Option<OptimizerConfig>,
}

impl Default for ParamOptions {
    /// The options of the run.
    fn default() -> ParamOptions {
        ParamOptions { dtype: None, lr_multiplier: 1.0, weight_decay: None, optimizer: None }
    }
}

impl ParamOptions {
    /// Errors, naming the parameter, if an option is out of range.
    pub(crate) fn check(&self, name: &str) -> Result<()> {
        let named = [
            ("learning-rate multiplier", Some(self.lr_multiplier)),
            ("weight decay", self.weight_decay),
        ];
        let bad = named.iter().find_map(|(what, value)| {
            value.filter(|value| !(*value >= 0.0 && value.is_finite())).map(|value| (what, value))
        });
        match bad {
            None => Ok(()),
            Some((what, value)) => {
                let message = format!("the {what} of '{name}' must be at least 0, got {value}");
                Err(Error::config("optimizer", message))
            }
        }
    }
}

type Options = dyn Fn(&str) -> ParamOptions + Send + Sync;

/// The closure of [`Scope::with_options`](crate::Scope::with_options).
#[derive(Clone, Default)]
pub(crate) struct OptionsByName(Option<Arc<Options>>);

impl OptionsByName {
    /// Options given by `f`.
    pub fn new(f: impl Fn(&str) -> ParamOptions + Send + Sync + 'static) -> OptionsByName {
        OptionsByName(Some(Arc::new(f)))
    }

    /// The options of the parameter `name`.
    pub fn of(&self, name: &str) -> ParamOptions {
        self.0.as_ref().map_or_else(ParamOptions::default, |f| f(name))
    }
}

impl fmt::Debug for OptionsByName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "OptionsByName(..)" } else { "OptionsByName(none)" })
    }
}
