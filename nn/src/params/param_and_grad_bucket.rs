//! A bucket of parameters in flat buffers, optionally sharded: the memory side of ZeRO. The `parallel` crate does the
//! communication.

use ferrotron_autograd::{Accum, SharedFlatBuffer, lock};
use ferrotron_tensor::ops::pointwise::add_assign;
use ferrotron_tensor::ops::sq_norm::{add_sq_norm, all_finite};
use ferrotron_tensor::{Category, Error, FlatBuffer, Result, ShardSpec, Tensor};
use std::ops::Range;
use std::sync::Mutex;

use crate::params::element_shards::{ElementShards, parts, piece_parts, shard_unit};
use crate::{
    AxisSet, BufferConfig, GradDType, Param, ParamOptions, ShardUnit, Sharding, Unused, WeightDecay,
};

/// Parameters with equal dtype, decay and options, and equal sharding along [`BufferConfig::axes`], in one weight and one
/// gradient buffer. They share gradient reductions, norms and optimizer passes.
///
/// Each buffer ends with padding where ranks share the elements, so that all have equal shards: one call reduces or
/// gathers it. Nobody updates the padding, and its contents are unspecified.
pub struct ParamAndGradBucket {
    /// Whether weight decay applies.
    pub decay: WeightDecay,
    /// The axes of [`BufferConfig::axes`] along which all ranks hold the same parameters.
    pub replicated: AxisSet,
    /// The axes of [`BufferConfig::axes`] along which gradients are partial.
    pub grad_partial: AxisSet,
    /// The options of their updates.
    pub options: ParamOptions,
    /// The unit in which they are sharded: elements or parameters.
    pub(crate) shard_unit: ShardUnit,
    /// The parameters, in the order of the flat buffers.
    pub params: Vec<Param>,
    /// Their values; empty between uses if weights are sharded.
    pub weights: SharedFlatBuffer,
    /// Their gradients; empty between uses if gradients are sharded, and before the first one of a step after
    /// [`ParamAndGradBucket::free_gradients`].
    pub gradients: SharedFlatBuffer,
    /// The elements of the flat buffers that this rank updates.
    pub owned: Range<usize>,
    /// The rank that updates each parameter, ascending, if shards consist of whole parameters; else empty.
    pub owners: Vec<usize>,
    /// The owned weights, if weights are sharded.
    pub weight_shard: Option<SharedFlatBuffer>,
    /// The owned gradients, if gradients are sharded.
    pub gradient_shard: Option<SharedFlatBuffer>,
    /// Number of elements behind the parameters in the flat buffers.
    padding: usize,
    /// This rank's index among the sharding ranks.
    rank: usize,
    unused: Unused,
    /// Whether any rank contributed to each parameter's gradient, once its reduction has told.
    contributed: Mutex<Option<Vec<bool>>>,
}

impl ParamAndGradBucket {
    /// A group whose parameters belong to `owners`, unless shards consist of elements.
    pub(crate) fn new(
        params: Vec<Param>,
        owners: Vec<usize>,
        config: &BufferConfig,
    ) -> Result<ParamAndGradBucket> {
        let first = &params[0];
        let (device, dtype) = (first.leaf().device().clone(), first.leaf().dtype());
        let shared = |flat: Result<FlatBuffer>| flat.map(SharedFlatBuffer::new);
        let ElementShards { owned, padding } = ElementShards::new(&params, &owners, config);
        let whole = parts(&params, padding);
        let weights = shared(FlatBuffer::uninit(&device, dtype, Category::Weights, &whole))?;
        let gradient_dtype = match config.gradients {
            GradDType::Accumulator => dtype.accumulator(),
            GradDType::Weight => dtype,
        };
        let gradients =
            shared(FlatBuffer::new(&device, gradient_dtype, Category::Gradients, &whole))?;
        for (range, param) in params.iter().enumerate() {
            param.leaf().bind_value(&weights, range)?;
            param.leaf().bind_gradient(&gradients, range);
        }
        let mut group = ParamAndGradBucket {
            decay: first.decay(),
            replicated: first.replicated().intersection(config.axes),
            grad_partial: first.grad_partial().intersection(config.axes),
            options: *first.options(),
            shard_unit: shard_unit(first, config),
            params,
            weights,
            gradients,
            owned,
            owners,
            padding,
            rank: config.shard.0,
            unused: config.unused,
            contributed: Mutex::new(None),
            weight_shard: None,
            gradient_shard: None,
        };
        let pieces = piece_parts(&group.pieces());
        let shard = |dtype, category| shared(FlatBuffer::new(&device, dtype, category, &pieces));
        if config.sharding >= Sharding::Gradients {
            group.gradient_shard = Some(shard(gradient_dtype, Category::Gradients)?);
            group.free_gradients()?;
        }
        if config.sharding >= Sharding::Weights {
            group.weight_shard = Some(shard(dtype, Category::Weights)?);
            group.write_back_weights()?;
        }
        Ok(group)
    }

