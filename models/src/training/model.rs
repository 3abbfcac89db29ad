//! The trait by which the trainer knows a model: how to build a chunk of it, and how a chunk runs a micro-batch.

use ferrotron_autograd::{Offloader, Var};
use ferrotron_nn::{Module, Param, Scope};
use ferrotron_parallel::collective::partition_range;
use ferrotron_parallel::mesh::Mesh;
use ferrotron_tensor::{DType, Device, Error, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use crate::io::checkpoint::Checkpoint;
use crate::io::data::Batch;
use crate::model::recompute::Recompute;
use crate::model::saved_activations::SavedActivations;
use crate::training::microbatch::Microbatch;

/// A model that [`Trainer`](crate::training::trainer::Trainer) trains, saves, resumes and evaluates in any layout.
///
/// ```
/// # extern crate ferrotron_nn as ferrotron;
/// use ferrotron_autograd::Var;
/// use ferrotron_models::data::{Batch, Samples};
/// use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
/// use ferrotron_models::trainer::{
///     LossTerm, Microbatch, Model, ModelChunk, StageOutput, Trainer, TrainerConfig,
/// };
/// use ferrotron_nn::schedule::LrSchedule;
/// use ferrotron_nn::{Bias, Init, Linear, Module, Scope};
/// use ferrotron_parallel::mesh::Mesh;
/// use ferrotron_tensor::{DType, Device, Result};
/// use serde::{Deserialize, Serialize};
///
/// /// y = x w, fitted to the squares of the errors.
/// #[derive(Module)]
/// struct Line(Linear);
///
/// #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
/// struct LineConfig {
///     inputs: usize,
/// }
///
/// impl Model for Line {
///     const ARCHITECTURE: &str = "line";
///     type Config = LineConfig;
///
///     fn new_chunk(scope: &Scope, _: &Mesh, config: &LineConfig, _: &ModelChunk) -> Result<Line> {
///         Ok(Line(Linear::new(&scope.child("w"), config.inputs, 1, Bias::No, Init::Zeros)?))
///     }
///
///     fn loss_terms(_: &LineConfig, batch: &Batch) -> Result<Vec<LossTerm>> {
///         Ok(vec![LossTerm::mean("squares", batch.micro_batch as f64)])
///     }
///
///     fn forward(&self, microbatch: &Microbatch, _: Option<Var>) -> Result<StageOutput> {
///         let x = Var::constant(microbatch.get("x")?.clone()); // (B, inputs)
///         let y = Var::constant(microbatch.get("y")?.clone()); // (B, 1)
///         let squares = self.0.forward(&x)?.sub(&y)?.square()?.sum_all()?;
///         Ok(StageOutput::loss("squares", squares))
///     }
/// }
///
/// struct Points;
///
/// impl Samples for Points {
///     fn batch(&self, first_sample: u64, n: usize) -> Result<Batch> {
///         let x: Vec<f32> = (0..n as u64).map(|i| (first_sample + i) as f32 % 3.0).collect();
///         let y = x.iter().map(|x| 2.0 * x).collect();
///         Batch::new(first_sample, n, 1).with("x", x, &[n, 1])?.with("y", y, &[n, 1])
///     }
///
///     fn seq_length(&self) -> usize {
///         1
///     }
/// }
///
/// let sizes = BatchSizeConfig { micro_batch_size: 3, ..BatchSizeConfig::default() };
/// let config = TrainerConfig::new(1, LrSchedule::constant(0.1)?, BatchSize::new(sizes)?);
/// let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1);
/// let mut trainer = Trainer::<Line>::new(&scope, &LineConfig { inputs: 1 }, config)?;
/// let first = trainer.step(&Points)?.loss;
/// for _ in 0..20 {
///     trainer.step(&Points)?;
/// }
/// assert!(trainer.step(&Points)?.loss < first / 10.0);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub trait Model: Module + Sized + Send + Sync + 'static {
    /// Name of the architecture in checkpoints and on the command line, in lower case.
    const ARCHITECTURE: &'static str;

    /// Fields of the configuration that a resumed run may change: they are in no weight, as dropout.
    const TRAINING_FIELDS: &'static [&'static str] = &[];

    /// Fields of the configuration that decide which heads there are. A model may begin with the weights of one that differs
    /// in these, by [`Trainer::load_pretrained`](crate::trainer::Trainer::load_pretrained).
    const HEAD_FIELDS: &'static [&'static str] = &[];

    /// Beginnings of the names of parameters that belong to heads.
    const HEAD_PARAMETERS: &'static [&'static str] = &[];

    /// The configuration; a checkpoint keeps it.
    type Config: Clone + Debug + PartialEq + Serialize + DeserializeOwned + Send + Sync;

    /// Describes a chunk of the model, sharded over `mesh`.
    fn new_chunk(
        scope: &Scope,
        mesh: &Mesh,
        config: &Self::Config,
        chunk: &ModelChunk,
    ) -> Result<Self>;

    /// The terms of the loss, with the number of elements over which `batch` sums each.
    ///
    /// The loss of a step is the sum over all terms of weight x sum / number, with sums and numbers of the global
    /// batch. The names and weights must be the same for all batches. A term may have no elements in a global batch, if its
    /// sum is 0 then and another term has some. A step in which no term has any is a bad step; a term without elements that
    /// has a sum is an error, on a GPU when the reports of steps are read.
    fn loss_terms(config: &Self::Config, batch: &Batch) -> Result<Vec<LossTerm>>;

    /// Runs this chunk. `input` is the previous chunk's activation; the first chunk has none and reads the batch.
    ///
    /// A chunk but the last returns an activation of [`Model::activation_dims`] in the dtype of the scope, the last one none.
    /// Sums of losses are over this rank's samples and positions; ranks along the tensor axis return the same ones. A step
    /// refuses another activation, a loss that is no scalar or no term, and a term with elements that no rank returns.
    fn forward(&self, microbatch: &Microbatch, input: Option<Var>) -> Result<StageOutput>;

    /// Number of blocks, which pipeline stages share; 1 for a model that has no stages.
    fn num_blocks(_config: &Self::Config) -> usize {
        1
    }

    /// Dims of this rank's activation between two chunks. Only models of several blocks need it.
    fn activation_dims(&self, _microbatch: &Microbatch) -> Vec<usize> {
        Vec::new()
    }

    /// Takes the options by which activations are recomputed, compressed or offloaded.
    ///
    /// # Errors
    /// By default, if there are any: models that support them override this.
    fn with_activation_options(self, options: &ActivationOptions) -> Result<Self> {
        if options.recompute != Recompute::None {
            return Err(unsupported::<Self>("recompute"));
        }
        if options.saved_activations != SavedActivations::default() {
            return Err(unsupported::<Self>("saved activations in another form"));
        }
        Ok(self)
    }

    /// The regions that backward recomputes, as the parameters that each reads, in order.
    fn recomputed(&self) -> Vec<Vec<Param>> {
        Vec::new()
    }

    /// Floating-point operations of a training step over `tokens` positions in samples of `seq_length`; 0 if unknown.
    fn flops(_config: &Self::Config, _tokens: u64, _seq_length: usize) -> f64 {
        0.0
    }

    /// The configuration of the model in `checkpoint`.
    ///
    /// # Errors
    /// A model of another architecture; a configuration that cannot be read.
    fn config_from(checkpoint: &Checkpoint) -> Result<Self::Config> {
        checkpoint.config_as(Self::ARCHITECTURE)
    }

    /// Errors, naming both values of each field that differs, unless a model of `config` computes with the weights of
    /// `checkpoint` what the saved one did. [`Model::TRAINING_FIELDS`] may differ.
    fn check_checkpoint(checkpoint: &Checkpoint, config: &Self::Config) -> Result<()> {
        checkpoint.check_config(Self::ARCHITECTURE, config, Self::TRAINING_FIELDS)
    }

    /// A batch as the data makes them, of any values: a memory estimate takes a step on it.
    ///
    /// # Errors
    /// By default: memory can be estimated only for models that override this.
    fn example_batch(_: &Self::Config, _samples: usize, _seq_length: usize) -> Result<Batch> {
        Err(unsupported::<Self>("a memory estimate"))
    }
}

