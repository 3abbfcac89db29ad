//! Proves, times and draws schedules.

pub mod formula;
mod rule;
pub(super) mod simulate;
pub mod svg;
pub mod text;
pub(super) mod validate;
pub(super) mod versions;
