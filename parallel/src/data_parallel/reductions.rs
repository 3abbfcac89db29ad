//! Gradient reductions of buckets: started by the last gradient that arrives, waited for when the sums are needed.

use ferrotron_autograd::{Accum, Fetch, GradientReduction, Leaf, lock, missing_gradients};
use ferrotron_nn::{
    Axis, AxisSet, Param, ParamAndGradBucket, ParamAndGradBuffer, Sharding, unused_error,
};
use ferrotron_tensor::{Error, Result};
use std::sync::{Arc, Mutex, OnceLock};

use super::DataParallelConfig;
use super::sharded_weights::{UnshardPrefetcher, gather_weights};
use super::whole_parameters;
use crate::collective::{Group, Reduction, Work};
use crate::mesh::Mesh;

/// The reduction state, to which hooks of leaves refer.
pub(super) struct ReductionState {
    pub mesh: Mesh,
    pub config: DataParallelConfig,
    pub buffers: ParamAndGradBuffer,
    /// Number of uses of each parameter of each bucket in a forward pass.
    pub uses: Vec<Vec<usize>>,
    /// The hooks of their leaves that call [`ReductionState::arrived`].
    hooks: OnceLock<Vec<Vec<Arc<GradientReduction>>>>,
    pub reductions: Vec<Mutex<Reducing>>,
    /// The next bucket to be reduced, with [`Unused::Skip`].
    pub turn: Mutex<usize>,
    weights: Mutex<UnshardPrefetcher>,
    /// Whether whole gradients have memory only from the first one of a bucket in a step to the next step, as after
    /// PyTorch's `zero_grad(set_to_none=True)`: activations take it in between.
    frees_gradients: bool,
}

/// The progress of a bucket's gradients.
#[derive(Default)]
pub(super) struct Reducing {
    /// Number of parameters with missing contributions.
    pub missing: usize,
    /// Micro-batches of the step.
    pub microbatches: usize,
    /// Number of times that the bucket is still to be completed in this step: once per step or per micro-batch.
    pub rounds: usize,
    /// The reduction in progress.
    work: Option<Work<()>>,
    /// Whether the shard holds sums, to which the next reduction is added.
    has_sums: bool,
    /// Whether its gradients are complete and wait for their turn, with [`Unused::Skip`].
    pub is_ready: bool,
    /// Whether this rank contributed to each parameter in this step, with [`Unused::Skip`].
    pub contributed: Vec<bool>,
}

impl ReductionState {
    /// Creates the reductions of `buffers`, and registers hooks for sharded values with their leaves.
    pub fn new(
        mesh: &Mesh,
        config: &DataParallelConfig,
        buffers: ParamAndGradBuffer,
        uses: Vec<Vec<usize>>,
    ) -> Result<Arc<ReductionState>> {
        let device = buffers.params().next().map(|param| param.leaf().device());
        // A graph of a GPU knows the addresses, and sums behind the step need the memory. One bucket would gain nothing.
        let frees_gradients = config.sharding < Sharding::Gradients
            && config.stale_updates().is_none()
            && device.is_some_and(|device| {
                device.gpu().is_none() && buffers.numel() > config.bucket_numel(device)
            });
        let shared = Arc::new(ReductionState {
            frees_gradients,
            mesh: mesh.clone(),
            config: *config,
            uses,
            hooks: OnceLock::new(),
            reductions: buffers.groups().iter().map(|_| Mutex::default()).collect(),
            turn: Mutex::new(0),
            weights: Mutex::new(UnshardPrefetcher::new(buffers.groups(), config.unused)),
            buffers,
        });
        let mut hooks = Vec::new();
        for (bucket, group) in shared.buffers.groups().iter().enumerate() {
            let mut of_bucket = Vec::new();
            let lend = |what, f| ReductionState::lend(&shared, bucket, what, f);
            for leaf in group.params.iter().map(Param::leaf) {
                let arrived = lend("gradient", ReductionState::arrived);
                of_bucket.push(leaf.set_reduction(move || arrived())?);
                if !shared.keeps_gradients() || shared.frees_gradients {
                    leaf.set_gradient_alloc_hook(lend(
                        "gradient",
                        ReductionState::alloc_gradients,
                    ))?;
                }
                if config.sharding >= Sharding::Weights {
                    leaf.set_unshard_hook(lend("value", ReductionState::fetch_weights))?;
                }
            }
            hooks.push(of_bucket);
        }
        let hooks_are_new = shared.hooks.set(hooks).is_ok();
        debug_assert!(hooks_are_new);
        Ok(shared)
    }

    /// Wraps a function that the leaves of a bucket call before they use their `what`. `shared` owns the leaves, so they
    /// must not keep it alive.
    fn lend(
        shared: &Arc<ReductionState>,
        bucket: usize,
        what: &'static str,
        f: fn(&ReductionState, usize) -> Result<()>,
    ) -> Fetch {
        let shared = Arc::downgrade(shared);
        let gone = move || {
            let message = format!(
                "ranks held shards of its {what}, and their DataParallel is gone: call `DataParallel::unshard` instead of \
                 dropping it, and if it failed, make the model anew and load a checkpoint"
            );
            Error::memory("data_parallel", message)
        };
        Arc::new(move || f(&*shared.upgrade().ok_or_else(gone)?, bucket))
    }

