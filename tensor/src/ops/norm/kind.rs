//! The kinds of normalisation, and the gradients of one.

use crate::Tensor;

/// The normalisation that a kernel computes.
pub(crate) trait NormKind {
    /// Name in errors.
    const OP: &'static str;
    /// Name of the gradient in errors.
    const OP_BACKWARD: &'static str;
    /// Whether the mean is subtracted.
    const CENTRED: bool;
}

/// The gradients that a caller needs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum GradSelection {
    Input,
    All,
}

/// dx, and (dweight, dbias) in Acc so that callers accumulate without loss.
pub(crate) type Gradients = (Tensor, Option<(Tensor, Tensor)>);
