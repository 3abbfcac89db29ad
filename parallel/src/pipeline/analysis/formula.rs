//! Formulas from the papers for each schedule: bubble, step time, peak activations.
//!
//! With p stages, m micro-batches, v chunks and the times of a micro-batch on one rank: t_f forward, t_b gradient of
//! the input, t_w gradients of the weights. In arXiv:2104.04473, whose backward is not split, t_b stands for t_b +
//! t_w here. Communication takes no time.
//!
//! Without a flush the order is that of 1F1B over the micro-batches of all steps, which m counts; updates take no time.

use crate::pipeline::analysis::simulate::StageTimes;
use crate::pipeline::analysis::validate::PeakActivations;
use crate::pipeline::schedule::config::{PipelineConfig, ScheduleKind};

/// The bubble as text, in the symbols of this module.
pub fn bubble_text(kind: ScheduleKind) -> &'static str {
    match kind {
        ScheduleKind::Naive => "m (p-1) (tf+tb+tw)",
        ScheduleKind::GPipe | ScheduleKind::OneFOneB => "(p-1) (tf+tb+tw)",
        ScheduleKind::Interleaved => "(p-1) (tf+tb+tw) / v",
        ScheduleKind::ZbH1 => "(p-1) (tf+tb) - (min(m,p)-1) tw",
        _ => bubble_text(ScheduleKind::OneFOneB),
    }
}

/// The bubble as a fraction of the ideal time, as text; `None` if it depends on the times.
pub fn bubble_share_text(kind: ScheduleKind) -> Option<&'static str> {
    match kind {
        ScheduleKind::Naive => Some("p-1"),
        ScheduleKind::GPipe | ScheduleKind::OneFOneB => Some("(p-1)/m"),
        ScheduleKind::Interleaved => Some("(p-1)/(m v)"),
        ScheduleKind::ZbH1 => None,
        _ => bubble_share_text(ScheduleKind::OneFOneB),
    }
}

/// The step time, as text.
pub fn iteration_text(kind: ScheduleKind) -> &'static str {
    match kind {
        ScheduleKind::Naive => "m p (tf+tb+tw)",
        ScheduleKind::GPipe | ScheduleKind::OneFOneB => "(m+p-1) (tf+tb+tw)",
        ScheduleKind::Interleaved => "(m+(p-1)/v) (tf+tb+tw)",
        ScheduleKind::ZbH1 => "(m+p-1) (tf+tb) + (m+1-min(m,p)) tw",
        _ => iteration_text(ScheduleKind::OneFOneB),
    }
}

/// Returns whether [`bubble`] and [`iteration_time`] are exact; otherwise they are lower bounds. They are exact
/// without communication and, for ZB-H1, if t_w is at most t_f and t_b.
pub fn is_exact(kind: ScheduleKind, times: &StageTimes) -> bool {
    let fills = times.backward_weight <= times.forward.min(times.backward_input);
    times.communication == 0.0 && (kind != ScheduleKind::ZbH1 || fills)
}

/// Time of a step in excess of the m (t_f + t_b + t_w) that a rank computes.
///
/// Sections 2.2.1 and 2.2.2 of arXiv:2104.04473 for GPipe, 1F1B and interleaved 1F1B. Table 2 of arXiv:2401.10241 for
/// ZB-H1, (p-1) (t_f + t_b - t_w), extended here to fewer micro-batches than stages. See [`is_exact`].
pub fn bubble(config: &PipelineConfig, times: &StageTimes) -> f64 {
    let microbatches = config.microbatches as f64;
    let others = config.stages as f64 - 1.0;
    match config.kind {
        ScheduleKind::Naive => microbatches * others * times.microbatch(),
        ScheduleKind::GPipe | ScheduleKind::OneFOneB => others * times.microbatch(),
        ScheduleKind::Interleaved => others * times.microbatch() / config.chunks as f64,
        ScheduleKind::ZbH1 => {
            let filled = config.microbatches.min(config.stages) as f64 - 1.0;
            others * (times.forward + times.backward_input) - filled * times.backward_weight
        }
        _ => bubble(&PipelineConfig { kind: ScheduleKind::OneFOneB, ..*config }, times),
    }
}

/// Time of a step without its optimizer. For GPipe and 1F1B this is equation (1) of arXiv:2104.04473,
/// (b'/b + p - 1) (t_f + t_b), where b'/b is the number of micro-batches.
pub fn iteration_time(config: &PipelineConfig, times: &StageTimes) -> f64 {
    config.microbatches as f64 * times.microbatch() + bubble(config, times)
}

/// Peak number of activations on a rank, in micro-batches of one chunk.
///
/// A rank holds one activation more than its warm-up has forwards: [`PipelineSchedule::new`] lists these. With ZB-H1 weight
/// gradients are also deferred, one per input gradient and at most r + 1 on rank r. Every rank then holds p in total.
///
/// [`PipelineSchedule::new`]: crate::pipeline::PipelineSchedule::new
pub fn peak(config: &PipelineConfig, rank: usize) -> PeakActivations {
    let PipelineConfig { kind, stages, microbatches, chunks } = *config;
    let after = stages - rank - 1;
    let in_flight = match kind {
        ScheduleKind::Naive => 1,
        ScheduleKind::GPipe => microbatches,
        ScheduleKind::Interleaved => 2 * after + (chunks - 1) * stages + 1,
        _ => after + 1,
    };
    let activations = in_flight.min(microbatches * chunks);
    if kind == ScheduleKind::ZbH1 {
        let deferred = (rank + 1).min(microbatches);
        return PeakActivations { activations, deferred, total: stages.min(microbatches) };
    }
    PeakActivations { activations, deferred: 0, total: activations }
}
