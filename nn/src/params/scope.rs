//! Scopes: where a module is built.

use ferrotron_autograd::Leaf;
use ferrotron_tensor::{At, DType, Device, Error, RandomKey, Result, ShardSpec};
use std::sync::Arc;

use crate::layers::rotary_tables::RotaryTables;
use crate::params::options::OptionsByName;
use crate::params::param::Facts;
use crate::params::random_site::RandomSite;
use crate::params::registry::{Registry, roots};
use crate::{Axis, AxisSet, Init, Module, Param, ParamOptions, ParamPatterns, WeightDecay};

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

    /// Declares options of parameters by their global names: dtype, factors of the learning rate, weight decay, and
    /// update rules. An optimizer treats parameters of equal options together. Replaces earlier options, those of
    /// [`Scope::with_options_for`] too, whose patterns still have to match.
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
        self.options = self.options.replaced(options);
        self
    }

    /// Changes the options of the parameters that `patterns` choose by their global names; those of earlier calls stay.
    /// Call it on the scope of the model, since a pattern may match any name of the model.
    ///
    /// A pattern that matches no parameter of the model is an error: in the first step of an
    /// [`Optimizer`](crate::Optimizer) on one rank, and when a `DataParallel` or `Trainer` is made.
    ///
    /// ```
    /// use ferrotron_nn::{Bias, Init, Linear, ParamOptions, ParamPatterns, Scope};
    /// use ferrotron_tensor::{DType, Device};
    /// let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1234)
    ///     .with_options_for(&ParamPatterns::new(["encoder"])?, |of_run| ParamOptions { lr_multiplier: 0.1, ..of_run })
    ///     .with_options_for(&ParamPatterns::new(["*.bias"])?, |of_run| ParamOptions { weight_decay: Some(0.1), ..of_run });
    /// let layer = Linear::new(&scope.child("encoder.fc"), 3, 2, Bias::Yes, Init::XavierNormal)?;
    /// let bias = layer.bias().expect("a bias").options();
    /// assert_eq!((bias.lr_multiplier, bias.weight_decay), (0.1, Some(0.1)));
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    #[must_use]
    pub fn with_options_for(
        mut self,
        patterns: &ParamPatterns,
        change: impl Fn(ParamOptions) -> ParamOptions + Send + Sync + 'static,
    ) -> Scope {
        if !patterns.is_empty() {
            self.options = self.options.changed_for(patterns.clone(), change);
        }
        self
    }

    /// Keeps the parameters that `patterns` choose in the accumulator dtype: in f32, in a model of 16 bits. Other
    /// options of [`Scope::with_options`] stay. A pattern that matches nothing is an error, as in
    /// [`Scope::with_options_for`].
    ///
    /// ```
    /// use ferrotron_nn::{ParamPatterns, RmsNorm, Module, Scope};
    /// use ferrotron_tensor::{DType, Device};
    /// let scope = Scope::new(&Device::cpu(1)?, DType::BF16, 1234);
    /// let scope = scope.with_accumulator_dtype(&ParamPatterns::new(["norm"])?);
    /// let norm = RmsNorm::new(&scope.child("norm"), 3, 1e-5);
    /// assert_eq!(norm.params()[0].leaf().dtype(), DType::F32);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    #[must_use]
    pub fn with_accumulator_dtype(self, patterns: &ParamPatterns) -> Scope {
        let dtype = self.dtype.accumulator();
        self.with_options_for(patterns, move |of_run| ParamOptions { dtype: Some(dtype), ..of_run })
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

    /// Type of the parameters, unless [`ParamOptions::dtype`] says otherwise, and of activations.
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
        let mut options = self.options.get(&name);
        options.dtype = options.dtype.filter(|&dtype| dtype != self.dtype); // equal options are equal values
        let dtype = options.dtype.unwrap_or(self.dtype);
        let leaf = Leaf::lazy(name, &self.device, dtype, shard_spec.dims(), move |tensor| {
            init.fill(tensor, &shard, &key).at(&site)
        });
        let Scope { replicated, grad_partial, grad_whole, dtype: compute_dtype, seed, .. } = *self;
        let facts = Facts {
            shard_spec,
            replicated,
            grad_partial,
            grad_whole,
            decay,
            blocks: Vec::new(),
            embedding: false,
            options,
            patterns: self.options.patterns().to_vec(),
            compute_dtype,
            seed,
        };
        Param::new(leaf, facts, entry)
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
        module.visit(&mut |param| made.retain(|entry| !Arc::ptr_eq(entry, param.entry())));
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
    let mut all: Vec<String> = roots.into_iter().flat_map(|root| root.sites()).collect();
    all.sort_unstable();
    all
}
