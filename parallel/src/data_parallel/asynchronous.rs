//! Asynchronous updates: a rank goes on with weights that miss the updates of up to K steps, instead of waiting for the
//! slowest.
//!
//! Every step still has one update, of the sum of all ranks' gradients, and the updates are applied in the order of the
//! steps. Only the weights at which a rank computes its gradient depend on time: it applies what has come in between two
//! steps, and waits where K steps are outstanding. With g(r, w) the gradient of rank r's samples in step n at the weights
//! w, which have n - 1 - s(r) updates,
//!
//!   w(n) = w(n-1) - update(sum over r of g(r, w(n - 1 - s(r)))),  0 <= s(r) <= K
//!
//! This is the stale synchronous form of asynchronous data parallelism (Harlap et al., PipeDream, arXiv 1806.03377);
//! the bound is that of Ho et al., NIPS 2013. The n-th weights are the same on every rank, so norms and
//! moments are too. The staleness s(r) travels with the gradients: with it a serial program repeats the run.
//!
//! All ranks make the same calls in the same order, one all-reduce for each bucket and one of a few numbers a step, and
//! nothing else in between; so no rank can wait for one that waits for it.

use ferrotron_autograd::{SharedFlatBuffer, lock};
use ferrotron_tensor::{DType, Error, Result, Tensor};
use std::sync::atomic::Ordering::Relaxed;

use super::DataParallel;
use super::outstanding::{LaunchedStep, Outstanding, UpdateSums};

impl DataParallel {
    /// Number of steps whose updates are not applied yet: 0 without [`AsyncUpdates`](super::AsyncUpdates).
    pub fn outstanding_steps(&self) -> usize {
        lock(&self.outstanding).steps.len()
    }

    /// Returns whether [`DataParallel::complete_update`] would return the sums of a step without waiting.
    pub fn update_is_ready(&self) -> bool {
        lock(&self.outstanding).steps.front().is_some_and(LaunchedStep::is_done)
    }

    /// Ends a step of asynchronous updates, in place of [`DataParallel::finish_step`]; call it after its last backward.
    /// Starts to sum its gradients over all ranks, with `numbers`, as many on every rank. If as many steps are outstanding
    /// as may be, waits for the earliest and returns its sums: the caller then [updates](DataParallel::update) with them.
    ///
    /// Each rank scales its loss so that the sum over all ranks is the one to be trained: a rank does not know what the
    /// others count in the same step.
    ///
    /// ```
    /// use ferrotron_autograd::Var;
    /// use ferrotron_nn::{Bias, Init, Linear, Optimizer, OptimizerConfig, Scope, StepConfig};
    /// use ferrotron_parallel::collective::{WorldConfig, run_threads};
    /// use ferrotron_parallel::data_parallel::{AsyncUpdates, DataParallel, DataParallelConfig};
    /// use ferrotron_parallel::mesh::{Mesh, ParallelDims};
    /// use ferrotron_parallel::tensor_parallel::SequenceParallel;
    /// use ferrotron_tensor::{DType, Device, Tensor};
    ///
    /// let weights = run_threads(2, &WorldConfig::default(), |world| {
    ///     let mesh = Mesh::new(&world, ParallelDims::new(2, 1, 1, 1)?, SequenceParallel::Off)?;
    ///     let device = Device::cpu(1)?;
    ///     let layer = Linear::new(&Scope::new(&device, DType::F64, 1), 1, 1, Bias::No, Init::Ones)?;
    ///     let updates = AsyncUpdates { max_staleness: 2, ..AsyncUpdates::default() };
    ///     let config = DataParallelConfig { async_updates: Some(updates), ..DataParallelConfig::default() };
    ///     let parallel = DataParallel::new(&[&layer], &mesh, &config)?;
    ///     let mut optimizer = Optimizer::new(OptimizerConfig::SGD, parallel.buffers())?;
    ///     let mut update = || parallel.update(&mut optimizer, &StepConfig { lr: 0.25, grad_scale: 1.0 });
    ///     for _ in 0..4 {
    ///         while parallel.update_is_ready() {
    ///             parallel.complete_update()?;
    ///             update()?;
    ///         }
    ///         parallel.begin_step(1);
    ///         let x = Tensor::full(&device, DType::F64, &[1, 1], 1.0)?;
    ///         layer.forward(&Var::constant(x))?.sum_all()?.backward_scaled(0.5)?; // one half on each of two ranks
    ///         if let Some(sums) = parallel.launch_update(&[])? {
    ///             assert!(sums.staleness.iter().all(|&steps| steps <= 2));
    ///             update()?;
    ///         }
    ///     }
    ///     while parallel.complete_update()?.is_some() {
    ///         update()?;
    ///     }
    ///     layer.weight().leaf().value()?.item()
    /// });
    /// for weight in weights {
    ///     assert_eq!(weight?, 0.0); // the gradient is 1 at any weights
    /// }
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    ///
    /// Errors as [`DataParallel::finish_step`] for contributions that are missing, and without
    /// [`AsyncUpdates`](super::AsyncUpdates).
    pub fn launch_update(&self, numbers: &[f64]) -> Result<Option<UpdateSums>> {
        self.shared.check_complete()?;
        let ranks = self.shared.mesh.dp_cp();
        let mut outstanding = lock(&self.outstanding);
        let Some(staleness) = outstanding.staleness.take() else { return Err(not_launchable()) };
        let (gradients, sums) = match outstanding.free.pop() {
            Some(free) => (free, None),
            None => {
                let first = outstanding.steps.pop_front().ok_or_else(not_launchable)?;
                let (gradients, sums) = first.wait(ranks.size())?;
                (gradients, Some(sums))
            }
        };
        self.swap(&gradients)?;
        let own = |rank| if rank == ranks.rank() { staleness as f64 } else { 0.0 };
        let numbers: Vec<f64> = numbers.iter().copied().chain((0..ranks.size()).map(own)).collect();
        let numbers = Tensor::from_slice(&outstanding.host, &numbers, &[numbers.len()])?;
        outstanding.steps.push_back(LaunchedStep::new(ranks, gradients, numbers)?);
        self.is_reduced.store(sums.is_some(), Relaxed);
        Ok(sums)
    }

