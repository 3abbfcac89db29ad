//! Parameters. Each is a leaf with its shard of the global tensor, the axes along which it is replicated, those along
//! which its gradient is partial, and its weight decay. Initialisation, gradient reductions, norms, checkpoints and
//! the optimizer depend on these properties only.

use ferrotron_autograd::{Leaf, Var};
use ferrotron_tensor::{DType, Error, Result, ShardSpec};
use std::sync::Arc;

use crate::params::param_patterns::ParamPatterns;
use crate::params::registry::Entry;
use crate::{AxisSet, ParamOptions, SummaryRow};

/// Whether weight decay applies to a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightDecay {
    /// Decays: matrices and embeddings.
    On,
    /// Does not decay: biases and norms.
    Off,
}

/// A trainable tensor of a model. Cloning returns another handle of the same parameter.
#[derive(Debug, Clone)]
pub struct Param {
    leaf: Leaf,
    facts: Facts,
    entry: Arc<Entry>,
}

/// The properties of a parameter besides its value.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Facts {
    pub shard_spec: ShardSpec,
    pub replicated: AxisSet,
    pub grad_partial: AxisSet,
    pub grad_whole: AxisSet,
    pub decay: WeightDecay,
    pub blocks: Vec<usize>,
    /// Whether it is a table of vectors by token: an embedding, or an output head.
    pub embedding: bool,
    pub options: ParamOptions,
    /// The patterns by which its scope has changed options.
    pub patterns: Vec<Arc<ParamPatterns>>,
    /// The dtype of activations: that of the scope.
    pub compute_dtype: DType,
    /// The seed of the scope.
    pub seed: u64,
}

impl Param {
    /// A parameter of a scope, with its entry in the registry.
    pub(super) fn new(leaf: Leaf, facts: Facts, entry: Arc<Entry>) -> Param {
        Param { leaf, facts, entry }
    }

    /// The trainable value and its gradient.
    pub fn leaf(&self) -> &Leaf {
        &self.leaf
    }

    /// The value as a variable, in the dtype of the parameter.
    pub fn var(&self) -> Result<Var> {
        self.leaf.var()
    }

    /// The value as a variable for activations of `dtype`: a parameter that was kept in f32
    /// ([`ParamOptions::dtype`]) is cast to 16 bits; any other is left as it is. Its gradient is never rounded: see
    /// [`Leaf::var_as`].
    pub fn var_as(&self, dtype: DType) -> Result<Var> {
        match self.leaf.dtype() == dtype.accumulator() {
            true => self.leaf.var_as(dtype),
            false => self.leaf.var(),
        }
    }

    /// The dtype of activations: that of the scope, which the parameter has too unless
    /// [`ParamOptions::dtype`] gives it another.
    pub fn compute_dtype(&self) -> DType {
        self.facts.compute_dtype
    }

    /// The global name, such as `blocks.3.attn.qkv.weight`.
    pub fn name(&self) -> &str {
        self.leaf.name()
    }

    /// The local shard of the global tensor.
    pub fn shard_spec(&self) -> &ShardSpec {
        &self.facts.shard_spec
    }

    /// The axes along which all ranks hold the same shard. The shard counts once in a norm, and only the first rank
    /// along each of these axes writes it to a checkpoint.
    pub fn replicated(&self) -> AxisSet {
        self.facts.replicated
    }

    /// The axes along which gradients are partial: the gradient is the sum over the ranks.
    pub fn grad_partial(&self) -> AxisSet {
        self.facts.grad_partial
    }

    /// The axes along which every rank was declared to compute the whole gradient:
    /// [`Scope::with_whole_gradients`](crate::Scope::with_whole_gradients).
    pub fn grad_whole(&self) -> AxisSet {
        self.facts.grad_whole
    }

    /// Returns whether it is trained: true unless [`Param::set_trainable`] or [`Module::freeze`](crate::Module::freeze) changed it.
    pub fn is_trainable(&self) -> bool {
        self.leaf.is_trainable()
    }

    /// Returns whether a [`ParamAndGradBuffer`](crate::ParamAndGradBuffer) holds it or treats it as frozen.
    pub fn is_in_buffers(&self) -> bool {
        self.entry.is_in_buffers()
    }

    /// Errors if an optimizer has it: a [`ParamAndGradBuffer`](crate::ParamAndGradBuffer), or an owner on several ranks, also
    /// one that is gone with shards of its value.
    pub fn check_unowned(&self) -> Result<()> {
        self.leaf.check_unowned()?;
        if !self.is_in_buffers() {
            return Ok(());
        }
        let message = format!(
            "'{}' is laid out for another optimizer, which would no longer train it: drop its ParamAndGradBuffer first",
            self.name()
        );
        Err(Error::config("parameters", message))
    }

