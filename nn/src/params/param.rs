//! Parameters. Each is a leaf with its shard of the global tensor, the axes along which it is replicated, those along
//! which its gradient is partial, and its weight decay. Initialisation, gradient reductions, norms, checkpoints and
//! the optimizer depend on these properties only.

use ferrotron_autograd::{Leaf, Var};
use ferrotron_tensor::{At, DType, Device, Error, RandomKey, Result, ShardSpec};
use std::sync::Arc;

use crate::layers::rotary_tables::RotaryTables;
use crate::params::options::{OptionsByName, ParamOptions};
use crate::params::random_site::RandomSite;
use crate::params::registry::{Entry, Registry, roots};
use crate::{Axis, AxisSet, Init, ModuleSummary, SummaryRow};

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
struct Facts {
    shard_spec: ShardSpec,
    replicated: AxisSet,
    grad_partial: AxisSet,
    grad_whole: AxisSet,
    decay: WeightDecay,
    blocks: Vec<usize>,
    /// Whether it is a table of vectors by token: an embedding, or an output head.
    embedding: bool,
    options: ParamOptions,
}

impl Param {
    /// The trainable value and its gradient.
    pub fn leaf(&self) -> &Leaf {
        &self.leaf
    }

    /// The value as a variable.
    pub fn var(&self) -> Result<Var> {
        self.leaf.var()
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
    /// [`Scope::with_whole_gradients`].
    pub fn grad_whole(&self) -> AxisSet {
        self.facts.grad_whole
    }

    /// Returns whether it is trained: true unless [`Param::set_trainable`] or [`Module::freeze`] changed it.
    pub fn is_trainable(&self) -> bool {
        self.leaf.is_trainable()
    }

    /// Returns whether a [`ParamAndGradBuffer`](crate::ParamAndGradBuffer) holds it or treats it as frozen.
    pub fn is_in_buffers(&self) -> bool {
        self.entry.is_in_buffers()
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
                 DataParallel or Trainer is made, or drop that one first",
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

    /// The options of its updates: [`Scope::with_options`].
    pub fn options(&self) -> &ParamOptions {
        &self.facts.options
    }

    /// The lengths, along dim 0, of the tensors packed in this parameter: of queries, keys and values, or of gate and
    /// up. Empty for a single tensor. Computations over whole tensors, such as means, treat each of these separately.
    pub fn blocks(&self) -> &[usize] {
        &self.facts.blocks
    }

    /// Returns whether it is a matrix from features to features: of two dims, with weight decay, and not declared an
    /// [embedding](Param::as_embedding).
    pub fn is_hidden_matrix(&self) -> bool {
        let dims = self.facts.shard_spec.global_dims().len();
        dims == 2 && self.facts.decay == WeightDecay::On && !self.facts.embedding
    }

    /// Declares a table of one vector per token: an embedding or an output head, which Muon leaves to AdamW. An
    /// [`Embedding`](crate::Embedding) declares its own.
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
    fn summary_row(&self) -> SummaryRow {
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

    /// Declares that tensors of these lengths along dim 0 are packed in this parameter.
    ///
    /// Errors unless they add up to its global dim 0.
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

/// A component with parameters. `#[derive(Module)]` implements it, as described in the documentation of
/// [the macro](derive@crate::Module).
///
/// ```
/// # extern crate ferrotron_nn as ferrotron;
/// use ferrotron_nn::{Bias, Init, Linear, Module, RmsNorm, Scope};
/// use ferrotron_tensor::{DType, Device};
///
/// #[derive(Module)]
/// struct Head {
///     width: usize,
///     norm: RmsNorm,
///     proj: Linear,
/// }
///
/// let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1234);
/// let head = Head {
///     width: 3,
///     norm: RmsNorm::new(&scope.child("norm"), 3, 1e-5),
///     proj: Linear::new(&scope.child("proj"), 3, 5, Bias::No, Init::XavierNormal)?,
/// };
/// let names: Vec<String> = head.params().iter().map(|param| param.name().to_string()).collect();
/// assert_eq!(names, ["norm.weight", "proj.weight"]);
/// # assert_eq!(head.width, 3);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub trait Module {
    /// Calls `f` with every parameter in the order of the forward pass, once per use. A token embedding that is also
    /// the head is visited twice.
    fn visit(&self, f: &mut dyn FnMut(&Param));

    /// All parameters, each once.
    fn params(&self) -> Vec<Param> {
        let mut params: Vec<Param> = Vec::new();
        self.visit(&mut |param| {
            if !params.iter().any(|known| known.leaf == param.leaf) {
                params.push(param.clone());
            }
        });
        params
    }

    /// Describes all parameters: a table of names, shapes and totals.
    fn summary(&self) -> ModuleSummary {
        ModuleSummary { rows: self.params().iter().map(Param::summary_row).collect() }
    }

    /// Freezes the parameters whose name `filter` accepts, and returns their number: see [`Param::set_trainable`].
    ///
    /// ```
    /// use ferrotron_nn::{Bias, Init, Linear, Module, Scope};
    /// use ferrotron_tensor::{DType, Device};
    /// let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1234);
    /// let layer = |name| Linear::new(&scope.child(name), 4, 4, Bias::Yes, Init::XavierNormal);
    /// let model = [layer("encoder")?, layer("head")?];
    /// assert_eq!(model.freeze(|name| !name.starts_with("head."))?, 2);
    /// assert!(!model[0].weight().is_trainable() && model[1].weight().is_trainable());
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    ///
    /// Errors as [`Param::set_trainable`]; parameters before the offending one are then frozen.
    fn freeze(&self, filter: impl Fn(&str) -> bool) -> Result<usize>
    where
        Self: Sized,
    {
        let params = self.params();
        let chosen: Vec<&Param> = params.iter().filter(|param| filter(param.name())).collect();
        chosen.iter().try_for_each(|param| param.set_trainable(false))?;
        Ok(chosen.len())
    }
}

/// The context in which a module is built: path in the model, device, dtype, seed, and the replicated and
/// gradient-partial axes of its parameters.
///
/// ```
/// use ferrotron_nn::{WeightDecay, Init, Scope};
/// use ferrotron_tensor::{DType, Device};
/// let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1234);
/// let weight = scope.child("blocks.0").param("weight", &[4, 2], Init::Normal { std: 0.02 }, WeightDecay::On);
/// assert_eq!(weight.name(), "blocks.0.weight");
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Scope {
    path: String,
    device: Device,
    dtype: DType,
    seed: u64,
    replicated: AxisSet,
    grad_partial: AxisSet,
    grad_whole: AxisSet,
    options: OptionsByName,
    registry: Registry,
    rotary_tables: RotaryTables,
}

impl Scope {
    /// The root scope of a model. Ranks with other samples or positions hold the same parameters, and their gradients
    /// are partial.
    pub fn new(device: &Device, dtype: DType, seed: u64) -> Scope {
        let batch = AxisSet::from([Axis::Context, Axis::Data]);
        Scope {
            path: String::new(),
            device: device.clone(),
            dtype,
            seed,
            replicated: batch.with(Axis::Tensor),
            grad_partial: batch,
            grad_whole: AxisSet::none(),
            options: OptionsByName::default(),
            registry: Registry::default(),
            rotary_tables: RotaryTables::default(),
        }
    }

    /// Declares gradients partial along `axis` too: for a norm that sees only some positions, or a tensor shared by
    /// two pipeline stages.
    #[must_use]
    pub fn with_partial_gradients(mut self, axis: Axis) -> Scope {
        self.grad_partial = self.grad_partial.with(axis);
        self.grad_whole = self.grad_whole.without(axis);
        self
    }

    /// Declares that every rank along `axis` computes the whole gradient, the same as the others. A model with sequence
    /// parallelism declares it for a layer after a gather of all positions, for example.
    #[must_use]
    pub fn with_whole_gradients(mut self, axis: Axis) -> Scope {
        self.grad_partial = self.grad_partial.without(axis);
        self.grad_whole = self.grad_whole.with(axis);
        self
    }

    /// Declares parameters replicated along `axis`.
    #[must_use]
    pub fn replicated_along(mut self, axis: Axis) -> Scope {
        self.replicated = self.replicated.with(axis);
        self
    }

    /// Declares parameters sharded along `axis`. Each rank then has the whole gradient of its shard.
    #[must_use]
    pub fn sharded_along(mut self, axis: Axis) -> Scope {
        self.replicated = self.replicated.without(axis);
        self.grad_partial = self.grad_partial.without(axis);
        self
    }

    /// Declares options of parameters by their global names: factors of the learning rate, weight decay, and update
    /// rules. An optimizer treats parameters of equal options together.
    ///
    /// ```
    /// use ferrotron_nn::{Bias, Init, Linear, OptimizerConfig, ParamOptions, Scope};
    /// use ferrotron_tensor::{DType, Device};
    /// let of_run = ParamOptions::default();
    /// let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1234).with_options(move |name| match name {
    ///     "head.weight" => ParamOptions { lr_multiplier: 0.5, weight_decay: Some(0.0), ..of_run },
    ///     name if name.ends_with(".bias") => ParamOptions { optimizer: Some(OptimizerConfig::SGD), ..of_run },
    ///     _ => of_run,
    /// });
    /// let head = Linear::new(&scope.child("head"), 3, 2, Bias::Yes, Init::XavierNormal)?;
    /// assert_eq!(head.weight().options().lr_multiplier, 0.5);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    #[must_use]
    pub fn with_options(
        mut self,
        options: impl Fn(&str) -> ParamOptions + Send + Sync + 'static,
    ) -> Scope {
        self.options = OptionsByName::new(options);
        self
    }

    /// The scope of a submodule.
    #[must_use]
    pub fn child(&self, name: &str) -> Scope {
        Scope { path: self.join(name), ..self.clone() }
    }

    /// The global path, which is the site of random numbers.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Type of the parameters.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The device of the parameters.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The rotary tables that layers of this scope and its children share.
    pub(crate) fn rotary_tables(&self) -> &RotaryTables {
        &self.rotary_tables
    }

    /// An unsharded parameter. Its memory is allocated when the value is first read.
    pub fn param(&self, name: &str, dims: &[usize], init: Init, decay: WeightDecay) -> Param {
        self.param_at(name, ShardSpec::unsharded(dims), init, decay)
    }

    /// A parameter with the local shard `shard_spec`.
    pub fn param_at(
        &self,
        name: &str,
        shard_spec: ShardSpec,
        init: Init,
        decay: WeightDecay,
    ) -> Param {
        let name = self.join(name);
        let entry = self.registry.add(&name);
        let key = RandomKey::new(self.seed, 0, &name);
        let (shard, site) = (shard_spec.clone(), name.clone());
        let leaf = Leaf::lazy(name, &self.device, self.dtype, shard_spec.dims(), move |tensor| {
            init.fill(tensor, &shard, &key).at(&site)
        });
        let Scope { replicated, grad_partial, grad_whole, .. } = *self;
        let blocks = Vec::new();
        let options = self.options.of(leaf.name());
        let facts = Facts {
            shard_spec,
            replicated,
            grad_partial,
            grad_whole,
            decay,
            blocks,
            embedding: false,
            options,
        };
        Param { leaf, facts, entry }
    }

    /// Claims this scope's path for a layer that draws random numbers. The layer keeps the site.
    ///
    /// Errors if a layer that still exists holds it: on different stages of a pipeline they would draw the same numbers,
    /// and others on one stage.
    pub fn random_site(&self) -> Result<RandomSite> {
        match self.registry.claim_site(&self.path) {
            Some(token) => Ok(RandomSite::new(&self.path, token)),
            None => {
                let message = "another layer draws random numbers at this path: give each a scope of its own, such as \
                               `scope.child(..)`, or call one layer twice";
                Err(Error::config("random_site", message).at(&self.path))
            }
        }
    }

    /// The names of the parameters that this scope and its children made, that still exist, and that `module` does
    /// not visit. Such a parameter would never be trained.
    ///
    /// An optimizer asks by itself: its first step refuses if a parameter of the same root scope is in no
    /// [`ParamAndGradBuffer`](crate::ParamAndGradBuffer).
    ///
    /// ```
    /// use ferrotron_nn::{Bias, Init, Linear, Module, Param, Scope};
    /// use ferrotron_tensor::{DType, Device};
    /// struct Pair(Linear, Linear);
    /// impl Module for Pair {
    ///     fn visit(&self, f: &mut dyn FnMut(&Param)) {
    ///         self.0.visit(f); // and the second one is forgotten
    ///     }
    /// }
    /// let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1234);
    /// let layer = |name| Linear::new(&scope.child(name), 2, 2, Bias::No, Init::Ones);
    /// let pair = Pair(layer("first")?, layer("second")?);
    /// assert_eq!(scope.unvisited(&pair), ["second.weight"]);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn unvisited(&self, module: &dyn Module) -> Vec<String> {
        let mut made = self.registry.existing();
        let inside = |name: &str| {
            let rest = name.strip_prefix(&self.path);
            self.path.is_empty() || rest.is_some_and(|rest| rest.starts_with('.'))
        };
        made.retain(|entry| inside(entry.name()));
        module.visit(&mut |param| made.retain(|entry| !Arc::ptr_eq(entry, &param.entry)));
        made.iter().map(|entry| entry.name().to_string()).collect()
    }

    fn join(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_string() } else { format!("{}.{name}", self.path) }
    }
}

/// The paths by which random layers draw that scopes of the same roots as `params` have made, and that still exist.
/// Stages of a pipeline compare them: [`Scope::random_site`] knows the layers of one stage only.
pub fn random_sites<'a>(params: impl IntoIterator<Item = &'a Param>) -> Vec<String> {
    let roots = roots(params.into_iter().map(Param::entry));
    let mut all: Vec<String> = roots.into_iter().flat_map(Entry::sites).collect();
    all.sort_unstable();
    all
}
