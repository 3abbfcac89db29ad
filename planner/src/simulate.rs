//! Replays a schedule: each stage's instructions in order, with the durations of its program.
//!
//! A rank has a compute stream, which runs kernels one after another, and a queue for each group, whose calls run beside
//! the kernels. Calls of one rank share its two links: to the other GPUs of the node, and to the network. Calls on a link
//! run one after another; a message that meets a call on its link takes twice as long. The stream stands still from a
//! wait for a call until its end. Messages between stages begin when they are sent and received, as with NCCL. The ranks
//! of a stage do the same at the same time, so one of each stage is replayed.

mod rank;
mod shared;

use ferrotron_parallel::pipeline::{PipelineSchedule, Timeline};
use ferrotron_tensor::{Error, Result};

use crate::cluster::Software;
use crate::program::Program;
use crate::sharing::{Piece, Sharing, Stretch};
use crate::stage_time::{Slot, StageTime};
use crate::trace::Mark;
use rank::Rank;
use shared::Shared;

/// A replayed step.
#[derive(Debug, Clone, PartialEq)]
pub struct Replay {
    /// Its duration.
    pub seconds: f64,
    /// Each stage, over the whole duration.
    pub stages: Vec<StageTime>,
    /// The times at which each stage ran its instructions.
    pub timeline: Timeline,
    /// The spans of a trace, if they were asked for.
    pub marks: Vec<Mark>,
}

/// Replays `schedule` with the program of each stage. Ranks on processors are `sharing` them.
///
/// Errors if a program lacks a computation, or if the schedule deadlocks.
pub fn simulate(
    schedule: &PipelineSchedule,
    programs: &[&Program],
    software: Software,
    sharing: Option<Sharing>,
    with_marks: bool,
) -> Result<Replay> {
    let mut shared = Shared::new(schedule, software);
    let details = (with_marks, sharing.is_some());
    let stages = programs.iter().enumerate();
    let mut ranks: Vec<Rank<'_>> =
        stages.map(|(stage, program)| Rank::new(stage, program, details)).collect();
    loop {
        let mut moved = false;
        for rank in &mut ranks {
            moved |= rank.advance(&mut shared)?;
        }
        if ranks.iter().all(|rank| rank.is_done(schedule)) {
            break;
        }
        if !moved {
            return Err(Error::graph("simulate", "the stages wait for one another"));
        }
    }
    let seconds = ranks.iter().fold(0.0, |end: f64, rank| end.max(rank.now));
    let (mut stages, mut spans, mut marks, mut pieces) = (vec![], vec![], vec![], vec![]);
    for mut rank in ranks {
        rank.mark_steps(schedule);
        rank.spend(Slot::Bubble, rank.now, seconds);
        stages.push(rank.time);
        spans.push(rank.spans);
        marks.extend(rank.marks.into_iter().flatten());
        pieces.push(rank.pieces.unwrap_or_default());
    }
    let timeline = Timeline { ranks: spans, chunks: schedule.chunks() };
    let replay = Replay { seconds, stages, timeline, marks };
    Ok(match sharing {
        Some(sharing) => on_shared_cores(replay, &sharing, &pieces),
        None => replay,
    })
}

/// The replay as it is on shared cores. `pieces` are those of each stage.
fn on_shared_cores(replay: Replay, sharing: &Sharing, pieces: &[Vec<Piece>]) -> Replay {
    let times = Stretch::new(sharing, pieces);
    let Replay { seconds, mut stages, mut timeline, mut marks } = replay;
    for (stage, pieces) in stages.iter_mut().zip(pieces) {
        let launches = std::mem::take(&mut stage.launches);
        *stage = StageTime { launches, ..StageTime::default() };
        for Piece { slot, start, end } in pieces {
            stage.add(*slot, times.at(*end) - times.at(*start));
        }
    }
    for span in timeline.ranks.iter_mut().flatten() {
        (span.start, span.end) = (times.at(span.start), times.at(span.end));
    }
    for mark in &mut marks {
        (mark.start, mark.end) = (times.at(mark.start), times.at(mark.end));
    }
    Replay { seconds: times.at(seconds), stages, timeline, marks }
}
