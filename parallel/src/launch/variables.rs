//! Environment variables, and which of them speak of this process.

use ferrotron_tensor::{Error, Result};
use std::collections::BTreeMap;

/// Set by srun for the tasks of a step.
const STEP: &[&str] = &["SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"];

/// Environment variables; empty ones do not count.
pub struct Variables<'a>(pub &'a BTreeMap<String, String>);

impl Variables<'_> {
    /// Returns the first of `names` that is set, with its value.
    pub fn first(&self, names: &[&'static str]) -> Option<(&'static str, &str)> {
        names.iter().find_map(|&name| {
            let value = self.0.get(name)?.trim();
            (!value.is_empty()).then_some((name, value))
        })
    }

    /// Returns the value of the first of `names` that is set.
    pub fn value(&self, names: &[&'static str]) -> Option<&str> {
        self.first(names).map(|(_, value)| value)
    }

    /// Returns the first of `names` that is set, as a number.
    ///
    /// Errors if it is none.
    pub fn number(&self, names: &[&'static str]) -> Result<Option<(&'static str, usize)>> {
        let Some((name, value)) = self.first(names) else { return Ok(None) };
        let number = value.parse().map_err(|_| refuse(format!("{name} '{value}' is no number")))?;
        Ok(Some((name, number)))
    }

    /// Returns whether Slurm's variables speak of this process: a batch script has them too, but is no rank.
    pub fn slurm_counts(&self) -> bool {
        let task = self.first(&["SLURM_PROCID"]);
        task.is_some_and(|(_, task)| task != "0")
            || self.first(STEP).is_some()
            || self.first(&["MASTER_ADDR"]).is_some()
    }
}

/// An error of the environment.
pub fn refuse(why: String) -> Error {
    Error::config("environment", why)
}