    /// Waits for the gradients of the earliest outstanding step, puts them into the gradient buffers and returns the other
    /// sums; `None` if no step is outstanding. The caller then [updates](DataParallel::update) with them.
    ///
    /// Errors between [`DataParallel::begin_step`] and [`DataParallel::launch_update`], where the buffers are in use.
    pub fn complete_update(&self) -> Result<Option<UpdateSums>> {
        let mut outstanding = lock(&self.outstanding);
        let Some(first) = outstanding.steps.pop_front() else { return Ok(None) };
        if outstanding.staleness.is_some() {
            outstanding.steps.push_front(first);
            let message =
                "the buffers hold the gradients of the step under way: call `launch_update` first";
            return Err(Error::graph("data_parallel", message));
        }
        let (gradients, sums) = first.wait(self.shared.mesh.dp_cp().size())?;
        self.swap(&gradients)?;
        outstanding.free.push(gradients);
        self.is_reduced.store(true, Relaxed);
        Ok(Some(sums))
    }

    /// Gives up all outstanding steps, where every rank ends at the same one. Joins in the sums of `missing` further steps
    /// that other ranks may have launched, with gradients and `numbers` that nobody uses. Waits for all sums and applies
    /// none, so that every rank has made the same calls.
    ///
    /// Errors if the communication fails.
    pub fn abandon_updates(&self, missing: usize, numbers: usize) -> Result<()> {
        let ranks = self.shared.mesh.dp_cp();
        let mut outstanding = lock(&self.outstanding);
        let Outstanding { steps, free, staleness, host } = &mut *outstanding;
        *staleness = None;
        for _ in 0..missing {
            if free.is_empty() {
                let first = steps.pop_front().ok_or_else(not_launchable)?;
                free.push(first.wait(ranks.size())?.0);
            }
            let gradients = free.pop().ok_or_else(not_launchable)?;
            let unused = Tensor::zeros(host, DType::F64, &[numbers + ranks.size()])?;
            steps.push_back(LaunchedStep::new(ranks, gradients, unused)?);
        }
        for step in steps.drain(..) {
            free.push(step.wait(ranks.size())?.0);
        }
        Ok(())
    }

    /// Exchanges the memory of the gradient buffers with that of others.
    fn swap(&self, others: &[SharedFlatBuffer]) -> Result<()> {
        for (group, other) in self.buffers().groups().iter().zip(others) {
            std::mem::swap(&mut *group.gradients.lock()?, &mut *other.lock()?);
        }
        Ok(())
    }
}

fn not_launchable() -> Error {
    let message = "gradients are launched once for each `begin_step`, and with `AsyncUpdates` alone: use `finish_step`";
    Error::graph("data_parallel", message)
}
