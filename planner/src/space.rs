//! The layouts among which the search chooses.

use ferrotron_parallel::pipeline::ScheduleKind;
use ferrotron_tensor::{Error, Result};

/// The most samples of a micro-batch, and the most chunks of a rank, that are tried.
const MOST: usize = 64;
const MOST_CHUNKS: usize = 8;
/// The fewest positions of a context-parallel rank that are tried.
const LEAST_POSITIONS: usize = 2048;

/// The recomputation of a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Recomputation {
    /// Nothing is computed again.
    None,
    /// The core of attention is.
    Selective,
    /// Every block is.
    Full,
}

impl Recomputation {
    /// Every kind.
    pub const ALL: [Recomputation; 3] =
        [Recomputation::None, Recomputation::Selective, Recomputation::Full];

    /// The value of `--recompute-granularity`.
    pub fn name(self) -> &'static str {
        ["none", "selective", "full"][self as usize]
    }
}

/// What waits in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Offload {
    /// Nothing.
    None,
    /// The optimizer's states.
    States,
    /// What all blocks keep for backward.
    Activations,
    /// Both.
    All,
}

impl Offload {
    /// Every kind.
    pub const ALL: [Offload; 4] =
        [Offload::None, Offload::States, Offload::Activations, Offload::All];

    /// What a report calls it.
    pub fn name(self) -> &'static str {
        ["none", "states", "activations", "all"][self as usize]
    }

    /// Whether the optimizer's states wait there.
    pub fn has_states(self) -> bool {
        matches!(self, Offload::States | Offload::All)
    }

    /// Whether activations wait there.
    pub fn has_activations(self) -> bool {
        matches!(self, Offload::Activations | Offload::All)
    }

    /// Those that keep one thing more on the GPU.
    pub(crate) fn less(self) -> &'static [Offload] {
        match self {
            Offload::None => &[],
            Offload::States | Offload::Activations => &[Offload::None],
            Offload::All => &[Offload::States, Offload::Activations],
        }
    }
}

/// A layout that the search may choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Layout {
    /// Number of GPUs.
    pub gpus: usize,
    /// Tensor-parallel size.
    pub tensor: usize,
    /// Context-parallel size.
    pub context: usize,
    /// Pipeline-parallel size.
    pub pipeline: usize,
    /// The order of the pipeline's work.
    pub schedule: ScheduleKind,
    /// Chunks of each stage: interleaved with more than one.
    pub chunks: usize,
    /// Samples of a micro-batch.
    pub micro_batch: usize,
    /// Samples of a step.
    pub global_batch: usize,
    /// The activations that are computed again.
    pub recompute: Recomputation,
    /// ZeRO stage, 0 to 3.
    pub zero_stage: u8,
    /// Whether tensor-parallel ranks cut activations between their layers along the sequence.
    pub sequence_parallel: bool,
    /// What waits in host memory.
    pub offload: Offload,
}

impl Layout {
    /// Data-parallel size.
    pub fn data(&self) -> usize {
        self.gpus / (self.tensor * self.context * self.pipeline)
    }

    /// Micro-batches of a step.
    pub fn microbatches(&self) -> usize {
        self.global_batch / (self.data() * self.micro_batch)
    }
}

/// The model and machine for which layouts are enumerated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Space {
    /// Number of GPUs.
    pub gpus: usize,
    /// The most tensor-parallel ranks: GPUs of a node.
    pub gpus_per_node: usize,
    /// Context-parallel sizes.
    pub contexts: Vec<usize>,
    /// Blocks of the model.
    pub layers: usize,
    /// Samples of a step.
    pub global_batch: usize,
    /// What may wait in host memory.
    pub offloads: Vec<Offload>,
}

