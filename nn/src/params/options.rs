//! Options of parameters by name: dtype, learning rate, weight decay and update rule.

use ferrotron_tensor::{DType, Error, Result};
use std::fmt;
use std::sync::Arc;

use crate::params::param_patterns::ParamPatterns;
use crate::params::registry::{Entry, roots};
use crate::{OptimizerConfig, Param};

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

/// The closures of [`Scope::with_options`](crate::Scope::with_options) and
/// [`Scope::with_options_for`](crate::Scope::with_options_for), the latter with their patterns.
#[derive(Clone, Default)]
pub(crate) struct OptionsByName {
    options: Option<Arc<Options>>,
    patterns: Vec<Arc<ParamPatterns>>,
}

impl OptionsByName {
    /// Options given by `f` in place of these, whose patterns still have to match.
    pub fn replaced(
        self,
        f: impl Fn(&str) -> ParamOptions + Send + Sync + 'static,
    ) -> OptionsByName {
        OptionsByName { options: Some(Arc::new(f)), ..self }
    }

    /// The same options, changed by `change` for the parameters that `patterns` choose.
    pub fn changed_for(
        self,
        patterns: ParamPatterns,
        change: impl Fn(ParamOptions) -> ParamOptions + Send + Sync + 'static,
    ) -> OptionsByName {
        let (earlier, chosen) = (self.clone(), Arc::new(patterns));
        let mut patterns = self.patterns;
        patterns.push(chosen.clone());
        let options = move |name: &str| match chosen.matches(name) {
            true => change(earlier.get(name)),
            false => earlier.get(name),
        };
        OptionsByName { options: Some(Arc::new(options)), patterns }
    }

    /// The options of the parameter `name`.
    pub fn get(&self, name: &str) -> ParamOptions {
        self.options.as_ref().map_or_else(ParamOptions::default, |options| options(name))
    }

    /// The patterns by which options were changed.
    pub fn patterns(&self) -> &[Arc<ParamPatterns>] {
        &self.patterns
    }
}

/// The patterns of [`Scope::with_options_for`](crate::Scope::with_options_for) in the scopes of `params`, each with whether
/// it matches a parameter that scopes of the same roots have made. A pipeline stage compares them with those of the others.
pub fn option_patterns<'a>(params: impl IntoIterator<Item = &'a Param>) -> Vec<(String, bool)> {
    let params: Vec<&Param> = params.into_iter().collect();
    let roots = roots(params.iter().map(|param| param.entry()));
    let made: Vec<Arc<Entry>> = roots.into_iter().flat_map(|root| root.siblings()).collect();
    let names: Vec<&str> = made.iter().map(|entry| entry.name()).collect();
    let mut lists: Vec<&Arc<ParamPatterns>> = Vec::new();
    for list in params.iter().flat_map(|param| param.patterns()) {
        if !lists.iter().any(|known| Arc::ptr_eq(known, list)) {
            lists.push(list);
        }
    }
    lists.into_iter().flat_map(|list| list.matched(&names)).collect()
}

/// Errors, naming it, if a pattern of [`option_patterns`] matches none of `count` parameters.
pub fn check_option_patterns(patterns: &[(String, bool)], count: usize) -> Result<()> {
    let matched = |wanted: &str| patterns.iter().any(|(pattern, is)| *is && pattern == wanted);
    match patterns.iter().find(|(pattern, _)| !matched(pattern)) {
        None => Ok(()),
        Some((pattern, _)) => {
            let message = format!(
                "the pattern '{pattern}' of `Scope::with_options_for` or `with_accumulator_dtype` matches none of {count} \
                 parameters: `Module::summary` has their names"
            );
            Err(Error::config("options", message))
        }
    }
}

impl fmt::Debug for OptionsByName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.options.is_some() {
            "OptionsByName(..)"
        } else {
            "OptionsByName(none)"
        })
    }
}
