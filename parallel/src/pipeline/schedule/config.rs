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
}

const KINDS: [(&str, ScheduleKind); 5] = [
    ("naive", ScheduleKind::Naive),
    ("gpipe", ScheduleKind::GPipe),
    ("1f1b", ScheduleKind::OneFOneB),
    ("interleaved", ScheduleKind::Interleaved),
    ("zb-h1", ScheduleKind::ZbH1),
];

impl ScheduleKind {
    /// Every kind.
    pub const ALL: [ScheduleKind; 5] = [KINDS[0].1, KINDS[1].1, KINDS[2].1, KINDS[3].1, KINDS[4].1];

    /// Returns whether the backward is split into two instructions, for the input and for the weights.
    pub fn splits_backward(self) -> bool {
        self == ScheduleKind::ZbH1
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
/// | more than 2^22 forwards over all ranks | the list would not fit into memory |
pub fn unsupported_reason(config: &PipelineConfig) -> Option<String> {
    let PipelineConfig { kind, stages, microbatches, chunks } = *config;
    if let Some(why) = refused_sizes([stages, microbatches, chunks]) {
        return Some(why);
    }
    match (kind == ScheduleKind::Interleaved, chunks) {
        (false, 1) => None,
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