    fn alloc_gradients(&self, bucket: usize) -> Result<()> {
        self.buffers.groups()[bucket].alloc_gradients()
    }

    fn fetch_weights(&self, bucket: usize) -> Result<()> {
        lock(&self.weights).fetch(self.mesh.dp_cp(), self.buffers.groups(), bucket)
    }

    pub fn sharding(&self) -> Sharding {
        self.config.sharding
    }

    /// Returns whether ranks take independent steps.
    pub fn is_local(&self) -> bool {
        self.config.synchronize_every > 1
    }

    /// Returns whether gradients of all micro-batches are accumulated locally and reduced once per step.
    pub fn keeps_gradients(&self) -> bool {
        self.sharding() < Sharding::Gradients
    }

    /// Returns whether this rank counts a value that is replicated along `replicated` in the norm: within a model
    /// replica, every element counts once.
    pub fn counts(&self, replicated: AxisSet) -> bool {
        let first = |(axis, ranks): (Axis, &Group)| !replicated.contains(axis) || ranks.rank() == 0;
        self.holders().into_iter().all(first)
    }

    /// The axes besides the batch axes along which ranks hold the same parameters, with their groups. Along the
    /// pipeline these are the first and the last stage.
    pub fn holders(&self) -> [(Axis, &Group); 2] {
        [
            (Axis::Tensor, self.mesh.axis(Axis::Tensor)),
            (Axis::Pipeline, &self.mesh.stages().embedding_group),
        ]
    }

    pub fn reshard_weights(&self) -> Result<()> {
        lock(&self.weights).free_all(self.buffers.groups())
    }

    pub fn begin_step(&self, microbatches: usize) {
        *lock(&self.turn) = 0;
        // Sums of a step that was left early still need their buffers. Their errors are those of the world's next call.
        for reducing in &self.reductions {
            let left = lock(reducing).work.take();
            drop(left.map(Work::wait));
        }
        self.buffers.zero_gradients();
        if self.frees_gradients {
            // An error, of sums that did not come, is that of the next use of the buffer too.
            self.buffers.groups().iter().for_each(|group| drop(group.free_gradients()));
        }
        // The number of completions of a bucket, and the micro-batches of each.
        let (rounds, each) =
            if self.keeps_gradients() { (1, microbatches) } else { (microbatches, 1) };
        for (bucket, group) in self.buffers.groups().iter().enumerate() {
            let missing = group.params.len();
            let contributed = vec![false; missing];
            *lock(&self.reductions[bucket]) =
                Reducing { missing, microbatches, rounds, contributed, ..Reducing::default() };
            let hooks = &self.hooks.get().expect("set by `new`")[bucket];
            self.uses[bucket].iter().zip(hooks).for_each(|(uses, hook)| hook.expect(uses * each));
        }
    }

    /// Registers that a parameter's gradient is complete.
    fn arrived(&self, bucket: usize) -> Result<()> {
        {
            let mut reducing = lock(&self.reductions[bucket]);
            match (reducing.rounds, reducing.microbatches) {
                (0, 0) => return Err(outside()),
                (0, _) => return Err(self.miscounted(bucket, 0)),
                _ => {}
            }
            reducing.missing -= 1;
            if reducing.missing > 0 {
                return Ok(());
            }
            reducing.rounds -= 1;
            reducing.missing = self.buffers.groups()[bucket].params.len();
            if self.skips_unused() {
                reducing.contributed.fill(true);
                reducing.is_ready = true;
            }
        }
        match self.skips_unused() {
            true if self.waits_within_passes() => Ok(()), // `complete_unused` reduces it
            true => self.reduce_ready(),
            false => self.reduce(bucket),
        }
    }

    /// Starts the reduction of a bucket whose gradients are complete.
    pub fn reduce(&self, bucket: usize) -> Result<()> {
        // `launch_update` sums them, when the buffers of an earlier step are free.
        if self.is_local() || self.config.stale_updates().is_some() {
            return Ok(());
        }
        let group = &self.buffers.groups()[bucket];
        let batch = self.mesh.dp_cp();
        let work = match self.sharding() {
            Sharding::None => batch.all_reduce_flat(&group.gradients, Reduction::Sum),
            _ if group.owners.is_empty() => {
                batch.reduce_scatter_flat(&group.gradients, Reduction::Sum)
            }
            _ => {
                whole_parameters::reduce(batch, group)?;
                Work::ready(())
            }
        };
        lock(&self.reductions[bucket]).work = Some(work);
        if self.keeps_gradients() {
            return Ok(());
        }
        // Only this bucket and those being filled are unsharded.
        (0..self.reductions.len())
            .filter(|&other| other != bucket)
            .try_for_each(|other| self.finish_reduction(other))
    }

    pub fn finish_reductions(&self) -> Result<()> {
        (0..self.reductions.len()).try_for_each(|bucket| self.finish_reduction(bucket))
    }

