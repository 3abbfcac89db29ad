//! The fields of spans and events of the `tracing` crate.

use std::collections::HashMap;
use std::fmt::Debug;
use tracing::field::{Field, Visit};

/// The fields of a span or an event.
#[derive(Default)]
pub(crate) struct Fields {
    /// Numbers and truth values, by name.
    pub(crate) numbers: HashMap<&'static str, u64>,
    /// Texts, by name.
    pub(crate) texts: HashMap<&'static str, String>,
}

impl Fields {
    /// A number; 0 without the field.
    pub(crate) fn number(&self, name: &str) -> u64 {
        self.numbers.get(name).copied().unwrap_or(0)
    }

    /// A text; empty without the field.
    pub(crate) fn text(&self, name: &str) -> &str {
        self.texts.get(name).map_or("", String::as_str)
    }
}

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.numbers.insert(field.name(), value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.numbers.insert(field.name(), u64::from(value));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.texts.insert(field.name(), value.to_string());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.texts.insert(field.name(), format!("{value:?}"));
    }
}
