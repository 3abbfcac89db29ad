//! Optimizers over flat buffers, by any [`UpdateRule`]. Their state may be offloaded to host memory, and is prefetched
//! in chunks during the update.

mod adafactor;
mod adamw;
mod block;
mod check;
mod config;
mod gathered_shards;
mod group_state;
mod lion;
pub(crate) mod loss_scale;
mod moment;
mod muon;
mod pass;
mod rule;
pub mod schedule;
mod sgd;
mod shard_exchange;
mod shard_unit;
mod state;
mod step_tensors;
mod update_config;
mod visit;

pub use adafactor::{AdafactorConfig, StepSize};
pub use block::Block;
pub use config::{CustomRule, OptimizerConfig};
pub use gathered_shards::{GatheredShard, gathered_shards};
pub use group_state::{EMA, MASTER};
pub use muon::{MuonConfig, MuonScale, Nesterov, NewtonSchulz};
pub use rule::{StepTensors, UpdateRule, UpdateStep};
pub use shard_exchange::{ExchangeSize, NoExchange, ShardExchange, ShardedSum};
pub use shard_unit::ShardUnit;
pub use state::{StateShape, StateSpec};
pub use update_config::{Rounding, UpdateConfig, WeightUpdate};

use ferrotron_tensor::ops::step::{DeviceStepParams, StepParams};
use ferrotron_tensor::{Error, FlatBuffer, MemoryKind, Result, Tensor};
use std::sync::Weak;

use self::group_state::GroupState;
use self::pass::{Pass, RUN};
use self::step_tensors::GroupTensors;
use crate::ParamAndGradBuffer;

/// The inputs of a step besides the gradients.
#[derive(Debug, Clone, Copy)]
pub struct StepConfig {
    /// Learning rate of this step.
    pub lr: f64,
    /// Factor of the gradients: the clip coefficient.
    pub grad_scale: f64,
}

/// An optimizer with its state: moments and master weights in the layout of the weights that this rank updates.
pub struct Optimizer {
    config: OptimizerConfig,
    rounding: Rounding,
    states: MemoryKind,
    ema_decay: Option<f64>,
    groups: Vec<GroupState>,
    /// The buffers that it was made for.
    buffers: Weak<()>,
    step: u64,
    /// Number of parameters that the model's scopes had made when a step last found them all in buffers.
    owned: Option<usize>,
}

impl Optimizer {
    /// Creates zero moments for every weight that this rank updates, and master weights for 16-bit weights. Moments
    /// have the accumulator dtype: f32, or f64 for f64 weights.
    ///
    /// Errors, naming it, if a hyperparameter is out of range.
    pub fn new(config: OptimizerConfig, buffers: &ParamAndGradBuffer) -> Result<Optimizer> {
        Self::with_update(config, buffers, &UpdateConfig::default())
    }

    /// Like [`Optimizer::new`], with options for 16-bit weights and the placement of state.
    pub fn with_update(
        config: OptimizerConfig,
        buffers: &ParamAndGradBuffer,
        update: &UpdateConfig,
    ) -> Result<Optimizer> {
        config.validate()?;
        check::fractions(&[("the decay of the mean of weights", update.ema_decay.unwrap_or(0.0))])?;
        let groups = buffers
            .groups()
            .iter()
            .map(|group| GroupState::of_group(config, group, update))
            .collect::<Result<_>>()?;
        let UpdateConfig { rounding, states, ema_decay, .. } = *update;
        let buffers = buffers.identity();
        Ok(Optimizer { config, rounding, states, ema_decay, groups, buffers, step: 0, owned: None })
    }

    /// The rule with its hyperparameters.
    pub fn config(&self) -> OptimizerConfig {
        self.config
    }

    /// Updates the weights from their gradients, in one pass per group.
    ///
    /// # Errors
    ///
    /// Errors, without any change, if all parameters are frozen, as [`Optimizer::check_finite`] does, if gradients were added
    /// to those of the last step, if a graph that was not consumed still holds a weight, and, in the first step and after
    /// scopes of the model have made parameters, as [`ParamAndGradBuffer::check_owned`]. Errors for buffers of another
    /// optimizer, and for weights that other ranks train, too: `DataParallel::update` is for them. Errors for a rule with
    /// sums over ranks if parameters are sharded over them.
    pub fn step(&mut self, buffers: &ParamAndGradBuffer, step: &StepConfig) -> Result<()> {
        let Some(param) = buffers.params().next() else {
            buffers.check_owned()?;
            let count = buffers.frozen().len();
            let message = format!("all {count} parameters are frozen: nothing is left to train");
            return Err(Error::config("optimizer", message));
        };
        if let Some(group) = buffers.groups().iter().find(|group| group.owned.len() < group.numel())
        {
            let message = format!(
                "this rank updates {} of {} elements of '{}' and others: use `DataParallel::update`, which gathers what \
                 other ranks update",
                group.owned.len(),
                group.numel(),
                group.params[0].name()
            );
            return Err(Error::config("optimizer", message));
        }
        buffers.check_alone()?;
        buffers.check_discarded()?;
        self.check_finite(buffers, step)?;
        let step = DeviceStepParams::new(param.leaf().device(), &self.numbers(step))?;
        self.step_with(buffers, &step, &NoExchange)?;
        buffers.mark_used();
        Ok(())
    }

