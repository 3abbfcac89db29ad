//! The error of this crate: what was attempted, and what went wrong.

use std::fmt;

/// Every fallible function of this crate returns this.
pub type Result<T> = std::result::Result<T, Error>;

/// What was attempted, and why it failed, with the remedy where there is one.
///
/// ```
/// let error = ferrotron_cuda::Error::new("nvrtc", "libnvrtc was not found");
/// assert_eq!(error.to_string(), "nvrtc: libnvrtc was not found");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    op: &'static str,
    context: String,
}

impl Error {
    /// An error that `op` noticed.
    pub fn new(op: &'static str, context: impl Into<String>) -> Error {
        Error { op, context: context.into() }
    }

    /// What noticed it.
    pub fn op(&self) -> &'static str {
        self.op
    }

    /// The values involved, and the remedy.
    pub fn context(&self) -> &str {
        &self.context
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.op, self.context)
    }
}

impl std::error::Error for Error {}
