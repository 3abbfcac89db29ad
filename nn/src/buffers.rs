//! The parameters of a model laid out for the optimizer: weights and gradients in flats, a pair for each
//! group of parameters of which the same is true.

use ferrotron_autograd::{Leaf, missing_gradients};
use ferrotron_tensor::{DType, Error, Result, Tensor};

use crate::{AxisSet, BufferConfig, Decay, Param, ParamGroup, ShardUnit, Sharding};

/// All parameters of a model, grouped.
///
/// ```
/// use ferrotron_autograd::Var;
/// use ferrotron_nn::{
///     Bias, Init, Linear, Module, Optimizer, OptimizerConfig, ParamBuffers, Scope, StepConfig, clip_coefficient,
/// };
/// use ferrotron_tensor::{DType, Device, Tensor};
/// let device = Device::cpu(1)?;
/// let layer = Linear::new(&Scope::new(&device, DType::F32, 1234), 3, 2, Bias::Yes, Init::XavierNormal)?;
/// let buffers = ParamBuffers::new(&layer.params())?;
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
pub struct ParamBuffers {
    groups: Vec<ParamGroup>,
}

impl ParamBuffers {
    /// Moves the values of `params` into flats; those not made yet are made there.
    ///
    /// Errors if two parameters have the same name or their dtypes differ.
    pub fn new(params: &[Param]) -> Result<ParamBuffers> {
        Self::with_config(params, &BufferConfig::default())
    }

    /// As [`ParamBuffers::new`], in groups of bounded size of which this rank may keep a part.
    pub fn with_config(params: &[Param], config: &BufferConfig) -> Result<ParamBuffers> {
        for (i, param) in params.iter().enumerate() {
            if let Some(first) = params[..i].iter().find(|first| first.name() == param.name()) {
                return Err(Error::config(
                    "parameters",
                    format!("two parameters are named '{}'", first.name()),
                ));
            }
            if param.leaf().dtype() != params[0].leaf().dtype() {
                return Err(Error::config(
                    "parameters",
                    format!("'{}' has another dtype than '{}'", param.name(), params[0].name()),
                ));
            }
        }
        let by_parameter =
            config.shard_unit == ShardUnit::Parameters && config.sharding > Sharding::None;
        let groups = buckets(params, config.bucket_numel)
            .into_iter()
            .map(|bucket| {
                let owner = |param: &Param| owner(params, param, config.shard.1);
                let owners = bucket.iter().filter(|_| by_parameter).map(owner).collect();
                ParamGroup::new(bucket, owners, config)
            })
            .collect::<Result<_>>()?;
        Ok(ParamBuffers { groups })
    }

    /// The groups, in the order in which backward completes their gradients.
    pub fn groups(&self) -> &[ParamGroup] {
        &self.groups
    }

    /// Every parameter, group by group.
    pub fn params(&self) -> impl Iterator<Item = &Param> {
        self.groups.iter().flat_map(|group| &group.params)
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.params().map(|param| param.leaf().numel()).sum()
    }

    /// Forgets all gradients: the next backward overwrites them.
    pub fn zero_gradients(&self) {
        self.params().for_each(|param| param.leaf().zero_gradient());
    }

    /// Errors, naming them, if parameters got no gradient since [`ParamBuffers::zero_gradients`].
    pub fn check_gradients(&self) -> Result<()> {
        let missing = missing_gradients(self.params().map(Param::leaf));
        if missing.is_empty() {
            return Ok(());
        }
        Err(Error::graph("backward", format!("the loss does not depend on {}", missing.join(", "))))
    }

    /// Sum of the squares of all gradients that this rank updates, in f64.
    pub fn sq_norm(&self) -> Result<f64> {
        let Some(first) = self.params().next() else { return Ok(0.0) };
        let mut total = Tensor::full(first.leaf().device(), DType::F64, &[1], 0.0)?;
        self.groups.iter().try_for_each(|group| group.add_sq_norm(&mut total))?;
        total.item()
    }

    /// Whether every weight that this rank updates is a finite number.
    pub fn weights_are_finite(&self) -> Result<bool> {
        self.groups.iter().try_fold(true, |finite, group| Ok(finite && group.weights_are_finite()?))
    }

    /// The first parameter whose value or gradient is not finite, for an error message.
    pub fn first_non_finite(&self) -> Result<Option<String>> {
        self.groups.iter().find_map(|group| group.first_non_finite().transpose()).transpose()
    }

    pub(crate) fn mark_updated(&self) {
        self.params().map(Param::leaf).for_each(Leaf::mark_updated);
    }
}

/// Parameters of equal facts together, in groups that are closed once they have `numel` elements. Filled from
/// the last parameter to the first, since that is the order in which gradients are complete.
fn buckets(params: &[Param], numel: usize) -> Vec<Vec<Param>> {
    let size = |bucket: &[Param]| bucket.iter().map(|p| p.leaf().numel()).sum::<usize>();
    let mut buckets: Vec<Vec<Param>> = Vec::new();
    for param in params.iter().rev() {
        // Only the last bucket of these facts can be open.
        let last = buckets.iter_mut().rev().find(|bucket| facts(&bucket[0]) == facts(param));
        match last.filter(|bucket| size(bucket) < numel) {
            Some(open) => open.push(param.clone()),
            None => buckets.push(vec![param.clone()]),
        }
    }
    buckets.iter_mut().for_each(|bucket| bucket.reverse());
    buckets
}

/// What all parameters of a group have in common.
fn facts(param: &Param) -> (Decay, AxisSet, AxisSet) {
    (param.decay(), param.replicated(), param.grad_partial())
}

/// Which of `ranks` owns the whole of a parameter: that in whose equal share of the parameters of equal facts its
/// middle lies. Counted are global elements, so that ranks which hold other parts of a parameter, or share
/// nothing but it, agree.
fn owner(params: &[Param], param: &Param, ranks: usize) -> usize {
    let numel = |param: &Param| param.place().global_dims().iter().product::<usize>() as u128;
    let alike = || params.iter().filter(|other| facts(other) == facts(param));
    let before: u128 = alike().take_while(|other| other.name() != param.name()).map(numel).sum();
    let all: u128 = alike().map(numel).sum();
    let owner = (2 * before + numel(param)) * ranks as u128 / (2 * all).max(1);
    (owner as usize).min(ranks - 1)
}
