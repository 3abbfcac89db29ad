//! Proves, times and draws schedules.

pub mod formula;
pub(super) mod simulate;
pub mod svg;
pub mod text;
pub(super) mod validate;
