//! Configuration of schedules, and the rejected combinations.

use ferrotron_tensor::{Error, Result};
use std::{fmt, str::FromStr};

/// The published schedules. [`PipelineSchedule::new`](crate::pipeline::PipelineSchedule::new) describes their orders.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ScheduleKind {
    /// One micro-batch at a time, through all stages and back.
    Naive,
    /// All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965).
    GPipe,
    /// One forward, one backward: PipeDream-Flush, the default of Megatron-LM (Narayanan et al. 2021,
    /// arXiv:2104.04473, section 2.2.1).
    OneFOneB,
    /// 1F1B with several chunks of the model on each rank (arXiv:2104.04473, section 2.2.2).
    Interleaved,
    /// Zero-bubble ZB-H1: 1F1B that defers weight gradients into its bubbles (Qi et al. 2023, arXiv:2401.10241,
    /// section 2.1). The optimizer steps after all ranks are done.
    ZbH1,
    /// 1F1B without a flush: each rank updates its weights after each backward, and backward uses the weights that the
    /// micro-batch's forward used on that rank (PipeDream with weight stashing, Harlap et al. 2018, arXiv:1806.03377).
    PipeDream,
    /// PipeDream with vertical sync: a micro-batch uses the same version of the weights on all ranks.
    PipeDreamVerticalSync,
    /// 1F1B without a flush and with gradient accumulation: all ranks update after each step, whose gradients are those of
    /// the weights one update ago, so that two versions suffice (PipeDream-2BW, Narayanan et al. 2020, arXiv:2006.09503).
    PipeDream2Bw,
}

const KINDS: [(&str, ScheduleKind); 8] = [
    ("naive", ScheduleKind::Naive),
    ("gpipe", ScheduleKind::GPipe),
    ("1f1b", ScheduleKind::OneFOneB),
    ("interleaved", ScheduleKind::Interleaved),
    ("zb-h1", ScheduleKind::ZbH1),
    ("pipedream", ScheduleKind::PipeDream),
    ("pipedream-vertical-sync", ScheduleKind::PipeDreamVerticalSync),
    ("pipedream-2bw", ScheduleKind::PipeDream2Bw),
];

impl ScheduleKind {
    /// The kinds whose pipeline is empty at the end of each step. All of them compute the same gradients.
    pub const FLUSHED: [ScheduleKind; 5] =
        [KINDS[0].1, KINDS[1].1, KINDS[2].1, KINDS[3].1, KINDS[4].1];

    /// The kinds without a flush between steps: weights are updated while other micro-batches are in flight.
    pub const UNFLUSHED: [ScheduleKind; 3] = [KINDS[5].1, KINDS[6].1, KINDS[7].1];

    /// Returns whether the backward is split into two instructions, for the input and for the weights.
    pub fn splits_backward(self) -> bool {
        self == ScheduleKind::ZbH1
    }

    /// Returns whether the pipeline is empty at the end of each step.
    pub fn flushes(self) -> bool {
        !ScheduleKind::UNFLUSHED.contains(&self)
    }

    /// The reason for which a schedule without a flush rejects a parameter of two stages, with this `remedy`.
    pub fn refuses_tied_embeddings(self, remedy: &str) -> String {
        format!(
            "{self} updates the first and the last stage at different times, so they cannot share embeddings: {remedy}"
        )
    }

    /// The number of weight versions that a stage stores beside the newest one.
    ///
    /// With p stages, stage s of *PipeDream* stores p - s - 1, one for each micro-batch in flight but one. With vertical sync
    /// every stage stores p - 1, and one with *PipeDream-2BW*.
    pub fn stashed_versions(self, stages: usize, stage: usize) -> usize {
        match self {
            ScheduleKind::PipeDream => stages - stage - 1,
            ScheduleKind::PipeDreamVerticalSync => stages - 1,
            ScheduleKind::PipeDream2Bw => 1,
            _ => 0,
        }
    }

    /// The weight version that a stage uses for a step's micro-batches, in both passes, where version v has v updates.
    ///
    /// With p stages, stage s uses for step t the version t - (p - 1 - s) with *PipeDream*, t - (p - 1) with vertical sync,
    /// and t - 1 with *PipeDream-2BW*; version 0 in the first steps behind an empty pipeline.
    pub fn weights_version(self, stages: usize, stage: usize, step: usize) -> usize {
        step.saturating_sub(self.stashed_versions(stages, stage))
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = KINDS.iter().find(|row| row.1 == *self);
        f.pad(row.map_or("", |row| row.0))
    }
}

