//! Writes TensorBoard's event files.
//!
//! A file is a sequence of records (`record.rs`), each with one event, a message of protocol buffers (`event.rs`).
//! TensorBoard reads all files of a folder as one run.

mod event;
mod file;
mod record;

pub use event::EventValue;
pub use file::{EventFile, event_files};
