//! The parameters of a model in flat buffers for the optimizer. Each bucket has parameters of equal properties, in one
//! weight and one gradient buffer.

use ferrotron_autograd::{Leaf, missing_gradients};
use ferrotron_tensor::{DType, Error, Result, Tensor};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};

use crate::params::element_shards::shard_unit;
use crate::params::options::{check_option_patterns, option_patterns};
use crate::params::param_and_grad_bucket::unused_error;
use crate::params::registry::{Entry, roots};
use crate::{
    AxisSet, BufferConfig, Param, ParamAndGradBucket, ParamOptions, ShardUnit, Sharding,
    WeightDecay,
};

/// All parameters of a model, in groups.
///
/// ```
/// use ferrotron_autograd::Var;
/// use ferrotron_nn::{
///     Bias, Init, Linear, Module, Optimizer, OptimizerConfig, ParamAndGradBuffer, Scope, StepConfig, clip_coefficient,
/// };
/// use ferrotron_tensor::{DType, Device, Tensor};
/// let device = Device::cpu(1)?;
/// let layer = Linear::new(&Scope::new(&device, DType::F32, 1234), 3, 2, Bias::Yes, Init::XavierNormal)?;
/// let buffers = ParamAndGradBuffer::new(&layer.params())?;
/// assert_eq!((buffers.groups().len(), buffers.numel()), (2, 8)); // the weight decays, the bias does not
///
/// let mut optimizer = Optimizer::new(OptimizerConfig::SGD, &buffers)?;
/// let x = Var::constant(Tensor::full(&device, DType::F32, &[1, 3], 1.0)?);
/// buffers.zero_gradients();
/// layer.forward(&x)?.sum_all()?.backward()?;
/// buffers.check_gradients()?;
/// assert_eq!(buffers.sq_norm()?, 8.0); // every derivative is 1
/// let grad_scale = clip_coefficient(buffers.sq_norm()?.sqrt(), 1.0);
/// optimizer.step(&buffers, &StepConfig { lr: 0.1, grad_scale })?;
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub struct ParamAndGradBuffer {
    groups: Vec<ParamAndGradBucket>,
    frozen: Vec<Param>,
    /// Alive as long as the layout, which decides what may be frozen.
    token: Arc<()>,
    /// A parameter of each scope root that made some.
    roots: Vec<Arc<Entry>>,
    ranks: usize,
}

impl ParamAndGradBuffer {
    /// Moves the values of `params` into flat buffers; lazy values are initialised there. Those of frozen parameters
    /// move out of former buffers.
    ///
    /// Errors if there is no parameter, if two have the same name, were made in scopes of different dtypes, or have an
    /// option of [`ParamOptions::dtype`] that is not the accumulator dtype of their scope's, and if other buffers that still
    /// exist train one. Several may hold the same frozen parameters.
    pub fn new(params: &[Param]) -> Result<ParamAndGradBuffer> {
        Self::with_config(params, &BufferConfig::default())
    }

    /// Like [`ParamAndGradBuffer::new`], with bounded bucket sizes and optional sharding.
    pub fn with_config(params: &[Param], config: &BufferConfig) -> Result<ParamAndGradBuffer> {
        Self::with_chunks(&[params], config)
    }

    /// Like [`ParamAndGradBuffer::with_config`], for the chunks of a model, whose gradients backward completes apart: no
    /// bucket has parameters of two.
    pub fn with_chunks(chunks: &[&[Param]], config: &BufferConfig) -> Result<ParamAndGradBuffer> {
        let params = &chunks.concat();
        if params.is_empty() {
            let message = "there is no parameter to train: `Module::visit` meets none";
            return Err(Error::config("parameters", message));
        }
        let mut names = HashSet::new();
        for param in params {
            if !names.insert(param.name()) {
                return Err(Error::config(
                    "parameters",
                    format!("two parameters are named '{}'", param.name()),
                ));
            }
            check_dtype(param, &params[0])?;
            param.check_unowned()?;
        }
        let (params, frozen): (Vec<Param>, Vec<Param>) =
            params.iter().cloned().partition(Param::is_trainable);
        let by_parameter = |param: &&Param| shard_unit(param, config) == ShardUnit::Parameters;
        let owners = match config.sharding {
            Sharding::None => HashMap::new(),
            _ => owners(params.iter().filter(by_parameter), config),
        };
        let trained = |chunk: &&[Param]| -> Vec<Param> {
            chunk.iter().filter(|param| param.is_trainable()).cloned().collect()
        };
        let groups = chunks
            .iter()
            .rev()
            .flat_map(|chunk| buckets(&trained(chunk), config))
            .map(|bucket| {
                let owner = |param: &Param| owners.get(param.name()).copied();
                let owners = bucket.iter().filter_map(owner).collect();
                ParamAndGradBucket::new(bucket, owners, config)
            })
            .collect::<Result<_>>()?;
        frozen.iter().try_for_each(|param| param.leaf().unbind())?;
        let token = Arc::new(());
        params.iter().chain(&frozen).for_each(|param| param.entry().add_buffers(&token));
        let roots = roots(params.iter().chain(&frozen).map(Param::entry));
        let roots = roots.into_iter().cloned().collect();
        Ok(ParamAndGradBuffer { groups, frozen, token, roots, ranks: config.ranks })
    }