fn unsupported<M: Model>(option: &str) -> Error {
    Error::config("model", format!("{} does not support {option}", M::ARCHITECTURE))
}

/// The treatment of a chunk's saved activations.
#[derive(Debug, Clone, Default)]
pub struct ActivationOptions {
    /// Activation recomputation.
    pub recompute: Recompute,
    /// Storage of saved activations.
    pub saved_activations: SavedActivations,
    /// Moves offloaded activations to host memory, if there are any.
    pub offloader: Option<Arc<Offloader>>,
}

/// A term of the loss.
#[derive(Debug, Clone, PartialEq)]
pub struct LossTerm {
    /// Its name in reports and metrics.
    pub name: &'static str,
    /// Its factor in the loss.
    pub weight: f64,
    /// The number of elements that are summed, such as valid tokens.
    pub count: f64,
}

impl LossTerm {
    /// A mean over `count` elements, with weight 1.
    pub fn mean(name: &'static str, count: f64) -> LossTerm {
        LossTerm { name, weight: 1.0, count }
    }

    /// The same term with another weight.
    #[must_use]
    pub fn weighted(self, weight: f64) -> LossTerm {
        LossTerm { weight, ..self }
    }
}

/// The result of a chunk for a micro-batch.
#[derive(Debug)]
pub struct StageOutput {
    /// The activation for the next chunk; the last chunk has none.
    pub activation: Option<Var>,
    /// Sums of loss terms, scalars, by name.
    pub losses: Vec<(&'static str, Var)>,
}

impl StageOutput {
    /// An activation for the next chunk.
    pub fn activation(activation: Var) -> StageOutput {
        StageOutput { activation: Some(activation), losses: Vec::new() }
    }

