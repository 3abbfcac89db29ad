//! Validates combinations of model and layout, before anything starts. All such rejections are made here.
//!
//! | rejected | reason |
//! |---|---|
//! | ranks that are not a multiple of tp x cp x pp | the data axis takes the remaining factor |
//! | heads or key/value groups that tp does not divide | a rank holds whole heads with their keys and values |
//! | a vocabulary or MLP width below tp | a rank would hold nothing |
//! | fewer layers than stages x chunks | a stage would hold nothing |
//! | a sequence that 2 cp does not divide | every rank holds two chunks of it |
//! | sequence parallelism, and local positions that tp does not divide | they are sharded evenly |
//! | `recompute-num-layers` beyond the layers of a stage's chunk, `recompute-modules` without a module | nothing would be recomputed, or not as requested |
//! | `cpu-offloading-num-layers` beyond the layers of a stage's chunk | there are not enough layers to offload |
//! | sparse saved activations without a ReLU, or if every MLP is recomputed | no result of a ReLU is saved |
//! | distributed region inputs without tensor parallelism, with sequence parallelism, or of positions that tp does not divide | nothing to distribute; they are sharded evenly |
//! | a schedule that [`pipeline::unsupported_reason`] rejects | see there |
//! | a schedule without a flush, tied embeddings | stages that share them are updated at different times |
//! | sharded gradients or weights in a pipeline, a schedule that splits the backward or has no flush | it completes the gradients of several micro-batches together; it keeps versions of whole weights |
//! | sharding or local SGD that [`data_parallel::unsupported_reason`] rejects | see there |

use ferrotron_autograd::ZeroEncoding;
use ferrotron_nn::{AttentionConfig, Axis, Sharding};
use ferrotron_parallel::data_parallel;
use ferrotron_parallel::mesh::ParallelDims;
use ferrotron_parallel::pipeline::{self, PipelineConfig};
use ferrotron_parallel::tensor_parallel::{ParallelAttention, SequenceParallel};
use ferrotron_tensor::{Error, Result};

use crate::model::bert::BertConfig;
use crate::model::config::{ActivationKind, GptConfig};
use crate::model::recompute::RegionInputs;
use crate::model::saved_activations::SavedActivations;
use crate::training::trainer::{ModelChunk, ParallelConfig};

/// The sizes of a model on which its layouts depend.
#[derive(Debug, Clone, Copy)]
pub struct ModelSizes {
    /// Number of blocks.
    pub num_layers: usize,
    /// Number of token ids.
    pub vocab_size: usize,
    /// Hidden width of the MLP.
    pub ffn_hidden_size: usize,
    /// The configuration of every block's attention.
    pub attention: AttentionConfig,
    /// The activation function of the MLP.
    pub activation: ActivationKind,
    /// Whether the first and the last pipeline stage share embeddings.
    pub tied_embeddings: TiedEmbeddings,
    /// Number of parameters.
    pub num_parameters: u64,
}

/// Whether a model's head is its token embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TiedEmbeddings {
    /// It has weights of its own.
    No,
    /// It is, and could have weights of its own.
    Yes,
    /// It is in every model of the architecture.
    Always,
}

impl From<&GptConfig> for ModelSizes {
    fn from(config: &GptConfig) -> ModelSizes {
        ModelSizes {
            num_layers: config.num_layers,
            vocab_size: config.vocab_size,
            ffn_hidden_size: config.ffn_hidden_size,
            attention: config.attention(),
            activation: config.activation,
            tied_embeddings: match config.tie_embeddings {
                false => TiedEmbeddings::No,
                true => TiedEmbeddings::Yes,
            },
            num_parameters: config.num_parameters(),
        }
    }
}

impl From<&BertConfig> for ModelSizes {
    fn from(config: &BertConfig) -> ModelSizes {
        ModelSizes {
            num_layers: config.num_layers,
            vocab_size: config.vocab_size,
            ffn_hidden_size: config.ffn_hidden_size,
            attention: config.block().attention,
            activation: config.activation,
            tied_embeddings: TiedEmbeddings::Always,
            num_parameters: config.num_parameters(),
        }
    }
}

/// The model, layout and parallelism of a run.
#[derive(Debug, Clone, Copy)]
pub struct ParallelismCheck<'a> {
    /// Sizes of the model.
    pub model: ModelSizes,
    /// Sizes of the axes.
    pub layout: ParallelDims,
    /// Whether activations are sharded along the sequence.
    pub sequence_parallel: SequenceParallel,
    /// Schedule, sharding and recomputation.
    pub parallel: &'a ParallelConfig,
    /// Tokens per sequence.
    pub seq_length: usize,
    /// Micro-batches of a step; every number that occurs in a run is checked separately.
    pub microbatches: usize,
}