impl Space {
    /// The context-parallel sizes that a search tries: powers of two that leave each rank enough of `seq_length` positions.
    ///
    /// ```
    /// use ferrotron_planner::Space;
    /// assert_eq!(Space::contexts_of(1024, 8), [1]);
    /// assert_eq!(Space::contexts_of(8192, 8), [1, 2, 4]);
    /// assert_eq!(Space::contexts_of(131_072, 8), [1, 2, 4, 8]);
    /// ```
    pub fn contexts_of(seq_length: usize, gpus: usize) -> Vec<usize> {
        let most = (seq_length / LEAST_POSITIONS).min(gpus).max(1);
        (0..).map(|power| 1 << power).take_while(|size| *size <= most).collect()
    }

    /// All layouts whose sizes divide, in a fixed order. Stages have equally many blocks. The naive schedule and GPipe are
    /// left out: both have at least the bubble of 1F1B, and GPipe keeps more activations (arXiv:2104.04473, section 2.2).
    ///
    /// Errors if there is none.
    pub fn layouts(&self) -> Result<Vec<Layout>> {
        let mut found = Vec::new();
        for tensor in divisors(self.gpus).filter(|size| *size <= self.gpus_per_node) {
            for &context in &self.contexts {
                for pipeline in divisors(self.layers) {
                    let ranks = tensor * context * pipeline;
                    if !self.gpus.is_multiple_of(ranks)
                        || !self.global_batch.is_multiple_of(self.gpus / ranks)
                    {
                        continue;
                    }
                    let chunks = divisors(self.layers / pipeline)
                        .filter(|chunks| *chunks == 1 || (pipeline > 1 && *chunks <= MOST_CHUNKS));
                    for chunks in chunks {
                        self.add(&mut found, [tensor, context, pipeline, chunks]);
                    }
                }
            }
        }
        if found.is_empty() {
            let Space { gpus, contexts, layers, global_batch, .. } = self;
            let message = format!(
                "{global_batch} is no multiple of the data-parallel ranks of any layout of {gpus} GPUs, context-parallel-size \
                 {contexts:?} and {layers} layers: use other --nodes, --nproc or --global-batch-size"
            );
            return Err(Error::config("--global-batch-size", message));
        }
        Ok(found)
    }

    fn add(&self, found: &mut Vec<Layout>, [tensor, context, pipeline, chunks]: [usize; 4]) {
        let data = self.gpus / (tensor * context * pipeline);
        let samples = self.global_batch / data;
        let sizes = (0..).map(|power| 1 << power).take_while(|size| *size <= samples.min(MOST));
        // In a pipeline stages 2 and 3 reduce the gradients of each micro-batch: many times the bytes of stage 1.
        let most_zero = match (data * context, pipeline) {
            (1, _) => 0,
            (_, 1) => 3,
            _ => 1,
        };
        let schedules: &[ScheduleKind] = match (chunks, pipeline) {
            (1, 1) => &[ScheduleKind::OneFOneB],
            (1, _) => &[ScheduleKind::OneFOneB, ScheduleKind::ZbH1],
            _ => &[ScheduleKind::Interleaved],
        };
        let sequences: &[bool] = if tensor > 1 { &[true, false] } else { &[false] };
        for micro_batch in sizes.filter(|size| samples.is_multiple_of(*size)) {
            for zero_stage in 0..=most_zero {
                for &schedule in schedules {
                    for &sequence_parallel in sequences {
                        let kinds = Recomputation::ALL.into_iter();
                        let both = |recompute| {
                            self.offloads.iter().map(move |offload| (recompute, *offload))
                        };
                        found.extend(kinds.flat_map(both).map(|(recompute, offload)| Layout {
                            gpus: self.gpus,
                            tensor,
                            context,
                            pipeline,
                            schedule,
                            chunks,
                            micro_batch,
                            global_batch: self.global_batch,
                            recompute,
                            zero_stage,
                            sequence_parallel,
                            offload,
                        }));
                    }
                }
            }
        }
    }
}

fn divisors(of: usize) -> impl Iterator<Item = usize> {
    (1..=of).filter(move |size| of.is_multiple_of(*size))
}
