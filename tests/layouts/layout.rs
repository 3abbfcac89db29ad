//! The axes of the grid, and a covering array over them: every pair of values that is not refused occurs.

use ferrotron::models::gpt::{
    Recompute, RecomputeMethod, RecomputeModules, RecomputedAttention, RecomputedMlp, RegionInputs,
    SavedActivations,
};
use ferrotron::models::support::{ModelSizes, ParallelismCheck, check};
use ferrotron::models::trainer::ParallelConfig;
use ferrotron::nn::Sharding;
use ferrotron::parallel::data_parallel::DataParallelConfig;
use ferrotron::parallel::mesh;
use ferrotron::parallel::pipeline::ScheduleKind;
use ferrotron::parallel::tensor_parallel::SequenceParallel;
use ferrotron::tensor::MemoryKind;
use std::collections::BTreeSet;
use std::fmt;

pub const SEQ_LENGTH: usize = 16;
/// Divisible by 2 and 3, so that interleaving goes with that many stages.
pub const GLOBAL_BATCH: usize = 12;
const MOST_RANKS: usize = 8;

/// Nothing, each part of a block, and regions of one block, of several, and of some.
const RECOMPUTE: [Recompute; 7] = [
    Recompute::None,
    Recompute::SELECTIVE,
    Recompute::Selective(RecomputeModules {
        attention: RecomputedAttention::Layer,
        mlp: RecomputedMlp::Layer,
    }),
    Recompute::FULL,
    full(RecomputeMethod::Uniform, 2, RegionInputs::Whole),
    full(RecomputeMethod::Block, 1, RegionInputs::Whole),
    full(RecomputeMethod::Uniform, 1, RegionInputs::Distributed),
];

const fn full(method: RecomputeMethod, layers: usize, inputs: RegionInputs) -> Recompute {
    Recompute::Full { method, layers, inputs }
}

/// Values of the axes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    pub tp: usize,
    pub cp: usize,
    pub dp: usize,
    pub pp: usize,
    pub sp: bool,
    pub schedule: ScheduleKind,
    pub chunks: usize,
    pub micro: usize,
    pub sharding: Sharding,
    pub recompute: Recompute,
    /// Whether the optimizer's state and a block's activations wait in host memory.
    pub offload: bool,
}

impl Layout {
    pub const SERIAL: Layout = Layout {
        tp: 1,
        cp: 1,
        dp: 1,
        pp: 1,
        sp: false,
        schedule: ScheduleKind::OneFOneB,
        chunks: 1,
        micro: GLOBAL_BATCH,
        sharding: Sharding::None,
        recompute: Recompute::None,
        offload: false,
    };

    pub fn ranks(&self) -> usize {
        self.tp * self.cp * self.dp * self.pp
    }

    pub fn mesh(&self) -> mesh::ParallelDims {
        mesh::ParallelDims::new(self.ranks(), self.tp, self.cp, self.pp).unwrap()
    }

    pub fn sequence(&self) -> SequenceParallel {
        if self.sp { SequenceParallel::On } else { SequenceParallel::Off }
    }

    pub fn parallel(&self) -> ParallelConfig {
        ParallelConfig {
            pipeline_schedule: self.schedule,
            drain_interval: 1,
            chunks: self.chunks,
            data_parallel: DataParallelConfig {
                sharding: self.sharding,
                // Several buckets, which no parameter fills exactly.
                bucket_numel: Some(700),
                synchronize_every: 1,
                ..DataParallelConfig::default()
            },
            recompute: self.recompute,
            saved_activations: SavedActivations {
                offloaded_layers: usize::from(self.offload),
                ..SavedActivations::default()
            },
            optimizer_states: match self.offload {
                true => MemoryKind::Host,
                false => MemoryKind::Device,
            },
        }
    }

    /// Whether this machine can run it and nothing refuses it.
    pub fn allowed(&self, model: impl Into<ModelSizes>) -> bool {
        let samples = self.dp * self.micro;
        // A value without effect would count as covered.
        let idle = (self.sp && self.tp == 1)
            || (self.sharding > Sharding::None && self.dp * self.cp == 1)
            || (self.schedule != ScheduleKind::OneFOneB && self.pp == 1);
        !idle
            && self.ranks() <= MOST_RANKS
            && GLOBAL_BATCH.is_multiple_of(samples)
            && check(&ParallelismCheck {
                model: model.into(),
                layout: self.mesh(),
                sequence_parallel: self.sequence(),
                parallel: &self.parallel(),
                seq_length: SEQ_LENGTH,
                microbatches: GLOBAL_BATCH / samples,
            })
            .is_ok()
    }

    /// The value of each axis, as a number.
    fn values(&self) -> [usize; 11] {
        let schedule =
            ScheduleKind::FLUSHED.iter().position(|&kind| kind == self.schedule).unwrap();
        let recompute = RECOMPUTE.iter().position(|&value| value == self.recompute).unwrap();
        [
            self.tp,
            self.cp,
            self.dp,
            self.pp,
            usize::from(self.sp),
            schedule,
            self.chunks,
            self.micro,
            self.sharding as usize,
            recompute,
            usize::from(self.offload),
        ]
    }

    fn pairs(&self) -> impl Iterator<Item = (usize, usize, usize, usize)> {
        let values = self.values();
        (0..values.len()).flat_map(move |a| (0..a).map(move |b| (a, values[a], b, values[b])))
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "tp {}{} cp {} dp {} pp {} {} x {} micro {} zero {} recompute {:?}{}",
            self.tp,
            if self.sp { "+sp" } else { "" },
            self.cp,
            self.dp,
            self.pp,
            self.schedule,
            self.chunks,
            self.micro,
            self.sharding as usize,
            self.recompute,
            if self.offload { " offload" } else { "" }
        )
    }
}

/// Every layout that `model` allows.
pub fn all(model: impl Into<ModelSizes>) -> Vec<Layout> {
    let model = model.into();
    let mut found = Vec::new();
    for tp in [1, 2, 4] {
        for cp in [1, 2, 4] {
            for dp in [1, 2, 3, 4] {
                for pp in [1, 2, 3, 4] {
                    for sp in [false, true] {
                        for schedule in ScheduleKind::FLUSHED {
                            for chunks in [1, 2] {
                                for micro in [1, 2, 3] {
                                    for sharding in Sharding::ALL {
                                        for recompute in RECOMPUTE {
                                            found.extend([false, true].map(|offload| Layout {
                                                tp,
                                                cp,
                                                dp,
                                                pp,
                                                sp,
                                                schedule,
                                                chunks,
                                                micro,
                                                sharding,
                                                recompute,
                                                offload,
                                            }));
                                        }
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    found.retain(|layout| layout.allowed(model));
    found
}

/// A choice of the layouts in which every pair of values that occurs at all occurs: greedily the one that
/// adds most.
pub fn covering(layouts: &[Layout]) -> Vec<Layout> {
    let mut open: BTreeSet<_> = layouts.iter().flat_map(Layout::pairs).collect();
    let mut chosen = Vec::new();
    while !open.is_empty() {
        let adds = |layout: &&Layout| layout.pairs().filter(|pair| open.contains(pair)).count();
        let best = *layouts.iter().max_by_key(adds).unwrap();
        for pair in best.pairs() {
            open.remove(&pair);
        }
        chosen.push(best);
    }
    chosen
}