    /// The shards of parameters that this rank updates, in the order of the flat buffers, each a box of a global
    /// tensor. Whole parameters if nothing is sharded.
    pub fn pieces(&self) -> Vec<(String, ShardSpec)> {
        if !self.owners.is_empty() {
            let params = self.params.iter().zip(&self.owners);
            let own = params.filter(|&(_, &owner)| owner == self.rank);
            return own.map(|(p, _)| (p.name().to_string(), p.shard_spec().clone())).collect();
        }
        let mut start = 0;
        let mut pieces = Vec::new();
        for param in &self.params {
            let end = start + param.leaf().numel();
            let from = self.owned.start.clamp(start, end) - start;
            let to = self.owned.end.clamp(start, end) - start;
            let boxes = match end - start {
                numel if to - from == numel => vec![param.shard_spec().clone()],
                _ => param.shard_spec().boxes(from..to),
            };
            pieces.extend(boxes.into_iter().map(|place| (param.name().to_string(), place)));
            start = end;
        }
        pieces
    }

    /// The weight decay of these parameters, if it is not the rule's.
    pub(crate) fn weight_decay(&self) -> Option<f64> {
        self.options.weight_decay.or((self.decay == WeightDecay::Off).then_some(0.0))
    }

    /// Returns whether the parameters of both have equal dtype, sharding and options.
    pub fn is_like(&self, other: &ParamAndGradBucket) -> bool {
        let facts = |bucket: &ParamAndGradBucket| {
            let dtype = bucket.params[0].leaf().dtype();
            let axes = (bucket.replicated, bucket.grad_partial);
            (dtype, bucket.decay, axes, bucket.options, bucket.shard_unit)
        };
        facts(self) == facts(other)
    }

    /// Number of elements of the parameters.
    pub fn numel(&self) -> usize {
        self.params.iter().map(|param| param.leaf().numel()).sum()
    }

    /// Number of elements of the flat buffers: a multiple of the number of ranks that share them.
    pub fn padded_numel(&self) -> usize {
        self.numel() + self.padding
    }

    /// Names and dims of the ranges of the flat buffers: the parameters, and the padding if there is any.
    pub fn ranges(&self) -> Vec<(String, Vec<usize>)> {
        parts(&self.params, self.padding)
    }

    /// The flat buffer with the reduced gradients that this rank needs: its shard, or the whole.
    pub fn reduced_grads(&self) -> &SharedFlatBuffer {
        self.gradient_shard.as_ref().unwrap_or(&self.gradients)
    }

    /// Divides all weights, which are sums over `count` replicas, by `count`.
    ///
    /// Errors if a tensor reads one of them.
    pub fn divide_weights(&self, count: usize) -> Result<()> {
        let mut weights = self.weights.lock()?;
        weights.check_writable()?;
        let (device, dtype) = (weights.device().clone(), weights.dtype());
        let accumulator = dtype.accumulator();
        let count = Tensor::full(&device, accumulator, &[1], count as f64)?;
        for range in 0..self.params.len() {
            weights.with_mut(range, |tensor| {
                let quotient = tensor.cast(accumulator)?.div(&count)?.cast(dtype)?;
                tensor.copy_from(&quotient)
            })?;
        }
        Ok(())
    }

    /// Allocates the weight buffer, uninitialised, if it is freed.
    pub fn alloc_weights(&self) -> Result<()> {
        self.alloc(&self.weights, Category::Communication)
    }

