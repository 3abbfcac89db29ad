//! Freezes parameters by the patterns of a configuration, before anything is laid out for them.

use ferrotron_nn::Scope;
use ferrotron_tensor::{Error, Result};

use super::TrainerConfig;
use crate::training::model::{Model, parameter_names};

/// Freezes the parameters of `parts` whose names match [`TrainerConfig::frozen`].
///
/// The names of the whole model decide about errors, so that all ranks have the same one: a pattern that matches none,
/// patterns that leave nothing to train.
pub(super) fn freeze<M: Model>(
    config: &TrainerConfig,
    scope: &Scope,
    model: &M::Config,
    parts: &[M],
) -> Result<()> {
    let patterns = &config.frozen;
    if patterns.is_empty() {
        return Ok(());
    }
    let names = parameter_names::<M>(model, scope.dtype())?;
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let refuse = |error: Error| Error::config("freeze-parameters", error.context());
    patterns.check(&names).map_err(refuse)?;
    if names.iter().all(|name| patterns.matches(name)) {
        let message =
            format!("all {} parameters are frozen: nothing is left to train", names.len());
        return Err(Error::config("freeze-parameters", message));
    }
    parts.iter().try_for_each(|part| part.freeze(|name| patterns.matches(name)).map(drop))
}