    /// Errors if the next step would make weights of this rank infinite or NaN. The cause is the learning rate, the
    /// factor of the gradients, or a gradient, whose parameter the error names. Reads all gradients once; a fake device
    /// has none. Errors as [`ParamAndGradBuffer::settle_unused`] too, and as [`ParamAndGradBuffer::check_owned`] in the first
    /// step and if scopes have made parameters since the last one.
    pub fn check_finite(&self, buffers: &ParamAndGradBuffer, step: &StepConfig) -> Result<()> {
        let number = self.step + 1;
        if !step.lr.is_finite() {
            let message = format!("step {number}: the learning rate is {}", step.lr);
            return Err(Error::value("optimizer", message));
        }
        // Here, where all ranks refuse together, though one stage alone may have made a layer.
        self.check_owned(buffers)?;
        buffers.settle_unused()?;
        // Also on a pipeline stage whose parameters are frozen: it refuses together with the others.
        let Some(param) = buffers.params().next() else { return Ok(()) };
        let fake = param.leaf().device().is_fake();
        if step.grad_scale.is_finite() && (fake || buffers.gradients_are_finite()?) {
            return Ok(());
        }
        let offender = match buffers.first_non_finite()? {
            Some(name) => format!("first offender: {name}"),
            None => "every value and gradient of this rank is finite".to_string(),
        };
        let message = format!(
            "step {number}: the gradients or their norm are not finite, and their factor is {}; {offender}; weights and \
             optimizer state stay as they are",
            step.grad_scale
        );
        Err(Error::value("optimizer", message))
    }

    /// The parameters of the next step.
    pub fn numbers(&self, step: &StepConfig) -> StepParams {
        let update = self.step + 1;
        let lr = self.config.learning_rate(step.lr, update);
        StepParams { update, lr, grad_scale: step.grad_scale }
    }

    /// Like [`Optimizer::step`], with the next step's [parameters](Optimizer::numbers) in device memory, on a rank
    /// that may hold shards of parameters.
    ///
    /// `exchange` communicates with the ranks that hold the other shards.
    ///
    /// # Errors
    ///
    /// Errors, without any change, if a graph that was not consumed still holds a weight, as
    /// [`ParamAndGradBuffer::settle_unused`], and as [`ParamAndGradBuffer::check_owned`].
    #[doc(hidden)] // for `parallel`
    pub fn step_with(
        &mut self,
        buffers: &ParamAndGradBuffer,
        step: &DeviceStepParams,
        exchange: &dyn ShardExchange,
    ) -> Result<()> {
        if !self.buffers.ptr_eq(&buffers.identity()) {
            let message =
                "the buffers are not those that the optimizer was made for, whose state it has";
            return Err(Error::config("optimizer", message));
        }
        self.owned = Some(self.check_owned(buffers)?);
        let unused = buffers.settle_unused()?;
        self.check_writable(buffers)?;
        let (rounding, states, ema_decay) = (self.rounding, self.states, self.ema_decay);
        let count = self.step + 1;
        let Some(param) = buffers.params().next() else {
            self.step = count; // of a pipeline stage whose parameters are frozen
            return Ok(());
        };
        let device = &param.leaf().device().clone();
        let fused = self.groups.iter().all(|group| group.rule.is_fused());
        let values = if fused { None } else { step.read()? };
        if !fused && values.is_none() {
            return self.count_step(buffers); // the device found gradients that are not finite
        }
        let step = UpdateStep {
            params: step,
            values,
            weight_decay: None,
            block: None,
            unit: ShardUnit::Elements,
            prepared: &[],
            exchange,
        };
        let prepared = self.prepare(buffers, &unused, &step)?;
        self.step = count;
        for (index, (group, prepared)) in buffers.groups().iter().zip(&prepared).enumerate() {
            if let Some(next) = self.groups.get(index + 1) {
                next.prefetch(&(0..RUN));
            }
            let state = &mut self.groups[index];
            let factor = group.options.lr_multiplier;
            let scaled = (factor != 1.0).then(|| step.params.scale_lr(factor)).transpose()?;
            let step = step.for_group(scaled.as_ref(), factor, group.weight_decay());
            let unused = &unused[index];
            let pass = Pass { device, rounding, states, ema_decay, step, count, unused, prepared };
            group.with_owned(|weights, gradients| pass.group(state, weights, gradients))?;
        }
        buffers.mark_updated();
        Ok(())
    }

