//! Launches rounding to 16 bits, and widening.

use super::{cast, kernel};
use crate::{RandomKey, Result, ShardSpec, Tensor};

/// `target = source`, rounded stochastically. A step's parameters, if any, replace the key's step.
pub(crate) fn round(
    target: &mut Tensor,
    source: &Tensor,
    (key, place): (&RandomKey, &ShardSpec),
    step: Option<&Tensor>,
) -> Result<()> {
    if source.dtype() == target.dtype() {
        return convert(source, target); // all numbers are storable
    }
    let n = source.numel();
    let launch = kernel(source.device(), "round", target.dtype(), "round_stochastic")?
        .input(source)
        .output(target)
        .value(n as u64);
    let launch = match step {
        Some(step) => launch.value(key.words().0).input(step),
        None => launch.draws(key),
    };
    launch.place(place).run_elements(n)
}

/// `to = from`, rounded to nearest.
pub(crate) fn convert(from: &Tensor, to: &mut Tensor) -> Result<()> {
    if from.dtype() == to.dtype() { to.copy_from(from) } else { cast::cast(from, to) }
}
