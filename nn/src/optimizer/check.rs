//! Checks of hyperparameters.

use ferrotron_tensor::{Error, Result};

/// Errors, naming it, if a number is outside [0, 1).
pub(super) fn fractions(named: &[(&str, f64)]) -> Result<()> {
    check(named, |value| (0.0..1.0).contains(&value), "in [0, 1)")
}

/// Errors, naming it, if a number is negative or not finite.
pub(super) fn non_negative(named: &[(&str, f64)]) -> Result<()> {
    check(named, |value| value >= 0.0 && value.is_finite(), "at least 0")
}

fn check(named: &[(&str, f64)], fits: impl Fn(f64) -> bool, range: &str) -> Result<()> {
    match named.iter().find(|(_, value)| !fits(*value)) {
        None => Ok(()),
        Some((name, value)) => {
            Err(Error::config("optimizer", format!("{name} must be {range}, got {value}")))
        }
    }
}
