//! Tracing of the forward pass: one span per operation.
//!
//! Spans of the `tracing` crate go to the thread's subscriber. Without one, a span costs a comparison.

use tracing::span::EnteredSpan;
use tracing::trace_span;

/// Enters the span of the operation `name` until the result is dropped. A custom operation enters it before computing
/// its value; its backward is traced under the name of its [`Backward`](crate::Backward).
#[must_use = "the span ends when this is dropped"]
pub fn forward_span(name: &'static str) -> EnteredSpan {
    trace_span!("forward", name).entered()
}