    /// Allocates the gradient buffer, uninitialised, if it is freed.
    pub fn alloc_gradients(&self) -> Result<()> {
        let is_whole = self.gradient_shard.is_none();
        let category = if is_whole { Category::Gradients } else { Category::Communication };
        self.alloc(&self.gradients, category)
    }

    fn alloc(&self, flat: &SharedFlatBuffer, category: Category) -> Result<()> {
        let mut flat = flat.lock()?;
        if flat.is_empty() {
            let (device, dtype) = (flat.device().clone(), flat.dtype());
            *flat = FlatBuffer::uninit(&device, dtype, category, &self.ranges())?;
        }
        Ok(())
    }

    /// Copies the owned weights to this rank's shard and frees the whole buffer.
    pub fn write_back_weights(&self) -> Result<()> {
        if let Some(shard) = &self.weight_shard {
            let (whole, mut shard) = (self.weights.lock()?, shard.lock()?);
            shard.with_slice_mut(.., |own| own.copy_from(&whole.slice(self.owned.clone())?))?;
            drop(whole);
            self.reshard_weights()?;
        }
        Ok(())
    }

    /// Copies the owned weights to their range of the whole buffer, before an all-gather.
    pub fn copy_in_weights(&self) -> Result<()> {
        let Some(shard) = &self.weight_shard else { return Ok(()) };
        let (shard, mut whole) = (shard.lock()?, self.weights.lock()?);
        whole.with_slice_mut(self.owned.clone(), |own| own.copy_from(&shard.slice(..)?))
    }

    /// Writes or adds the owned gradients to this rank's shard and frees the whole buffer.
    pub fn write_back_gradients(&self, accum: Accum) -> Result<()> {
        let Some(shard) = &self.gradient_shard else { return Ok(()) };
        let (whole, mut shard) = (self.gradients.lock()?, shard.lock()?);
        let source = whole.slice(self.owned.clone())?;
        shard.with_slice_mut(.., |own| match accum {
            Accum::Replace => own.copy_from(&source),
            Accum::Add => add_assign(own, &source),
        })?;
        drop(source);
        drop(whole);
        self.free_gradients()
    }

    /// Frees the whole weight buffer; tensors that read it keep their memory.
    pub fn reshard_weights(&self) -> Result<()> {
        free(&self.weights)
    }

    /// Frees the whole gradient buffer, whose gradients are discarded, until [`ParamAndGradBucket::alloc_gradients`].
    ///
    /// Errors if its contents were on their way and did not come.
    pub fn free_gradients(&self) -> Result<()> {
        free(&self.gradients)
    }

    /// Passes the owned weights and gradients to `f`, each as a flat buffer and the range of owned elements in it.
    pub(crate) fn with_owned<R>(
        &self,
        f: impl FnOnce((&mut FlatBuffer, Range<usize>), (&FlatBuffer, Range<usize>)) -> Result<R>,
    ) -> Result<R> {
        let own = |whole, shard: &Option<SharedFlatBuffer>| match shard {
            Some(shard) => (shard.clone(), 0..self.owned.len()),
            None => (SharedFlatBuffer::clone(whole), self.owned.clone()),
        };
        let (weights, weight_range) = own(&self.weights, &self.weight_shard);
        let (gradients, gradient_range) = own(&self.gradients, &self.gradient_shard);
        f((&mut *weights.lock()?, weight_range), (&*gradients.lock()?, gradient_range))
    }

    /// Tells for each parameter whether its gradient counts, after a reduction over ranks or a write to the gradient
    /// buffer itself. `None`, until then, lets the contributions to the leaves decide.
    pub fn set_contributed(&self, contributed: Option<Vec<bool>>) {
        *lock(&self.contributed) = contributed;
    }

    /// Overwrites the gradient of a parameter by zeros.
    pub fn zero_gradient(&self, param: usize) -> Result<()> {
        self.gradients.lock()?.with_mut(param, Tensor::zero_fill)
    }