/// Errors, in one line with a remedy, if the combination is rejected.
///
/// ```
/// use ferrotron_models::gpt::GptConfig;
/// use ferrotron_models::support::{ParallelismCheck, check};
/// use ferrotron_models::trainer::ParallelConfig;
/// use ferrotron_parallel::mesh::ParallelDims;
/// use ferrotron_parallel::tensor_parallel::SequenceParallel;
/// let model = GptConfig::gpt2(65, 4, 128, 4, 64);
/// let plan = ParallelismCheck {
///     model: (&model).into(),
///     layout: ParallelDims::new(8, 8, 1, 1)?,
///     sequence_parallel: SequenceParallel::Off,
///     parallel: &ParallelConfig::default(),
///     seq_length: 64,
///     microbatches: 1,
/// };
/// assert!(check(&plan).unwrap_err().to_string().contains("num-attention-heads 4"));
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn check(plan: &ParallelismCheck) -> Result<()> {
    ModelChunk::chunks(
        plan.model.num_layers,
        0,
        plan.layout.size(Axis::Pipeline),
        plan.parallel.chunks,
    )?;
    match unsupported_reason(plan) {
        Some(why) => Err(Error::config("layout", why)),
        None => Ok(()),
    }
}

fn unsupported_reason(plan: &ParallelismCheck) -> Option<String> {
    let ParallelismCheck { model, layout, parallel, seq_length, .. } = *plan;
    let [tp, cp, pp] = [Axis::Tensor, Axis::Context, Axis::Pipeline].map(|axis| layout.size(axis));
    let attention = ParallelAttention::unsupported_reason(&model.attention, tp);
    if attention.is_some() {
        return attention;
    }
    for (name, size) in
        [("vocab-size", model.vocab_size), ("ffn-hidden-size", model.ffn_hidden_size)]
    {
        if size < tp {
            return Some(format!("{name} {size} is less than tensor-model-parallel-size {tp}"));
        }
    }
    if cp > 1 && !seq_length.is_multiple_of(2 * cp) {
        return Some(format!(
            "seq-length {seq_length} is not a multiple of 2 x context-parallel-size {cp}"
        ));
    }
    if plan.sequence_parallel == SequenceParallel::On && !(seq_length / cp).is_multiple_of(tp) {
        return Some(format!(
            "sequence-parallel needs seq-length {seq_length} / context-parallel-size {cp} to be a multiple of \
             tensor-model-parallel-size {tp}"
        ));
    }
    if parallel.recompute.inputs() == RegionInputs::Distributed {
        let positions = seq_length / cp;
        if tp == 1 || plan.sequence_parallel == SequenceParallel::On {
            return Some(format!(
                "distribute-saved-activations needs tensor-model-parallel-size above 1, got {tp}, and no \
                 sequence-parallel, which distributes all of them"
            ));
        }
        if !positions.is_multiple_of(tp) {
            return Some(format!(
                "distribute-saved-activations needs seq-length {seq_length} / context-parallel-size {cp} to be a \
                 multiple of tensor-model-parallel-size {tp}"
            ));
        }
    }
    let blocks = model.num_layers.div_ceil(pp * parallel.chunks);
    let recompute = parallel.recompute.unsupported_reason(blocks);
    if recompute.is_some() {
        return recompute;
    }
    let SavedActivations { offloaded_layers, packing } = parallel.saved_activations;
    if offloaded_layers > blocks {
        return Some(format!(
            "cpu-offloading-num-layers {offloaded_layers} is more than the {blocks} layers of a pipeline stage's chunk"
        ));
    }
    if packing.zeros == ZeroEncoding::Bitmap {
        let (activation, recomputed) =
            (model.activation, parallel.recompute.recompute_count(blocks).mlp);
        if activation != ActivationKind::Relu || recomputed == blocks {
            return Some(format!(
                "saved-activations-encoding sparse needs the result of a ReLU to be kept: activation is {activation:?}, \
                 and {recomputed} of {blocks} layers compute it again"
            ));
        }
    }
    let schedule = PipelineConfig {
        kind: parallel.pipeline_schedule,
        stages: pp,
        microbatches: plan.microbatches,
        chunks: parallel.chunks,
    };
    let remedy = match model.tied_embeddings {
        TiedEmbeddings::No => None,
        TiedEmbeddings::Yes => Some("add --untie-embeddings-and-output-weights"),
        TiedEmbeddings::Always => Some(
            "the head of a BERT is always its token embedding, so use another schedule, as 1f1b",
        ),
    };
    if let Some(remedy) = remedy.filter(|_| !schedule.kind.flushes() && pp > 1) {
        return Some(schedule.kind.refuses_tied_embeddings(remedy));
    }
    let sharding = parallel.data_parallel.sharding;
    if sharding >= Sharding::Gradients
        && pp > 1
        && (schedule.kind.splits_backward() || !schedule.kind.flushes())
    {
        let why = match schedule.kind.flushes() {
            true => "completes the gradients of several micro-batches together",
            false => "keeps several versions of whole weights",
        };
        return Some(format!(
            "ZeRO stage {} reduces the gradients of each micro-batch when they are complete, and {} {why}: use stage 0 or 1, \
             or the schedule 1f1b",
            sharding as usize, schedule.kind
        ));
    }
    pipeline::unsupported_reason(&schedule)
        .or_else(|| data_parallel::unsupported_reason(&parallel.data_parallel, &layout))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::gpt::{Recompute, RecomputeMethod, RecomputeModules};
    use ferrotron_autograd::ActivationCompressionConfig;
    use ferrotron_parallel::data_parallel::DataParallelConfig;
    use ferrotron_parallel::pipeline::ScheduleKind;

    #[test]
    fn every_row_of_the_table_is_one_line_that_names_the_values() {
        let model = GptConfig { num_query_groups: 2, ..GptConfig::gpt2(65, 4, 128, 4, 64) };
        let plain = ParallelConfig::default();
        let interleaved = ParallelConfig {
            pipeline_schedule: ScheduleKind::Interleaved,
            chunks: 2,
            ..ParallelConfig::default()
        };
        let zero = ParallelConfig {
            data_parallel: DataParallelConfig {
                sharding: Sharding::Gradients,
                ..DataParallelConfig::default()
            },
            ..ParallelConfig::default()
        };
        let [split, unflushed] = [ScheduleKind::ZbH1, ScheduleKind::PipeDream2Bw]
            .map(|pipeline_schedule| ParallelConfig { pipeline_schedule, ..zero });
        let untied = GptConfig { tie_embeddings: false, ..model.clone() };
        let recompute = |recompute| ParallelConfig { recompute, ..plain };
        let full = |layers, inputs| {
            recompute(Recompute::Full { method: RecomputeMethod::Uniform, layers, inputs })
        };
        let [none, three] = [0, 3].map(|layers| full(layers, RegionInputs::Whole));
        let distributed = full(1, RegionInputs::Distributed);
        let nothing = recompute(Recompute::Selective(RecomputeModules::NONE));
        let saved = |offloaded_layers, zeros, parallel| ParallelConfig {
            saved_activations: SavedActivations {
                offloaded_layers,
                packing: ActivationCompressionConfig {
                    zeros,
                    ..ActivationCompressionConfig::default()
                },
            },
            ..parallel
        };
        let relu = GptConfig { activation: ActivationKind::Relu, ..model.clone() };
        let offloaded = saved(3, ZeroEncoding::Kept, plain);
        let [sparse, sparse_region] = [plain, full(1, RegionInputs::Whole)]
            .map(|other| saved(0, ZeroEncoding::Bitmap, other));
        let narrow = GptConfig { vocab_size: 1, ..model.clone() };
        let plan = |model: &GptConfig, (tp, cp, pp), parallel, seq_length| ParallelismCheck {
            model: model.into(),
            layout: ParallelDims::new(2 * tp * cp * pp, tp, cp, pp).unwrap(),
            sequence_parallel: SequenceParallel::On,
            parallel,
            seq_length,
            microbatches: 3,
        };
        for (plan, part) in [
            (plan(&model, (8, 1, 1), &plain, 64), "num-attention-heads 4 is not a multiple"),
            (plan(&model, (4, 1, 1), &plain, 64), "num-query-groups 2 is not a multiple"),
            (plan(&narrow, (2, 1, 1), &plain, 64), "vocab-size 1 is less than"),
            (plan(&model, (1, 1, 5), &plain, 64), "num-layers 4 cannot be cut into 5 stages"),
            (plan(&model, (1, 2, 1), &plain, 30), "seq-length 30 is not a multiple of 2 x"),
            (plan(&model, (2, 1, 1), &plain, 15), "sequence-parallel needs seq-length 15"),
            (plan(&model, (1, 1, 2), &interleaved, 64), "3 microbatches and 2 stages"),
            (plan(&model, (1, 1, 1), &none, 64), "recompute-num-layers 0 is not between 1 and"),
            (plan(&model, (1, 1, 2), &three, 64), "recompute-num-layers 3 is not between 1 and"),
            (plan(&model, (1, 1, 1), &nothing, 64), "needs recompute-modules"),
            (plan(&model, (1, 1, 2), &offloaded, 64), "num-layers 3 is more than the 2 layers"),
            (plan(&model, (1, 1, 1), &sparse, 64), "activation is GeluTanh, and 0 of 4"),
            (plan(&relu, (1, 1, 1), &sparse_region, 64), "activation is Relu, and 4 of 4"),
            (plan(&model, (2, 1, 1), &distributed, 64), "no sequence-parallel"),
            (
                ParallelismCheck {
                    sequence_parallel: SequenceParallel::Off,
                    ..plan(&model, (2, 1, 1), &distributed, 15)
                },
                "distribute-saved-activations needs seq-length 15",
            ),
            (plan(&model, (1, 1, 2), &split, 64), "and zb-h1 completes the gradients of several"),
            (plan(&untied, (1, 1, 2), &unflushed, 64), "and pipedream-2bw keeps several versions"),
        ] {
            let error = check(&plan).unwrap_err().to_string();
            assert!(error.contains(part) && !error.contains('\n'), "{error}");
        }
        for good in [
            plan(&model, (2, 2, 4), &plain, 64),
            plan(&model, (1, 1, 1), &zero, 7),
            plan(&model, (1, 1, 2), &zero, 64),
            plan(&model, (1, 1, 1), &three, 64),
            plan(&model, (1, 1, 1), &offloaded, 64),
            plan(&relu, (1, 1, 2), &sparse, 64),
        ] {
            check(&good).unwrap();
        }
    }
}
