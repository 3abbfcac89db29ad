//! The keys of a TOML file, each of which must be read: what is missing, absurd or unknown is named.

use ferrotron_tensor::{Error, Result};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use toml::{Table, Value};

/// The keys of a file, of which each must be read.
pub(crate) struct Keys<'a> {
    name: &'a str,
    table: Table,
    read: RefCell<BTreeSet<String>>,
}

impl<'a> Keys<'a> {
    /// The keys of `text`; `name` is for messages.
    ///
    /// Errors if it is no TOML.
    pub(crate) fn parse(name: &'a str, text: &str) -> Result<Keys<'a>> {
        let table = text.parse::<Table>().map_err(|error| {
            Error::config("--cluster", format!("{name} is no TOML: {}", error.message()))
        })?;
        Ok(Keys { name, table, read: RefCell::default() })
    }

    /// A whole number from 1 to `most`.
    pub(crate) fn count(&self, key: &str, most: usize) -> Result<usize> {
        let value = self.number(key, 1.0..=most as f64)?;
        match value.fract() {
            0.0 => Ok(value as usize),
            _ => Err(self.error(key, &format!("is {value}, and must be whole"))),
        }
    }

    /// A number above 0, at most 1.
    pub(crate) fn share(&self, key: &str) -> Result<f64> {
        self.number(key, 0.001..=1.0)
    }

    /// A number in `range`.
    pub(crate) fn number(&self, key: &str, range: RangeInclusive<f64>) -> Result<f64> {
        let value = match self.value(key)? {
            Value::Float(value) => *value,
            Value::Integer(value) => *value as f64,
            other => return Err(self.error(key, &format!("is {other}, and must be a number"))),
        };
        if range.contains(&value) {
            return Ok(value);
        }
        let message = format!("is {value}, and must be from {} to {}", range.start(), range.end());
        Err(self.error(key, &message))
    }

    /// A text.
    pub(crate) fn text(&self, key: &str) -> Result<String> {
        match self.value(key)? {
            Value::String(text) => Ok(text.clone()),
            other => Err(self.error(key, &format!("is {other}, and must be a text"))),
        }
    }

    /// A truth value.
    pub(crate) fn flag(&self, key: &str) -> Result<bool> {
        match self.value(key)? {
            Value::Boolean(flag) => Ok(*flag),
            other => Err(self.error(key, &format!("is {other}, and must be true or false"))),
        }
    }

    /// The names in a table of numbers; none without the table.
    ///
    /// Errors if it is no table.
    pub(crate) fn names(&self, key: &str) -> Result<Vec<String>> {
        match self.find(key) {
            None => Ok(Vec::new()),
            Some(Value::Table(table)) => Ok(table.keys().cloned().collect()),
            Some(other) => Err(self.error(key, &format!("is {other}, and must be a table"))),
        }
    }

    fn value(&self, key: &str) -> Result<&Value> {
        self.find(key).ok_or_else(|| self.error(key, "is missing"))
    }

    /// The value of a key, if there is one.
    pub(crate) fn find(&self, key: &str) -> Option<&Value> {
        self.read.borrow_mut().insert(key.to_string());
        let mut parts = key.split('.');
        let first = self.table.get(parts.next()?)?;
        parts.try_fold(first, |value, part| value.get(part))
    }

    /// The error of a key.
    pub(crate) fn error(&self, key: &str, message: &str) -> Error {
        Error::config("--cluster", format!("{}: {key} {message}", self.name))
    }

    /// Errors if the file has a key that was not read.
    pub(crate) fn all_are_read(&self) -> Result<()> {
        let mut left: Vec<(String, &Value)> =
            self.table.iter().map(|(key, value)| (key.clone(), value)).collect();
        while let Some((key, value)) = left.pop() {
            match value {
                Value::Table(table) => {
                    left.extend(table.iter().map(|(name, value)| (format!("{key}.{name}"), value)));
                }
                _ if !self.read.borrow().contains(&key) => {
                    return Err(self.error(&key, "is no key of a cluster"));
                }
                _ => {}
            }
        }
        Ok(())
    }
}
