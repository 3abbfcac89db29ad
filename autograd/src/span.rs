//! What a trace of a run shows of the forward pass: one span for each operation.
//!
//! Spans of the `tracing` crate go to whoever watches the thread. If nobody does, one costs a comparison.

use tracing::span::EnteredSpan;
use tracing::trace_span;

/// The span of the operation `name`, from now until the result is dropped. An operation of your own makes it
/// before it computes its value; what shows its backward is the name of its [`Backward`](crate::Backward).
#[must_use = "the span ends when this is dropped"]
pub fn forward_span(name: &'static str) -> EnteredSpan {
    trace_span!("forward", name).entered()
}
