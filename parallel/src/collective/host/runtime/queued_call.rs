//! A call on its way to the progress thread.

use std::sync::{Arc, Mutex};
use tracing::Span;

use crate::collective::{Call, CommVolume, Completion, Memory};

/// A call in the queue.
pub struct QueuedCall {
    /// The operation.
    pub call: Call,
    /// Its memory.
    pub memory: Memory,
    /// The channel of the result.
    pub completion: Completion,
    /// Its span in a trace.
    pub span: Span,
    /// The name of the handle that was called.
    pub name: Arc<str>,
    /// The handle's counter of what is sent.
    pub traffic: Arc<Mutex<CommVolume>>,
    /// Dropped when the call has ended.
    pub queued: Arc<()>,
}
