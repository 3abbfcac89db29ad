//! Rules of schedules, and the error for one that is violated.

use ferrotron_tensor::Error;

/// Whether an instruction keeps to the rules, or the reason why not.
pub(super) type Rule = std::result::Result<(), String>;

pub(super) fn must(holds: bool, why: &str) -> Rule {
    if holds { Ok(()) } else { Err(why.to_string()) }
}

pub(super) fn wrong(context: String) -> Error {
    Error::value("pipeline schedule", context)
}
