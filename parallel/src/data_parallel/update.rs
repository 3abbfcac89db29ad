//! Updates weights on all ranks, or on none: a rank that must refuse the step tells the others before any of them
//! updates.

use ferrotron_nn::{Axis, Optimizer, Sharding, StepConfig};
use ferrotron_tensor::ops::step::DeviceStepParams;
use ferrotron_tensor::{Device, Error, Result, Tensor};

use super::DataParallel;
use super::equal_ranks::{difference, equal_numbers};
use super::shard_exchange::TensorAxis;
use crate::agreement::wait_for_all;
use crate::collective::{Group, Reduction};

impl DataParallel {
    /// Updates the weights that this rank owns. If ranks own shards of replicated weights, it then starts to gather the
    /// weights, and returns: each use of a parameter waits for its bucket, so that the next forward overlaps with the rest.
    /// If ranks take independent steps and the period has ended, it averages them.
    ///
    /// All ranks call this in the same steps. It reduces a few numbers over them, to refuse together; over the ranks of
    /// its model replica only, if replicas take independent steps or do not wait for updates.
    ///
    /// # Errors
    ///
    /// Errors on all of these ranks, without any change, if [`Optimizer::check_finite`] refuses the step on one of
    /// them: a gradient is not finite, say, or [`DataParallel::finish_step`] is missing. The others name that rank. Errors on
    /// all, too, if they have other learning rates, factors of the gradients, numbers of steps or optimizers.
    pub fn update(&self, optimizer: &mut Optimizer, step: &StepConfig) -> Result<()> {
        let own = self.check_reduced().and_then(|()| optimizer.check_finite(self.buffers(), step));
        self.refuse_together(own, optimizer, step)?;
        let step = DeviceStepParams::new(self.device(), &optimizer.numbers(step))?;
        self.update_with(optimizer, &step)
    }

    /// Errors if a rank that shares this step gives an error, or has another learning rate, factor of gradients, number of
    /// steps or optimizer.
    fn refuse_together(
        &self,
        own: Result<()>,
        optimizer: &Optimizer,
        step: &StepConfig,
    ) -> Result<()> {
        let mesh = &self.shared.mesh;
        // With updates that nobody waits for, all ranks have the same sums and refuse the same ones.
        let alone = self.shared.is_local() || self.shared.config.stale_updates().is_some();
        let ranks: &[&Group] = match alone {
            true => &[mesh.axis(Axis::Tensor), mesh.axis(Axis::Pipeline)],
            false => &[mesh.world()],
        };
        if self.device().is_fake() || ranks.iter().all(|ranks| ranks.size() == 1) {
            return own;
        }
        // The number of a rank that refuses, from 1; then the largest of each number and of its negative.
        let refuses = if own.is_err() { mesh.rank() as f64 + 1.0 } else { 0.0 };
        let equal = equal_numbers(optimizer, step);
        let both = equal.iter().flat_map(|number| [number.own, -number.own]);
        let most: Vec<f64> = std::iter::once(refuses).chain(both).collect();
        let mut most = Tensor::from_slice(&Device::cpu(1)?, &most, &[most.len()])?;
        for ranks in ranks {
            most = ranks.blocking().all_reduce(most, Reduction::Max)?.wait()?;
        }
        let most = most.to_vec::<f64>()?;
        let message = match most[0] {
            0.0 => difference(&equal, &most[1..], mesh.rank()),
            number => Some(format!("rank {} refuses it, and says why", number - 1.0)),
        };
        let Some(message) = message else { return own };
        ranks.iter().for_each(|ranks| wait_for_all(ranks));
        own?;
        let number = optimizer.steps() + 1;
        let message =
            format!("step {number}: {message}; weights and optimizer state stay as they are");
        Err(Error::value("optimizer", message))
    }

    /// Like [`DataParallel::update`], with the next step's [parameters](Optimizer::numbers) in device memory. It does not
    /// ask whether gradients are finite: a device that has found them not to be skips the update. Nor does it compare the
    /// numbers of ranks.
    ///
    /// Errors before [`DataParallel::finish_step`].
    pub fn update_with(&self, optimizer: &mut Optimizer, step: &DeviceStepParams) -> Result<()> {
        self.check_reduced()?;
        let shared = &self.shared;
        shared.reshard_weights()?;
        let tensor = TensorAxis(shared.mesh.axis(Axis::Tensor));
        optimizer.step_with(&shared.buffers, step, &tensor)?;
        match shared.sharding() {
            Sharding::None if shared.is_local() => {
                match shared.steps_to_synchronization(optimizer.steps()) {
                    0 => shared.average_weights(),
                    _ => Ok(()),
                }
            }
            Sharding::None | Sharding::Weights => Ok(()),
            Sharding::Optimizer | Sharding::Gradients => {
                // In the order of their use: buckets are in that of backward.
                let mut groups = shared.buffers.groups().iter().rev();
                groups.try_for_each(|group| shared.gather_weights(group))
            }
        }
    }

    /// Waits for the weights that [`DataParallel::update`] gathers, as each use of a parameter does: to measure time, or
    /// [traffic](crate::collective::Group::traffic), which counts calls as they end.
    ///
    /// Errors if another rank is gone.
    ///
    /// ```
    /// use ferrotron_nn::{Bias, Init, Linear, Optimizer, OptimizerConfig, Sharding, StepConfig};
    /// use ferrotron_parallel::data_parallel::{DataParallel, DataParallelConfig};
    /// use ferrotron_parallel::mesh::{Mesh, ParallelDims};
    /// use ferrotron_tensor::{DType, Device, Tensor};
    ///
    /// let sent = Mesh::run_threads(ParallelDims::new(2, 1, 1, 1)?, |mesh| {
    ///     let layer = Linear::new(&mesh.scope(&Device::cpu(1)?, DType::F32, 1), 4, 4, Bias::No, Init::Ones)?;
    ///     let config = DataParallelConfig { sharding: Sharding::Optimizer, ..DataParallelConfig::default() };
    ///     let parallel = DataParallel::new(&[&layer], mesh, &config)?;
    ///     let mut optimizer = Optimizer::new(OptimizerConfig::SGD, parallel.buffers())?;
    ///     parallel.begin_step(1);
    ///     layer.weight().leaf().var()?.sum_all()?.backward()?;
    ///     parallel.finish_step()?;
    ///     parallel.update(&mut optimizer, &StepConfig { lr: 0.1, grad_scale: 1.0 })?;
    ///     parallel.wait_for_weights()?;
    ///     Ok(mesh.dp_cp().traffic().calls_and_bytes("all_gather"))
    /// })?;
    /// assert_eq!(sent, [(1, 8 * 4), (1, 8 * 4)]);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn wait_for_weights(&self) -> Result<()> {
        self.buffers().groups().iter().try_for_each(|group| group.weights.wait())
    }
}
