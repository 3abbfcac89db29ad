//! Checks the patterns of a configuration against the names of a model, and freezes the parameters that they choose.

use ferrotron_nn::{Module, ParamPatterns, Scope};
use ferrotron_tensor::{DType, Error, Result};

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
    check("freeze-parameters", patterns, &names)?;
    if names.iter().all(|name| patterns.matches(name)) {
        let message =
            format!("all {} parameters are frozen: nothing is left to train", names.len());
        return Err(Error::config("freeze-parameters", message));
    }
    let params = parts.iter().flat_map(Module::params);
    let mut chosen = params.filter(|param| patterns.matches(param.name()));
    chosen.try_for_each(|param| param.set_trainable(false))
}

/// `scope`, in which the parameters of [`TrainerConfig::keep_in_fp32`] have f32.
///
/// Errors if the scope has no 16-bit dtype, and as [`freeze`] if a pattern matches none.
pub(super) fn keep_in_fp32<M: Model>(
    config: &TrainerConfig,
    scope: &Scope,
    model: &M::Config,
) -> Result<Scope> {
    let patterns = &config.keep_in_fp32;
    if patterns.is_empty() {
        return Ok(scope.clone());
    }
    check_sixteen_bits(scope.dtype())?;
    check("keep-in-fp32", patterns, &parameter_names::<M>(model, scope.dtype())?)?;
    Ok(scope.clone().with_accumulator_dtype(patterns))
}

/// Errors unless the parameters of a model that exists already have the dtypes of [`TrainerConfig::keep_in_fp32`].
pub(super) fn check_kept_in_fp32<M: Model>(
    config: &TrainerConfig,
    scope: &Scope,
    model: &M::Config,
    parts: &[M],
) -> Result<()> {
    keep_in_fp32::<M>(config, scope, model)?;
    let params = parts.iter().flat_map(Module::params);
    let narrow = |name: &str, dtype| config.keep_in_fp32.matches(name) && dtype != DType::F32;
    match params.into_iter().find(|param| narrow(param.name(), param.leaf().dtype())) {
        None => Ok(()),
        Some(param) => {
            let message = format!(
                "'{}' is {} already: make the model in `scope.with_accumulator_dtype(&patterns)`",
                param.name(),
                param.leaf().dtype()
            );
            Err(Error::config("keep-in-fp32", message))
        }
    }
}

/// Errors unless weights of `dtype` have 16 bits.
fn check_sixteen_bits(dtype: DType) -> Result<()> {
    match dtype {
        DType::BF16 | DType::F16 => Ok(()),
        _ => Err(Error::config("keep-in-fp32", format!("needs --bf16 or --fp16, got {dtype}"))),
    }
}

/// Errors, naming the option, if a pattern matches none of `names`.
fn check(option: &'static str, patterns: &ParamPatterns, names: &[String]) -> Result<()> {
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    patterns.check(&names).map_err(|error| Error::config(option, error.context()))
}