impl FromStr for ScheduleKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let row = KINDS.iter().find(|row| row.0 == name);
        row.map(|row| row.1).ok_or_else(|| {
            let names: Vec<&str> = KINDS.iter().map(|row| row.0).collect();
            let context = format!("'{name}' is none of {}", names.join(", "));
            Error::config("--pipeline-schedule", context)
        })
    }
}

/// Configuration of a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PipelineConfig {
    /// The order of computations.
    pub kind: ScheduleKind,
    /// Number of pipeline ranks, p in the papers.
    pub stages: usize,
    /// Number of micro-batches per step, m.
    pub microbatches: usize,
    /// Number of model chunks per rank, v; 1 unless interleaved.
    pub chunks: usize,
}

/// Maximum number of forwards over all ranks, since a schedule is a list in memory.
const MOST_FORWARDS: usize = 1 << 22;

/// The reason why a combination is rejected, in one line; `None` if it is supported. All such decisions are made
/// here.
///
/// | rejected | reason |
/// |---|---|
/// | no stage, micro-batch or chunk | nothing to do |
/// | `chunks > 1`, not interleaved | other schedules have one chunk per rank |
/// | interleaved, `chunks == 1` | equal to 1F1B |
/// | interleaved, `stages == 1` | no other rank to interleave with |
/// | interleaved, `microbatches` not a multiple of `stages` | its groups have one micro-batch per rank |
/// | PipeDream of any form, `stages == 1` | no other rank to overlap with |
/// | PipeDream, with vertical sync too, `microbatches > 1` | it updates after each micro-batch |
/// | PipeDream-2BW, `microbatches < stages - 1` | more than two versions would be in use |
/// | more than 2^22 forwards over all ranks | the list would not fit into memory |
pub fn unsupported_reason(config: &PipelineConfig) -> Option<String> {
    let PipelineConfig { kind, stages, microbatches, chunks } = *config;
    if let Some(why) = refused_sizes([stages, microbatches, chunks]) {
        return Some(why);
    }
    match (kind == ScheduleKind::Interleaved, chunks) {
        (false, 1) => unsupported_without_flush(config),
        (false, _) => Some(format!(
            "{chunks} chunks need the interleaved schedule; {kind} has one chunk on each rank"
        )),
        (true, 1) => Some("interleaved needs at least 2 chunks; with 1 it is 1f1b".to_string()),
        (true, _) if stages == 1 => {
            Some("interleaved needs at least 2 stages; with 1 use 1f1b".to_string())
        }
        (true, _) if !microbatches.is_multiple_of(stages) => Some(format!(
            "interleaved needs a number of microbatches that is a multiple of the stages, got \
             {microbatches} microbatches and {stages} stages"
        )),
        (true, _) => None,
    }
}

fn unsupported_without_flush(config: &PipelineConfig) -> Option<String> {
    let PipelineConfig { kind, stages, microbatches, .. } = *config;
    match kind {
        _ if kind.flushes() => None,
        _ if stages == 1 => Some(format!("{kind} needs at least 2 stages; with 1 use 1f1b")),
        ScheduleKind::PipeDream2Bw if microbatches < stages - 1 => Some(format!(
            "{kind} needs at least {} microbatches in a step for {stages} stages to have two versions of the weights at \
             most, got {microbatches}",
            stages - 1
        )),
        ScheduleKind::PipeDream2Bw => None,
        _ if microbatches > 1 => Some(format!(
            "{kind} updates the weights after each microbatch, got {microbatches} microbatches in a step: use \
             pipedream-2bw, which accumulates gradients, or 1"
        )),
        _ => None,
    }
}

/// The reason for which no schedule of any kind has these stages, microbatches and chunks; `None` if one may.
pub(in crate::pipeline) fn refused_sizes(
    [stages, microbatches, chunks]: [usize; 3],
) -> Option<String> {
    if stages == 0 || microbatches == 0 || chunks == 0 {
        return Some(format!(
            "stages, microbatches and chunks must be positive, got {stages}, {microbatches} and {chunks}"
        ));
    }
    let forwards = stages.checked_mul(microbatches).and_then(|product| product.checked_mul(chunks));
    forwards.is_none_or(|forwards| forwards > MOST_FORWARDS).then(|| {
        format!(
            "{stages} stages x {microbatches} microbatches x {chunks} chunks are more than {MOST_FORWARDS} forwards"
        )
    })
}