    /// The names of the parameters without a gradient in this step, whose old one becomes zero.
    ///
    /// Errors, naming them, if there are any and [`Unused::Refuse`] was configured.
    pub fn settle_unused(&self) -> Result<Vec<String>> {
        let told = lock(&self.contributed).clone();
        let contributed = |(i, param): (usize, &Param)| match &told {
            Some(told) => told[i],
            None => param.leaf().contributions() > 0,
        };
        let all = self.params.iter().enumerate();
        let unused: Vec<(usize, &Param)> = all.filter(|&one| !contributed(one)).collect();
        if self.unused == Unused::Refuse && !unused.is_empty() {
            return Err(unused_error(unused.iter().map(|(_, param)| param.name())));
        }
        if told.is_none() && !unused.is_empty() {
            self.alloc_gradients()?;
            unused.iter().try_for_each(|&(i, _)| self.zero_gradient(i))?;
        }
        Ok(unused.into_iter().map(|(_, param)| param.name().to_string()).collect())
    }

    /// Adds the sum of squares of the gradients that this rank updates to `total`, an f64 tensor of one element.
    pub fn add_sq_norm(&self, total: &mut Tensor) -> Result<()> {
        self.with_owned(|_, (gradients, range)| add_sq_norm(total, &gradients.slice(range)?))
    }

    /// Returns whether every weight that this rank updates is finite.
    pub fn weights_are_finite(&self) -> Result<bool> {
        self.with_owned(|(weights, range), _| finite(weights, range))
    }

    /// Returns whether every gradient that this rank updates with is finite.
    pub fn gradients_are_finite(&self) -> Result<bool> {
        self.with_owned(|_, (gradients, range)| finite(gradients, range))
    }

    /// The first value or gradient that is not finite, among those that this rank updates.
    pub fn first_non_finite(&self) -> Result<Option<String>> {
        self.with_owned(|(weights, mut weight_range), (gradients, mut gradient_range)| {
            for (name, place) in self.pieces() {
                let numel = place.dims().iter().product::<usize>();
                for (what, flat, range) in [
                    ("value", &*weights, &mut weight_range),
                    ("gradient", gradients, &mut gradient_range),
                ] {
                    let end = range.start + numel;
                    // Gradients of this step may not have come yet.
                    if !flat.is_empty() && !finite(flat, range.start..end)? {
                        return Ok(Some(format!("the {what} of '{name}'")));
                    }
                    range.start = end;
                }
            }
            Ok(None)
        })
    }

    /// Calls `f` with each local shard of a weight: parameter name, shard of the global tensor, and value.
    pub fn visit_weights(
        &self,
        mut f: impl FnMut(&str, &ShardSpec, Tensor) -> Result<()>,
    ) -> Result<()> {
        self.local_weights().iter().enumerate().try_for_each(|(number, (name, place))| {
            let tensor = match &self.weight_shard {
                Some(shard) => shard.lock()?.tensor(number)?,
                None => self.params[number].leaf().value()?,
            };
            f(name, place, tensor)
        })
    }

    /// Parameter names and places of the local shards of weights, in the order of [`ParamAndGradBucket::visit_weights`].
    pub fn local_weights(&self) -> Vec<(String, ShardSpec)> {
        let whole = |param: &Param| (param.name().to_string(), param.shard_spec().clone());
        match &self.weight_shard {
            Some(_) => self.pieces(),
            None => self.params.iter().map(whole).collect(),
        }
    }

    /// Lets `write` change the local shard with this number in [`ParamAndGradBucket::local_weights`], in place.
    ///
    /// Errors if a tensor still reads it, or `write` does.
    pub fn write_weight(
        &self,
        number: usize,
        write: impl FnOnce(&mut Tensor) -> Result<()>,
    ) -> Result<()> {
        match &self.weight_shard {
            Some(shard) => shard.lock()?.with_mut(number, write),
            None => self.params[number].leaf().write_value(write),
        }
    }
}

/// The error for parameters that got no contribution to their gradients.
pub fn unused_error<'a>(names: impl IntoIterator<Item = &'a str>) -> Error {
    let names: Vec<&str> = names.into_iter().collect();
    let message = format!(
        "the loss does not depend on {}; if that may happen, choose `Unused::Skip`",
        names.join(", ")
    );
    Error::graph("backward", message)
}

fn finite(flat: &FlatBuffer, range: Range<usize>) -> Result<bool> {
    all_finite(&flat.slice(range)?)
}

fn free(flat: &SharedFlatBuffer) -> Result<()> {
    let mut flat = flat.lock()?;
    *flat = FlatBuffer::empty(flat.device(), flat.dtype());
    Ok(())
}