    /// Counts a step that the device executes without a call of `step`, as in a replayed CUDA graph.
    ///
    /// Errors as [`ParamAndGradBuffer::check_owned`].
    pub fn count_step(&mut self, buffers: &ParamAndGradBuffer) -> Result<()> {
        self.owned = Some(self.check_owned(buffers)?);
        self.step += 1;
        buffers.mark_updated();
        Ok(())
    }

    /// Returns the number of parameters that scopes have made.
    ///
    /// Errors as [`ParamAndGradBuffer::check_owned`] if it is not that of the last step.
    fn check_owned(&self, buffers: &ParamAndGradBuffer) -> Result<usize> {
        let made = buffers.params_made();
        if self.owned != Some(made) {
            buffers.check_owned()?;
        }
        Ok(made)
    }

    /// The numbers that the rules prepare for each block of each group.
    fn prepare(
        &mut self,
        buffers: &ParamAndGradBuffer,
        unused: &[Vec<String>],
        step: &UpdateStep,
    ) -> Result<Vec<Vec<Vec<Tensor>>>> {
        let mut prepared: Vec<Vec<Vec<Tensor>>> = self.groups.iter().map(|_| Vec::new()).collect();
        for which in self.groups_by_rule() {
            let rule = self.groups[which[0]].config.rule();
            let mut tensors = GroupTensors::new(buffers.groups(), unused, &mut self.groups, &which);
            let numbers = rule.prepare(&mut tensors, step)?;
            if numbers.len() != tensors.groups().count() {
                let message = format!(
                    "rule '{}': `prepare` returned {} entries for {} blocks",
                    rule.name(),
                    numbers.len(),
                    tensors.groups().count()
                );
                return Err(Error::config("optimizer", message));
            }
            tensors
                .groups()
                .zip(numbers)
                .for_each(|(group, numbers)| prepared[group].push(numbers));
        }
        Ok(prepared)
    }

    /// The groups of each rule that updates one block at a time.
    fn groups_by_rule(&self) -> Vec<Vec<usize>> {
        let mut all: Vec<Vec<usize>> = Vec::new();
        for (index, group) in self.groups.iter().enumerate() {
            if group.rule.shard_unit() == ShardUnit::Elements {
                continue;
            }
            match all.iter_mut().find(|known| self.groups[known[0]].config == group.config) {
                Some(known) => known.push(index),
                None => all.push(vec![index]),
            }
        }
        all
    }

    /// The size of each exchange with other ranks in a step.
    #[doc(hidden)] // for `parallel`
    pub fn shard_exchanges(&self) -> Vec<ExchangeSize> {
        let sums = |which: Vec<usize>| {
            let blocks = which.iter().flat_map(|&group| &self.groups[group].blocks);
            let first = &self.groups[which[0]];
            first.rule.shard_exchanges(&blocks.collect::<Vec<_>>(), first.accumulator)
        };
        self.groups_by_rule().into_iter().flat_map(sums).collect()
    }

    /// Errors if a tensor reads a weight or a moment: stopping in the middle of a step would leave only some groups
    /// updated.
    fn check_writable(&mut self, buffers: &ParamAndGradBuffer) -> Result<()> {
        for (group, state) in buffers.groups().iter().zip(&mut self.groups) {
            group.with_owned(|(weights, _), _| {
                let flats = state.all_mut().map(|moment| &mut moment.flat);
                [weights].into_iter().chain(flats).try_for_each(FlatBuffer::check_writable)
            })?;
        }
        Ok(())
    }

    /// The name of the first update rule that is not [fused](UpdateRule::is_fused), of the run or of parameters by name:
    /// the host reads the numbers of its steps.
    pub fn unfused_rule(&self) -> Option<&'static str> {
        self.groups.iter().find(|group| !group.rule.is_fused()).map(|group| group.rule.name())
    }

    /// Number of steps taken.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Resumes after `steps` steps, for bias correction.
    pub fn set_steps(&mut self, steps: u64) {
        self.step = steps;
    }
}