    /// The sum of a loss term; the last chunk's result.
    pub fn loss(name: &'static str, sum: Var) -> StageOutput {
        StageOutput { activation: None, losses: vec![(name, sum)] }
    }

    /// Adds the sum of another loss term. Chunks before the last may have some, too: a router's, for example.
    #[must_use]
    pub fn with_loss(mut self, name: &'static str, sum: Var) -> StageOutput {
        self.losses.push((name, sum));
        self
    }
}

/// A chunk of a model: a range of blocks, optionally with the embeddings or the head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelChunk {
    /// The blocks.
    pub blocks: Range<usize>,
    /// Whether the chunk includes the embeddings.
    pub first: bool,
    /// Whether the chunk includes the head.
    pub last: bool,
}

impl ModelChunk {
    /// The whole model of `blocks` blocks.
    pub fn whole(blocks: usize) -> ModelChunk {
        ModelChunk { blocks: 0..blocks, first: true, last: true }
    }

    /// The blocks of this chunk, each made in the scope `blocks.I` with its number I in the whole model.
    pub fn make_blocks<T>(
        &self,
        scope: &Scope,
        make: impl Fn(&Scope) -> Result<T>,
    ) -> Result<Vec<T>> {
        self.blocks.clone().map(|block| make(&scope.child(&format!("blocks.{block}")))).collect()
    }

    /// The embeddings, which only the first chunk has.
    pub fn make_if_first<T>(&self, make: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
        self.first.then(make).transpose()
    }

    /// The head, which only the last chunk has.
    pub fn make_if_last<T>(&self, make: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
        self.last.then(make).transpose()
    }

    /// The model chunks of pipeline rank `rank` of `ranks`: chunk i is virtual stage `i * ranks + rank`. Blocks are
    /// distributed over the stages, whose numbers of blocks differ by at most one.
    ///
    /// Errors if there are fewer blocks than stages, or no such rank, or no chunk.
    pub fn chunks(
        blocks: usize,
        rank: usize,
        ranks: usize,
        chunks: usize,
    ) -> Result<Vec<ModelChunk>> {
        let stages = ranks * chunks;
        if stages == 0 || rank >= ranks {
            let message = format!("there is no rank {rank} of {ranks} with {chunks} chunks each");
            return Err(Error::config("layout", message));
        }
        if blocks < stages {
            let message = format!(
                "num-layers {blocks} cannot be cut into {stages} stages: pipeline-model-parallel-size {ranks} x \
                 {chunks} chunks"
            );
            return Err(Error::config("layout", message));
        }
        let part = |stage: usize| ModelChunk {
            blocks: partition_range(blocks, stages, stage),
            first: stage == 0,
            last: stage + 1 == stages,
        };
        Ok((0..chunks).map(|chunk| part(chunk * ranks + rank)).collect())
    }
}

/// The names of all parameters of a whole model of `dtype`, whatever part of it a rank holds.
pub fn parameter_names<M: Model>(model: &M::Config, dtype: DType) -> Result<Vec<String>> {
    let scope = Scope::new(&Device::fake(1)?, dtype, 0);
    let chunk = ModelChunk::whole(M::num_blocks(model));
    let params = M::new_chunk(&scope, &Mesh::single(), model, &chunk)?.params();
    Ok(params.iter().map(|param| param.name().to_string()).collect())
}