    /// The identity of these buffers, which no others have.
    pub(crate) fn identity(&self) -> Weak<()> {
        Arc::downgrade(&self.token)
    }

    /// The groups, in the order in which backward completes their gradients.
    pub fn groups(&self) -> &[ParamAndGradBucket] {
        &self.groups
    }

    /// Every trainable parameter, group by group.
    pub fn params(&self) -> impl Iterator<Item = &Param> {
        self.groups.iter().flat_map(|group| &group.params)
    }

    /// The frozen parameters, which are in no buffer: see [`Param::set_trainable`].
    pub fn frozen(&self) -> &[Param] {
        &self.frozen
    }

    /// Number of trainable elements.
    pub fn numel(&self) -> usize {
        self.params().map(|param| param.leaf().numel()).sum()
    }

    /// Discards all gradients: the next backward overwrites them.
    pub fn zero_gradients(&self) {
        self.groups.iter().for_each(|group| group.set_contributed(None));
        self.params().for_each(|param| param.leaf().zero_gradient());
    }

    /// Errors, naming them, if parameters received no gradient since [`ParamAndGradBuffer::zero_gradients`].
    pub fn check_gradients(&self) -> Result<()> {
        let missing = missing_gradients(self.params().map(Param::leaf));
        if missing.is_empty() {
            return Ok(());
        }
        Err(unused_error(missing.iter().map(String::as_str)))
    }

    /// Errors if other ranks train these parameters, too.
    pub(crate) fn check_alone(&self) -> Result<()> {
        match self.ranks {
            1 => Ok(()),
            ranks => {
                let message = format!(
                    "{ranks} ranks train these parameters: use `DataParallel::update`, by which they take or refuse a step \
                     together"
                );
                Err(Error::config("optimizer", message))
            }
        }
    }

    /// Errors, naming the first, if gradients were added to those that a step has used.
    pub(crate) fn check_discarded(&self) -> Result<()> {
        let Some(param) = self.params().find(|param| param.leaf().has_added_to_used()) else {
            return Ok(());
        };
        let message = format!(
            "the gradient of the last step is still in that of this one for '{}': call `zero_gradients` before the first \
             backward of each step",
            param.name()
        );
        Err(Error::graph("optimizer", message))
    }

    /// Notes that a step has used the gradients.
    pub(crate) fn mark_used(&self) {
        self.params().map(Param::leaf).for_each(Leaf::mark_used);
    }

    /// Errors, naming them, if a scope that made one of these parameters, trainable or frozen, also made others that
    /// still exist and that no existing buffer holds: they would never be trained. An [`Optimizer`](crate::Optimizer) calls
    /// this in its first step, and in each one before which such a scope has made parameters.
    ///
    /// Errors, too, naming it, if no other ranks train the model and a pattern of
    /// [`Scope::with_options_for`](crate::Scope::with_options_for) matches none of its parameters.
    pub fn check_owned(&self) -> Result<()> {
        if self.ranks == 1 {
            let all: Vec<&Param> = self.params().chain(&self.frozen).collect();
            check_option_patterns(&option_patterns(all.iter().copied()), all.len())?;
        }
        let unowned: Vec<String> =
            self.roots.iter().flat_map(|root| root.unowned_siblings()).collect();
        if unowned.is_empty() {
            return Ok(());
        }
        let message = format!(
            "the model's scope made '{}', but no buffer holds it, so that it would never be trained: make it before the \
             buffers and meet it in `Module::visit`, or make what is not trained in a scope of its own",
            unowned.join("', '")
        );
        Err(Error::config("parameters", message))
    }

    /// Number of parameters that scopes of the same roots have ever made.
    pub(crate) fn params_made(&self) -> usize {
        self.roots.iter().map(|root| root.made()).sum()
    }

    /// The names of the parameters of each group without a gradient in this step: see [`Unused`](crate::Unused).
    ///
    /// Errors, naming them, with [`Unused::Refuse`](crate::Unused::Refuse).
    pub fn settle_unused(&self) -> Result<Vec<Vec<String>>> {
        self.groups.iter().map(ParamAndGradBucket::settle_unused).collect()
    }

    /// Sum of squares of all gradients that this rank updates, in f64.
    ///
    /// Errors as [`ParamAndGradBuffer::settle_unused`].
    pub fn sq_norm(&self) -> Result<f64> {
        let Some(first) = self.params().next() else { return Ok(0.0) };
        let mut total = Tensor::full(first.leaf().device(), DType::F64, &[1], 0.0)?;
        self.settle_unused()?;
        self.groups.iter().try_for_each(|group| group.add_sq_norm(&mut total))?;
        total.item()
    }

