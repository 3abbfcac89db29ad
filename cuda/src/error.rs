//! The error type of this crate: an operation and the reason for its failure.

use std::fmt;

/// The result of every fallible function of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An error: the operation, the reason, and the remedy if there is one.
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
    /// An error detected by `op`.
    pub fn new(op: &'static str, context: impl Into<String>) -> Error {
        Error { op, context: context.into() }
    }

    /// The operation that detected the error.
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
