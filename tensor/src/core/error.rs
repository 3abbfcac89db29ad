//! The error type of the project: kind, operation, module path and values.
//!
//! ```
//! use ferrotron_tensor::{Error, ErrorKind};
//! let error = Error::shape("matmul", "inner dimensions differ: lhs (4, 8) x rhs (16, 8)")
//!     .at("attn")
//!     .at("blocks.3");
//! assert_eq!(
//!     error.to_string(),
//!     "blocks.3.attn: matmul: inner dimensions differ: lhs (4, 8) x rhs (16, 8)"
//! );
//! assert_eq!(error.kind(), ErrorKind::Shape);
//! ```

use std::fmt;

/// The result of every fallible function of the project.
pub type Result<T> = std::result::Result<T, Error>;

/// The class of an [`Error`], for callers that handle it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Shapes, strides or indices do not fit the operation.
    Shape,
    /// The operation does not support this dtype, or the operands' dtypes differ.
    DType,
    /// A value is out of its domain (an index beyond a table, a negative size).
    Value,
    /// Memory cannot be allocated, or still has another holder.
    Memory,
    /// The graph cannot run backward: consumed twice, a changed parameter, a captured variable.
    Graph,
    /// A file or stream could not be read or written, or has invalid contents.
    Io,
    /// A device is missing, failed, or is not the one an operation needs.
    Device,
    /// A configuration, flag or combination is rejected.
    Config,
    /// Ranks disagree about a collective, or one of them is late or has exited.
    Communication,
}

/// An error: its kind, the operation that detected it, and the values involved. [`Error::at`] adds the module path as
/// the error propagates.
#[derive(Clone)]
pub struct Error(Box<ErrorInner>);

#[derive(Clone)]
struct ErrorInner {
    kind: ErrorKind,
    op: &'static str,
    path: String,
    context: String,
}

impl Error {
    /// An error of `kind` detected by `op`; `context` states the values and the remedy.
    pub fn new(kind: ErrorKind, op: &'static str, context: impl Into<String>) -> Self {
        Error(Box::new(ErrorInner { kind, op, path: String::new(), context: context.into() }))
    }

    /// Incompatible shapes.
    pub fn shape(op: &'static str, context: impl Into<String>) -> Self {
        Self::new(ErrorKind::Shape, op, context)
    }

    /// A dtype that the operation does not support.
    pub fn dtype(op: &'static str, context: impl Into<String>) -> Self {
        Self::new(ErrorKind::DType, op, context)
    }

    /// A value out of its domain.
    pub fn value(op: &'static str, context: impl Into<String>) -> Self {
        Self::new(ErrorKind::Value, op, context)
    }

    /// Memory that cannot be allocated or still has another holder.
    pub fn memory(op: &'static str, context: impl Into<String>) -> Self {
        Self::new(ErrorKind::Memory, op, context)
    }

    /// A device that is missing, failed, or is not the one needed.
    pub fn device(op: &'static str, context: impl Into<String>) -> Self {
        Self::new(ErrorKind::Device, op, context)
    }

    /// A graph that cannot run backward.
    pub fn graph(op: &'static str, context: impl Into<String>) -> Self {
        Self::new(ErrorKind::Graph, op, context)
    }

    /// A file that cannot be read or written.
    pub fn io(op: &'static str, context: impl Into<String>) -> Self {
        Self::new(ErrorKind::Io, op, context)
    }

    /// A rejected configuration.
    pub fn config(op: &'static str, context: impl Into<String>) -> Self {
        Self::new(ErrorKind::Config, op, context)
    }

    /// A collective that ranks disagree about, or that one of them does not join.
    pub fn communication(op: &'static str, context: impl Into<String>) -> Self {
        Self::new(ErrorKind::Communication, op, context)
    }

    /// The class of the error.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The operation that detected the error.
    pub fn op(&self) -> &'static str {
        self.0.op
    }

    /// The values involved, and the remedy.
    pub fn context(&self) -> &str {
        &self.0.context
    }

    /// Prepends a module name to the path. Each module calls it as the error propagates.
    #[must_use]
    pub fn at(mut self, module: &str) -> Self {
        if !module.is_empty() {
            let separator = if self.0.path.is_empty() { "" } else { "." };
            self.0.path = format!("{module}{separator}{}", self.0.path);
        }
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ErrorInner { op, path, context, .. } = &*self.0;
        if !path.is_empty() {
            write!(f, "{path}: ")?;
        }
        if !op.is_empty() {
            write!(f, "{op}: ")?;
        }
        f.write_str(context)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} error: {self}", self.0.kind)
    }
}

impl std::error::Error for Error {}

/// Adds a module path to the error of a `Result`.
pub trait At<T> {
    /// Prepends `module` to the error's path, if this is an error: `result.at("blocks.3")`.
    fn at(self, module: &str) -> Result<T>;
}

impl<T> At<T> for Result<T> {
    fn at(self, module: &str) -> Result<T> {
        self.map_err(|error| error.at(module))
    }
}