    /// Waits for a bucket's reduction and, if gradients are sharded, adds the sum to the shard.
    fn finish_reduction(&self, bucket: usize) -> Result<()> {
        let mut reducing = lock(&self.reductions[bucket]);
        let Some(work) = reducing.work.take() else { return Ok(()) };
        work.wait()?;
        if self.keeps_gradients() {
            return Ok(());
        }
        let group = &self.buffers.groups()[bucket];
        if !self.skips_unused() {
            self.check_counts(bucket, 1)?;
        }
        group.write_back_gradients(if reducing.has_sums { Accum::Add } else { Accum::Replace })?;
        reducing.has_sums = true;
        group.params.iter().map(Param::leaf).for_each(Leaf::zero_gradient);
        Ok(())
    }

    /// Errors unless every parameter got as many contributions as it has uses, in each micro-batch.
    pub fn check_complete(&self) -> Result<()> {
        for (bucket, group) in self.buffers.groups().iter().enumerate() {
            let (microbatches, rounds) = {
                let reducing = lock(&self.reductions[bucket]);
                (reducing.microbatches, reducing.rounds)
            };
            match (self.skips_unused(), self.keeps_gradients()) {
                (false, true) => {
                    self.check_counts(bucket, microbatches)?;
                    continue;
                }
                // `complete_unused` has counted the contributions.
                (true, false) if rounds > 0 => {
                    return Err(fewer(microbatches - rounds, microbatches));
                }
                (true, _) => continue,
                (false, false) => {}
            }
            let untouched = group.params.iter().all(|param| param.leaf().contributions() == 0);
            if rounds > 0 && rounds < microbatches && untouched {
                return Err(fewer(microbatches - rounds, microbatches));
            }
            self.check_counts(bucket, usize::from(rounds > 0))?;
        }
        Ok(())
    }

    /// Errors unless every parameter of a bucket got the contributions of `microbatches` micro-batches.
    fn check_counts(&self, bucket: usize, microbatches: usize) -> Result<()> {
        let params = self.buffers.groups()[bucket].params.iter().zip(&self.uses[bucket]);
        let mut counts = params.map(|(param, uses)| (param.leaf().contributions(), uses));
        if counts.all(|(found, uses)| found == uses * microbatches) {
            return Ok(());
        }
        Err(self.miscounted(bucket, microbatches))
    }

    /// The error for a bucket whose contributions do not match `microbatches` micro-batches.
    pub fn miscounted(&self, bucket: usize, microbatches: usize) -> Error {
        let params = &self.buffers.groups()[bucket].params;
        let missing = missing_gradients(params.iter().map(Param::leaf));
        if microbatches > 0 && !missing.is_empty() {
            return unused_error(missing.iter().map(String::as_str));
        }
        for (param, &uses) in params.iter().zip(&self.uses[bucket]) {
            let (name, found) = (param.name(), param.leaf().contributions());
            let wanted = uses * microbatches;
            if found < wanted && found.is_multiple_of(uses) {
                return fewer(found / uses, microbatches);
            }
            if found != wanted {
                return miscount(name, found, wanted);
            }
        }
        outside()
    }

    /// Starts gathering the weights of a group, after each rank has updated its shard.
    pub fn gather_weights(&self, group: &ParamAndGradBucket) -> Result<()> {
        gather_weights(self.mesh.dp_cp(), group)
    }

    /// Number of steps, after `steps` steps, until all ranks have equal weights.
    pub fn steps_to_synchronization(&self, steps: u64) -> u64 {
        let every = self.config.synchronization_interval() as u64;
        steps.next_multiple_of(every) - steps
    }

    /// Averages the weights over all ranks along the batch axes.
    pub fn average_weights(&self) -> Result<()> {
        let batch = self.mesh.dp_cp();
        let sum =
            |group: &ParamAndGradBucket| batch.all_reduce_flat(&group.weights, Reduction::Sum);
        let works: Vec<_> = self.buffers.groups().iter().map(sum).collect();
        works.into_iter().try_for_each(Work::wait)?;
        self.buffers.groups().iter().try_for_each(|group| group.divide_weights(batch.size()))
    }
}

impl Drop for ReductionState {
    /// Leaves no gradient behind whose memory only these buffers would allocate.
    fn drop(&mut self) {
        if !self.keeps_gradients() || self.frees_gradients {
            self.buffers.params().for_each(|param| param.leaf().unbind_gradient());
        }
    }
}

/// The error for a parameter with another number of contributions than its uses and micro-batches make.
pub(super) fn miscount(name: &str, found: usize, wanted: usize) -> Error {
    let message = format!(
        "'{name}' got {found} contributions to its gradient instead of {wanted}: its module's `visit` must meet it once \
         for each use, and `begin_step` must be told the number of micro-batches"
    );
    Error::graph("backward", message)
}

fn outside() -> Error {
    Error::graph("backward", "a gradient arrived outside of a step: call `begin_step` first")
}

fn fewer(found: usize, told: usize) -> Error {
    let message = format!("the step had {found} micro-batches where `begin_step` was told {told}");
    Error::graph("backward", message)
}
