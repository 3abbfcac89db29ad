//! The parameters of a model laid out for the optimizer: weights and gradients in flats, one pair for
//! each decay group.

use ferrotron_autograd::{Leaf, SharedFlat, missing_gradients};
use ferrotron_tensor::ops::sq_norm::{all_finite, sq_norm};
use ferrotron_tensor::{Category, Error, Flat, Result, dispatch_float};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{Decay, Param};

/// Parameters that the optimizer treats alike.
pub struct ParamGroup {
    /// Whether weight decay applies.
    pub decay: Decay,
    /// The parameters, in the order of the flats.
    pub params: Vec<Param>,
    /// Their values.
    pub weights: SharedFlat,
    /// Their gradients.
    pub gradients: SharedFlat,
}

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
/// let mut optimizer = Optimizer::new(OptimizerConfig::Sgd { momentum: 0.0, weight_decay: 0.0 }, &buffers)?;
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
        let groups = [Decay::Yes, Decay::No]
            .into_iter()
            .map(|decay| {
                Self::group(
                    decay,
                    params.iter().filter(|param| param.decay() == decay).cloned().collect(),
                )
            })
            .filter_map(Result::transpose)
            .collect::<Result<_>>()?;
        Ok(ParamBuffers { groups })
    }

    fn group(decay: Decay, params: Vec<Param>) -> Result<Option<ParamGroup>> {
        let Some(first) = params.first() else { return Ok(None) };
        let (device, dtype) = (first.leaf().device().clone(), first.leaf().dtype());
        let parts: Vec<_> = params
            .iter()
            .map(|param| (param.name().to_string(), param.leaf().dims().to_vec()))
            .collect();
        let flat = |category| {
            Ok::<_, Error>(Arc::new(Mutex::new(Flat::new(&device, dtype, category, &parts)?)))
        };
        let weights = flat(Category::Weights)?;
        let gradients = flat(Category::Gradients)?;
        for (range, param) in params.iter().enumerate() {
            param.leaf().move_value(&weights, range)?;
            param.leaf().move_gradient(&gradients, range);
        }
        Ok(Some(ParamGroup { decay, params, weights, gradients }))
    }

    /// The groups: decayed parameters first.
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

    /// Sum of the squares of all gradients, in f64.
    pub fn sq_norm(&self) -> Result<f64> {
        self.groups.iter().map(|group| flat_sq_norm(&lock(&group.gradients))).sum()
    }

    /// Whether every weight is a finite number.
    pub fn weights_are_finite(&self) -> Result<bool> {
        self.groups
            .iter()
            .try_fold(true, |finite, group| Ok(finite && flat_is_finite(&lock(&group.weights))?))
    }

    /// The first parameter whose value or gradient is not finite, for an error message.
    pub fn first_non_finite(&self) -> Result<Option<String>> {
        for param in self.params() {
            let finite = |tensor: ferrotron_tensor::Tensor| {
                Ok::<_, Error>(tensor.to_f64()?.iter().all(|x| x.is_finite()))
            };
            if !finite(param.leaf().value()?)? {
                return Ok(Some(format!("the value of '{}'", param.name())));
            }
            if let Some(gradient) = param.leaf().gradient()?
                && !finite(gradient)?
            {
                return Ok(Some(format!("the gradient of '{}'", param.name())));
            }
        }
        Ok(None)
    }

    pub(crate) fn mark_updated(&self) {
        self.params().map(Param::leaf).for_each(Leaf::mark_updated);
    }
}

fn flat_sq_norm(flat: &Flat) -> Result<f64> {
    dispatch_float!("sq_norm", flat.dtype(), T => Ok(sq_norm(flat.device(), flat.whole::<T>()?)))
}

fn flat_is_finite(flat: &Flat) -> Result<bool> {
    dispatch_float!("all_finite", flat.dtype(), T => Ok(all_finite(flat.device(), flat.whole::<T>()?)))
}

/// The factor that brings a gradient of norm `norm` down to `max_norm`: Megatron's
/// max / (norm + 1e-6), at most 1.
pub fn clip_coefficient(norm: f64, max_norm: f64) -> f64 {
    if max_norm > 0.0 { (max_norm / (norm + 1e-6)).min(1.0) } else { 1.0 }
}

/// A panic elsewhere leaves numbers behind, not a torn structure.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
