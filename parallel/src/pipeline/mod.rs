//! Pipelines are data: a schedule is a list of instructions for each rank, made by a pure function.
//!
//! A model is cut into `stages * chunks` virtual stages. Rank r of the pipeline holds those numbered
//! `chunk * stages + r`, so with more than one chunk the activations go around the ranks several times,
//! from the last rank back to the first. Microbatches, chunks, ranks and virtual stages count from 0.
//!
//! [`Schedule::new`] makes the instructions of a published schedule, [`Schedule::from_instructions`]
//! takes anybody's; [`execute`] carries them out. [`check`] proves either complete and free of deadlock, even if every send waits for
//! its receiver, and states how many activations live at once. [`simulate`] times it; [`text`] and
//! [`svg`] draw the result; [`formula`] holds what the papers promise.
//!
//! Whoever executes a schedule goes through the list of its rank. Sends and receives are started where
//! they stand; before a computation, [`Schedule::needed`] names the message to wait for, and after it,
//! [`Schedule::made`] the one that a later send hands on. Both are `None` at the ends of the model:
//! there the tokens come in and the loss goes out.
//!
//! ```
//! use ferrotron_parallel::pipeline::{PipelineConfig, Schedule, ScheduleKind, Times, check, simulate};
//!
//! let config =
//!     PipelineConfig { kind: ScheduleKind::OneFOneB, stages: 4, microbatches: 8, chunks: 1 };
//! let schedule = Schedule::new(&config)?;
//! let peaks = check(&schedule)?;
//! assert_eq!(peaks.iter().map(|peak| peak.total).collect::<Vec<_>>(), [4, 3, 2, 1]);
//!
//! let timeline = simulate(&schedule, &Times::default())?;
//! assert_eq!((timeline.total(), timeline.bubble()), (33.0, 9.0)); // (8 + 4 - 1) * 3 and (4 - 1) * 3
//! # Ok::<(), ferrotron_tensor::Error>(())
//! ```

mod check;
mod config;
mod execute;
pub mod formula;
mod generate;
mod instruction;
mod rendezvous;
mod schedule;
mod simulate;
pub mod svg;
#[cfg(test)]
mod tests;
pub mod text;
mod transfers;

pub use check::{Peak, check};
pub use config::{PipelineConfig, ScheduleKind, refusal};
pub use execute::{Execution, PipelineModel, execute};
pub use instruction::{Direction, Instruction, Message};
pub use schedule::Schedule;
pub use simulate::{Span, Timeline, Times, simulate};
