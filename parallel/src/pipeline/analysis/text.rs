//! Draws a timeline as text: one row per rank, one column per unit of time.
//!
//! ```text
//! time/s  0           4           8
//! rank 0  F0 F1 .  .  B0--- .  B1---
//! rank 1  .  F0 B0--- F1 B1--- .  .
//! ```
//!
//! F is a forward, B a backward (or its input part), W the weight part. The number is the micro-batch; with more than
//! one chunk, a point and the chunk follow. Dashes extend to the end of a computation; a point is a unit of waiting.

use crate::pipeline::analysis::simulate::{Span, Timeline};
use crate::pipeline::schedule::instruction::Instruction;

/// Columns between two marks of the time axis.
const MARK_EVERY: usize = 4;

/// Maximum number of columns of a timeline. Longer timelines use a larger unit per column.
const MOST_COLUMNS: f64 = 4000.0;

/// Letter, micro-batch and chunk of a computation.
pub(in crate::pipeline) fn parts(instruction: &Instruction) -> Option<(char, usize, usize)> {
    match *instruction {
        Instruction::Forward { microbatch, chunk } => Some(('F', microbatch, chunk)),
        Instruction::Backward { microbatch, chunk }
        | Instruction::BackwardInput { microbatch, chunk } => Some(('B', microbatch, chunk)),
        Instruction::BackwardWeight { microbatch, chunk } => Some(('W', microbatch, chunk)),
        _ => None,
    }
}

/// Draws a timeline with lines of at most `width` characters if possible; longer timelines continue in a block below.
/// If durations have no common unit, starts and ends are rounded to columns.
pub fn draw(timeline: &Timeline, width: usize) -> String {
    let unit = unit(timeline);
    let label = |span: &Span| {
        let (letter, microbatch, chunk) = parts(&span.instruction)?;
        let chunk = if timeline.chunks > 1 { format!(".{chunk}") } else { String::new() };
        Some(format!("{letter}{microbatch}{chunk}"))
    };
    let spans = || timeline.ranks.iter().flatten();
    let cell = spans().filter_map(label).map(|label| label.len()).max().unwrap_or(0) + 1;
    let columns = (timeline.total() / unit).round() as usize;
    let margin = format!("rank {}  ", timeline.ranks.len().saturating_sub(1)).len();

    let rows: Vec<Vec<u8>> = (0..timeline.ranks.len())
        .map(|rank| {
            let waiting = format!("{:cell$}", ".");
            let mut row = waiting.repeat(columns).into_bytes();
            for span in timeline.computations(rank) {
                let column = |time: f64| (time / unit).round() as usize * cell;
                let (start, end) = (column(span.start), column(span.end));
                // Shorter than half a column: not drawn.
                let (Some(label), true) = (label(span), start < end) else { continue };
                let filled = format!("{label:-<0$} ", end - start - 1);
                row[start..end].copy_from_slice(filled.as_bytes());
            }
            row
        })
        .collect();

    let per_block = (width.saturating_sub(margin) / cell / MARK_EVERY).max(1) * MARK_EVERY;
    let (per_second, name) = time_unit(timeline.total());
    let mut text = String::new();
    for first in (0..columns).step_by(per_block) {
        let last = (first + per_block).min(columns);
        if first > 0 {
            text.push('\n');
        }
        let mut line = format!("{:margin$}", format!("time/{name}"));
        for mark in (first..last).step_by(MARK_EVERY) {
            let time = rounded(mark as f64 * unit * per_second);
            line += &format!("{time:<0$}", cell * MARK_EVERY);
        }
        push_line(&mut text, &line);
        for (rank, row) in rows.iter().enumerate() {
            let cells = String::from_utf8_lossy(&row[first * cell..last * cell]);
            push_line(&mut text, &format!("{:margin$}{cells}", format!("rank {rank}")));
        }
    }
    text
}

fn push_line(text: &mut String, line: &str) {
    text.push_str(line.trim_end());
    text.push('\n');
}

/// The display unit for times up to `total` seconds, as a factor and a name.
pub(in crate::pipeline) fn time_unit(total: f64) -> (f64, &'static str) {
    match total {
        1.0.. => (1.0, "s"),
        1e-3.. => (1e3, "ms"),
        _ => (1e6, "us"),
    }
}

/// Rounds a time to at most four decimals.
pub(in crate::pipeline) fn rounded(time: f64) -> f64 {
    (time * 1e4).round() / 1e4
}

/// The largest common divisor of all durations, with a limit on its smallness; otherwise the shortest duration.
fn unit(timeline: &Timeline) -> f64 {
    let mut durations: Vec<f64> = Vec::new();
    let total = timeline.total();
    for span in timeline.ranks.iter().flatten() {
        let duration = span.end - span.start;
        let known = durations.iter().any(|other| (other - duration).abs() <= 1e-9 * total);
        if parts(&span.instruction).is_some() && duration > 0.0 && !known {
            durations.push(duration);
        }
    }
    let shortest = durations.iter().copied().fold(total, f64::min);
    let common = (1..=8).map(|parts| shortest / f64::from(parts)).find(|unit| {
        durations.iter().all(|duration| {
            let units = duration / unit;
            (units - units.round()).abs() < 1e-6
        })
    });
    common.unwrap_or(shortest).max(total / MOST_COLUMNS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::{PipelineConfig, PipelineSchedule, ScheduleKind, StageTimes, simulate};

    fn drawn(kind: ScheduleKind, chunks: usize, times: &StageTimes, width: usize) -> String {
        let config = PipelineConfig { kind, stages: 2, microbatches: 2, chunks };
        draw(&simulate(&PipelineSchedule::new(&config).unwrap(), times).unwrap(), width)
    }

    #[test]
    fn rows_and_columns_are_ranks_and_units_of_time() {
        let text = drawn(ScheduleKind::OneFOneB, 1, &StageTimes::default(), 100);
        let want = "\
time/s  0           4           8
rank 0  F0 F1 .  .  B0--- .  B1---
rank 1  .  F0 B0--- F1 B1--- .  .
";
        assert_eq!(text, want);
    }

    #[test]
    fn weight_parts_and_chunks_have_marks_of_their_own() {
        let text = drawn(ScheduleKind::ZbH1, 1, &StageTimes::default(), 100);
        let want = "\
time/s  0           4
rank 0  F0 F1 .  B0 W0 B1 W1
rank 1  .  F0 B0 F1 B1 W0 W1
";
        assert_eq!(text, want);
        let text = drawn(ScheduleKind::Interleaved, 2, &StageTimes::default(), 100);
        assert!(text.contains("F0.0 F1.0 F0.1 F1.1 .    .    B0.1-----"), "{text}");
    }

    #[test]
    fn long_timelines_go_on_below_and_odd_durations_are_rounded() {
        let times =
            StageTimes { backward_input: 1.5, backward_weight: 0.0, ..StageTimes::default() };
        let text = drawn(ScheduleKind::GPipe, 1, &times, 32);
        assert!(text.lines().all(|line| line.len() <= 32), "{text}");
        assert!(text.lines().filter(|line| line.starts_with("rank 0")).count() > 1, "{text}");
        let times = StageTimes { backward_input: std::f64::consts::PI, ..times };
        let text = drawn(ScheduleKind::GPipe, 1, &times, 100);
        assert!(text.contains("B1----"), "{text}");
    }
}