    /// Returns whether every weight that this rank updates is finite.
    pub fn weights_are_finite(&self) -> Result<bool> {
        self.groups.iter().try_fold(true, |finite, group| Ok(finite && group.weights_are_finite()?))
    }

    /// Returns whether every gradient that this rank updates with is finite.
    pub fn gradients_are_finite(&self) -> Result<bool> {
        let mut groups = self.groups.iter();
        groups.try_fold(true, |finite, group| Ok(finite && group.gradients_are_finite()?))
    }

    /// The first parameter with a value or gradient that is not finite, for error messages.
    pub fn first_non_finite(&self) -> Result<Option<String>> {
        self.groups.iter().find_map(|group| group.first_non_finite().transpose()).transpose()
    }

    /// Tells what is computed from the parameters that their values have changed.
    pub fn mark_updated(&self) {
        self.params().map(Param::leaf).for_each(Leaf::mark_updated);
    }
}

/// Buckets of parameters with equal properties, each closed once it has `numel` elements. Filled from the last
/// parameter to the first, the order in which gradients become complete.
///
/// Update rules that work on whole parameters sum over the ranks that hold shards, parameter by parameter. For them
/// `numel` counts global elements, so that these ranks have the same buckets and make the same calls.
fn buckets(params: &[Param], config: &BufferConfig) -> Vec<Vec<Param>> {
    let numel = config.bucket_numel;
    let facts = |param: &Param| facts(param, config);
    let elements = |param: &Param| match shard_unit(param, config) {
        ShardUnit::Elements => param.leaf().numel(),
        _ => param.shard_spec().global_dims().iter().product(),
    };
    let mut buckets: Vec<(usize, Vec<Param>)> = Vec::new(); // with their elements
    for param in params.iter().rev() {
        // Only the last bucket with these properties can be open.
        let last = buckets.iter_mut().rev().find(|(_, bucket)| facts(&bucket[0]) == facts(param));
        match last.filter(|(size, _)| *size < numel) {
            Some((size, open)) => {
                *size += elements(param);
                open.push(param.clone());
            }
            None => buckets.push((elements(param), vec![param.clone()])),
        }
    }
    buckets.iter_mut().for_each(|(_, bucket)| bucket.reverse());
    buckets.into_iter().map(|(_, bucket)| bucket).collect()
}

/// Errors unless a parameter has the dtype of activations or its accumulator dtype, and activations the same dtype as at
/// `first`.
fn check_dtype(param: &Param, first: &Param) -> Result<()> {
    let (own, compute) = (param.leaf().dtype(), param.compute_dtype());
    let message = if compute != first.compute_dtype() {
        format!("'{}' has another dtype than '{}'", param.name(), first.name())
    } else if own != compute && own != compute.accumulator() {
        let accumulator = match compute.accumulator() {
            wide if wide == compute => String::new(),
            wide => format!(" or {wide}"),
        };
        format!(
            "'{}' cannot be {own} in a model of {compute}: its dtype is {compute}{accumulator}",
            param.name()
        )
    } else {
        return Ok(());
    };
    Err(Error::config("parameters", message))
}

/// The properties that all parameters of a group share.
type Facts = (DType, WeightDecay, [AxisSet; 2], ParamOptions, ShardUnit);

fn facts(param: &Param, config: &BufferConfig) -> Facts {
    let unit = shard_unit(param, config);
    let axes = [param.replicated(), param.grad_partial()].map(|set| set.intersection(config.axes));
    (param.leaf().dtype(), param.decay(), axes, *param.options(), unit)
}

/// The rank that owns each whole parameter, by name. All parameters with equal properties are divided into `ranks`
/// equal ranges of elements; the owner's range contains the parameter's midpoint. Global elements are counted, so
/// that ranks with other shards of a parameter, or that share no other parameter, agree.
fn owners<'a>(
    params: impl Iterator<Item = &'a Param> + Clone,
    config: &BufferConfig,
) -> HashMap<&'a str, usize> {
    let (ranks, facts) = (config.shard.1, |param: &Param| facts(param, config));
    let numel = |param: &Param| param.shard_spec().global_dims().iter().product::<usize>() as u128;
    let mut kinds: Vec<(Facts, u128)> = Vec::new(); // with their elements
    for param in params.clone() {
        match kinds.iter_mut().find(|(kind, _)| *kind == facts(param)) {
            Some((_, all)) => *all += numel(param),
            None => kinds.push((facts(param), numel(param))),
        }
    }
    let mut before = vec![0; kinds.len()];
    let mut owner = |param: &'a Param| {
        let kind = kinds.iter().position(|(kind, _)| *kind == facts(param))?;
        let middle = 2 * before[kind] + numel(param);
        before[kind] += numel(param);
        let owner = (middle * ranks as u128 / (2 * kinds[kind].1).max(1)) as usize;
        Some((param.name(), owner.min(ranks - 1)))
    };
    params.filter_map(&mut owner).collect()
}