    /// Freezes the parameter, or makes it trainable again; for all its handles, such as tied weights. A frozen
    /// parameter has no gradient, no optimizer state and no master weight, and ranks do not communicate about it. Each
    /// rank holds its whole shard, also with ZeRO stage 3. Checkpoints keep its value.
    ///
    /// Errors if it changes a parameter whose [`ParamAndGradBuffer`](crate::ParamAndGradBuffer) exists: buffers and
    /// optimizer state were laid out without it, or with it.
    pub fn set_trainable(&self, trainable: bool) -> Result<()> {
        if trainable != self.is_trainable() && self.is_in_buffers() {
            let message = format!(
                "'{}' is laid out for an optimizer already: freeze or thaw it before its ParamAndGradBuffer, \
                 DataParallel or Trainer is made, or drop that one first (`DataParallel::unshard` keeps sharded weights)",
                self.name()
            );
            return Err(Error::config("set_trainable", message));
        }
        self.leaf.set_trainable(trainable);
        Ok(())
    }

    /// Whether weight decay applies.
    pub fn decay(&self) -> WeightDecay {
        self.facts.decay
    }

    /// The seed of its initial value: that of the scope.
    pub fn seed(&self) -> u64 {
        self.facts.seed
    }

    /// The options of its updates: [`Scope::with_options`](crate::Scope::with_options).
    pub fn options(&self) -> &ParamOptions {
        &self.facts.options
    }

    /// The patterns by which its scope has changed options, also if they do not match it.
    pub(crate) fn patterns(&self) -> &[Arc<ParamPatterns>] {
        &self.facts.patterns
    }

    /// The lengths, along dim 0, of the tensors packed in this parameter: of queries, keys and values, or of gate and
    /// up. Empty for a single tensor. Computations over whole tensors, such as means, treat each of these separately.
    pub(crate) fn blocks(&self) -> &[usize] {
        &self.facts.blocks
    }

    /// Returns whether it is a matrix from features to features: of two dims, with weight decay, and not declared an
    /// [embedding](Param::as_embedding).
    pub(crate) fn is_hidden_matrix(&self) -> bool {
        let dims = self.facts.shard_spec.global_dims().len();
        dims == 2 && self.facts.decay == WeightDecay::On && !self.facts.embedding
    }

    /// Declares a table of one vector per token: an embedding or an output head, which Muon leaves to AdamW. An
    /// [`Embedding`](crate::Embedding) declares its own, and [`Linear::as_head`](crate::Linear::as_head) that of a head.
    #[must_use]
    pub fn as_embedding(mut self) -> Param {
        self.facts.embedding = true;
        self
    }

    /// The entry in the registry of the scope that made it.
    pub(crate) fn entry(&self) -> &Arc<Entry> {
        &self.entry
    }

    /// The row of this parameter in a summary.
    pub(super) fn summary_row(&self) -> SummaryRow {
        let shape = self.facts.shard_spec.global_dims().to_vec();
        let (numel, dtype) = (shape.iter().product(), self.leaf.dtype());
        SummaryRow {
            name: self.name().to_string(),
            dtype: Some(dtype),
            shape,
            local_shape: self.leaf.dims().to_vec(),
            params: None,
            numel,
            trainable: if self.is_trainable() { numel } else { 0 },
            bytes: self.leaf.numel() * dtype.size(),
        }
    }

    /// Declares that tensors of these lengths along dim 0 are packed in this parameter, as queries, keys and values are in
    /// one matrix. Rules that update whole tensors (Muon, Adafactor) update each by itself, and a layout that shards dim 0
    /// shards each.
    ///
    /// Errors unless they add up to its global dim 0.
    ///
    /// ```
    /// use ferrotron_nn::{Init, Scope, WeightDecay};
    /// use ferrotron_tensor::{DType, Device};
    /// let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1234);
    /// let weight = || scope.param("gate_up.weight", &[8, 3], Init::XavierNormal, WeightDecay::On);
    /// assert!(weight().packed(&[4, 4]).is_ok()); // gate and up
    /// let error = weight().packed(&[4, 5]).unwrap_err().to_string();
    /// assert_eq!(error, "parameters: 'gate_up.weight' of [8, 3] cannot consist of blocks of [4, 5]");
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn packed(mut self, blocks: &[usize]) -> Result<Param> {
        let dims = self.facts.shard_spec.global_dims();
        if dims.first() != Some(&blocks.iter().sum()) {
            let message =
                format!("'{}' of {dims:?} cannot consist of blocks of {blocks:?}", self.name());
            return Err(Error::config("parameters", message));
        }
        self.facts.blocks = if blocks.len() > 1 { blocks.to_vec() } else { Vec::new() };
        Ok(self)
    }
}
