//! Data parallelism and ZeRO: gradients become sums over the ranks that see other samples or positions, in
//! buckets, while backward goes on; each rank may keep a part of moments, gradients and weights.
//!
//! Rajbhandari et al., arXiv 1910.02054. With Psi parameters, N ranks along the batch axes and m
//! micro-batches a step, a rank sends, up to the rounding of parts (times (N - 1) / N):
//!
//! | [`Sharding`] | when a bucket's gradients are complete | after the update | elements a step |
//! |---|---|---|---|
//! | `None` | all-reduce, once a step | - | 2 Psi |
//! | `Optimizer` | reduce-scatter, once a step | all-gather | 2 Psi |
//! | `Gradients` | reduce-scatter, every micro-batch | all-gather | (m + 1) Psi |
//! | `Weights` | reduce-scatter, every micro-batch; weights are gathered in forward and in backward | - | 3 m Psi |
//!
//! Buckets are filled in the order in which backward completes them. What a bucket waits for is known from
//! [`Module::visit`], which meets a parameter once for each use.

use ferrotron_autograd::{Accum, Fetch, Leaf, SharedFlat, lock};
use ferrotron_nn::{
    Axis, BufferConfig, Module, Optimizer, Param, ParamBuffers, ParamGroup, Sharding, StepConfig,
};
use ferrotron_tensor::{Error, Place, Result, Tensor};
use std::sync::{Arc, Mutex};

use crate::collective::{Reduction, Work};
use crate::mesh::Mesh;
use crate::sharded_weights::GatheredWeights;

/// How gradients are reduced.
#[derive(Debug, Clone, Copy, Default)]
pub struct DataParallelConfig {
    /// What each rank keeps for itself.
    pub sharding: Sharding,
    /// Elements at which a bucket is closed; `None` is one bucket for all that can share one.
    pub bucket_numel: Option<usize>,
}

/// The parameters of this rank, their gradients' reductions, and their norm.
pub struct DataParallel {
    shared: Arc<Shared>,
    /// How often a forward pass uses each parameter, in the order of the buckets.
    uses: Vec<Vec<usize>>,
}

/// What the hooks of leaves refer to.
pub(crate) struct Shared {
    pub mesh: Mesh,
    pub sharding: Sharding,
    pub buffers: ParamBuffers,
    reductions: Vec<Mutex<Reducing>>,
    weights: Mutex<GatheredWeights>,
}

/// How far the gradients of a bucket are.
struct Reducing {
    /// Parameters whose contributions are not complete yet.
    missing: usize,
    /// The reduction under way.
    work: Option<Work<()>>,
    /// Whether the next sum replaces the kept one.
    accum: Accum,
}

impl DataParallel {
    /// Lays out the parameters of `modules`, which are all that this rank has, in buckets, and lets their
    /// gradients be reduced over `mesh`.
    ///
    /// Errors if two parameters have the same name or their dtypes differ.
    pub fn new(
        modules: &[&dyn Module],
        mesh: &Mesh,
        config: &DataParallelConfig,
    ) -> Result<DataParallel> {
        let mut params: Vec<(Param, usize)> = Vec::new();
        for module in modules {
            module.visit(&mut |param| match params
                .iter_mut()
                .find(|(known, _)| known.leaf() == param.leaf())
            {
                Some((_, uses)) => *uses += 1,
                None => params.push((param.clone(), 1)),
            });
        }
        let layout = BufferConfig {
            bucket_numel: config.bucket_numel.unwrap_or(usize::MAX),
            sharding: config.sharding,
            shard: (mesh.batch().rank(), mesh.batch().size()),
        };
        let list: Vec<Param> = params.iter().map(|(param, _)| param.clone()).collect();
        let buffers = ParamBuffers::with_config(&list, &layout)?;
        let uses_of = |param: &Param| {
            params.iter().find(|(known, _)| known.leaf() == param.leaf()).map_or(0, |(_, n)| *n)
        };
        let uses = buffers
            .groups()
            .iter()
            .map(|group| group.params.iter().map(uses_of).collect())
            .collect();
        let reducing =
            |_: &ParamGroup| Mutex::new(Reducing { missing: 0, work: None, accum: Accum::Replace });
        let shared = Arc::new(Shared {
            mesh: mesh.clone(),
            sharding: config.sharding,
            reductions: buffers.groups().iter().map(reducing).collect(),
            weights: Mutex::new(GatheredWeights::new(buffers.groups())),
            buffers,
        });
        for (bucket, group) in shared.buffers.groups().iter().enumerate() {
            for leaf in group.params.iter().map(Param::leaf) {
                if config.sharding >= Sharding::Gradients {
                    leaf.fetch_gradient_by(Shared::lend(&shared, move |shared| {
                        shared.buffers.groups()[bucket].take_gradients()
                    }))?;
                }
                if config.sharding >= Sharding::Weights {
                    leaf.fetch_value_by(Shared::lend(&shared, move |shared| {
                        lock(&shared.weights).fetch(shared, bucket)
                    }))?;
                }
            }
        }
        Ok(DataParallel { shared, uses })
    }

    /// The parameters, laid out for the optimizer.
    pub fn buffers(&self) -> &ParamBuffers {
        &self.shared.buffers
    }

    /// Before the first forward of a step of `microbatches` micro-batches: forgets all gradients.
    pub fn begin_step(&self, microbatches: usize) {
        let rounds = if self.shared.sharding < Sharding::Gradients { microbatches } else { 1 };
        for (bucket, group) in self.shared.buffers.groups().iter().enumerate() {
            *lock(&self.shared.reductions[bucket]) =
                Reducing { missing: group.params.len(), work: None, accum: Accum::Replace };
            for (param, uses) in group.params.iter().zip(&self.uses[bucket]) {
                let arrived = Shared::lend(&self.shared, move |shared| shared.arrived(bucket));
                param.leaf().zero_gradient();
                param.leaf().set_hook(uses * rounds, move |_| arrived());
            }
        }
    }

    /// After the backward of each micro-batch: where gradients are sharded, those of the micro-batch are
    /// summed and their memory is free.
    pub fn end_backward(&self) -> Result<()> {
        if self.shared.sharding < Sharding::Gradients {
            return Ok(());
        }
        (0..self.shared.reductions.len()).try_for_each(|bucket| self.shared.settle(bucket))
    }

    /// After the last backward of a step: waits until every gradient is the sum over all ranks that have a
    /// part of it.
    ///
    /// Errors, naming them, if parameters got fewer or more contributions than they have uses.
    pub fn finish_step(&self) -> Result<()> {
        self.check_complete()?;
        let shared = &self.shared;
        (0..shared.reductions.len()).try_for_each(|bucket| shared.settle(bucket))?;
        // The few gradients that are parts along other axes too: norms under sequence parallelism, then
        // embeddings that two stages hold.
        let holders = [
            (Axis::Tensor, shared.mesh.axis(Axis::Tensor)),
            (Axis::Pipeline, &shared.mesh.stages().ends),
        ];
        for (axis, group) in holders {
            let partial = |bucket: &&ParamGroup| bucket.grad_partial.contains(axis);
            let works: Vec<Work<()>> = shared
                .buffers
                .groups()
                .iter()
                .filter(partial)
                .map(|bucket| group.all_reduce_flat(reduced(bucket), Reduction::Sum))
                .collect();
            works.into_iter().try_for_each(Work::wait)?;
        }
        Ok(())
    }

    fn check_complete(&self) -> Result<()> {
        let shared = &self.shared;
        for (bucket, group) in shared.buffers.groups().iter().enumerate() {
            let missing = lock(&shared.reductions[bucket]).missing;
            let kept = shared.sharding >= Sharding::Gradients;
            if kept && missing == group.params.len() {
                continue; // settled after the last backward
            }
            for (param, uses) in group.params.iter().zip(&self.uses[bucket]) {
                let (name, found) = (param.name(), param.leaf().contributions());
                if found == 0 {
                    let message = format!("the loss does not depend on {name}");
                    return Err(Error::graph("backward", message));
                }
                if missing > 0 && !found.is_multiple_of(*uses) {
                    let message = format!(
                        "'{name}' got {found} contributions to its gradient, which are not {uses} for each micro-batch: \
                         its module's `visit` must meet it once for each use"
                    );
                    return Err(Error::graph("backward", message));
                }
            }
            if missing > 0 && !kept {
                let message = "the step had fewer micro-batches than `begin_step` was told";
                return Err(Error::graph("backward", message));
            }
        }
        Ok(())
    }

    /// The global gradient norm, the same on every rank: every element of the model counts once.
    pub fn grad_norm(&self) -> Result<f64> {
        let mut sum = 0.0;
        for group in self.shared.buffers.groups() {
            if self.shared.counts(group) {
                sum += group.sq_norm()?;
            }
        }
        Ok(self.sum_over(sum)?.sqrt())
    }

    /// The sum of one number of every rank of the world.
    fn sum_over(&self, value: f64) -> Result<f64> {
        let Some(param) = self.shared.buffers.params().next() else { return Ok(value) };
        let value = Tensor::from_slice(param.leaf().device(), &[value], &[1])?;
        self.shared.mesh.world().all_reduce(value, Reduction::Sum)?.wait()?.item()
    }

    /// Updates the weights that this rank owns and, where ranks own parts of weights that all hold, gathers
    /// them.
    pub fn update(&self, optimizer: &mut Optimizer, step: &StepConfig) -> Result<()> {
        let shared = &self.shared;
        lock(&shared.weights).free_all(shared)?;
        optimizer.step(&shared.buffers, step)?;
        if matches!(shared.sharding, Sharding::Optimizer | Sharding::Gradients) {
            let gather = |group: &ParamGroup| shared.mesh.batch().all_gather_flat(&group.weights);
            let works: Vec<_> = shared.buffers.groups().iter().map(gather).collect();
            works.into_iter().try_for_each(Work::wait)?;
        }
        Ok(())
    }

    /// Calls `f` with the parameters of each bucket, to overwrite their values.
    pub fn load(&self, mut f: impl FnMut(&[Param]) -> Result<()>) -> Result<()> {
        lock(&self.shared.weights).free_all(&self.shared)?;
        for group in self.shared.buffers.groups() {
            group.take_weights()?;
            f(&group.params)?;
            group.store_weights()?;
        }
        Ok(())
    }

    /// Calls `f` with every part of a weight that this rank writes to checkpoints: all ranks together with
    /// every element once.
    pub fn visit_weights(
        &self,
        mut f: impl FnMut(&str, &Place, Tensor) -> Result<()>,
    ) -> Result<()> {
        let batch = self.shared.mesh.batch().rank();
        for group in self.shared.buffers.groups() {
            let whole = group.weight_shard.is_none();
            if self.shared.counts(group) && !(whole && batch != 0) {
                group.visit_weights(&mut f)?;
            }
        }
        Ok(())
    }

    /// Whether this rank writes what it has of a parameter's moments to checkpoints.
    pub fn owns_moments(&self, name: &str) -> bool {
        let holds = |group: &&ParamGroup| group.params.iter().any(|param| param.name() == name);
        let group = self.shared.buffers.groups().iter().find(holds);
        group.is_some_and(|group| self.shared.counts(group))
    }
}

/// Where a bucket's sums are.
fn reduced(group: &ParamGroup) -> &SharedFlat {
    group.gradient_shard.as_ref().unwrap_or(&group.gradients)
}

impl Shared {
    /// A function for leaves. They belong to `shared`, which they must not keep alive.
    fn lend(
        shared: &Arc<Shared>,
        f: impl Fn(&Shared) -> Result<()> + Send + Sync + 'static,
    ) -> Fetch {
        let shared = Arc::downgrade(shared);
        Arc::new(move || match shared.upgrade() {
            Some(shared) => f(&shared),
            None => Err(Error::memory("data_parallel", "sharded parameters outlived their owner")),
        })
    }

    /// Whether this rank's part of a group counts: all ranks together count every element once.
    fn counts(&self, group: &ParamGroup) -> bool {
        let first = |axis: Axis| match axis {
            // Where anything is sharded, the ranks along the batch own different parts.
            Axis::Context | Axis::Data if self.sharding > Sharding::None => true,
            Axis::Pipeline => self.mesh.stages().ends.rank() == 0,
            axis => self.mesh.axis(axis).rank() == 0,
        };
        group.replicated.iter().all(first)
    }

    /// A parameter's gradient is complete.
    fn arrived(&self, bucket: usize) -> Result<()> {
        let complete = {
            let mut reducing = lock(&self.reductions[bucket]);
            reducing.missing = reducing.missing.checked_sub(1).ok_or_else(|| {
                Error::graph("backward", "a gradient arrived after its bucket was reduced")
            })?;
            reducing.missing == 0
        };
        if !complete {
            return Ok(());
        }
        let group = &self.buffers.groups()[bucket];
        let batch = self.mesh.batch();
        let work = match self.sharding {
            Sharding::None => batch.all_reduce_flat(&group.gradients, Reduction::Sum),
            _ => batch.reduce_scatter_flat(&group.gradients, Reduction::Sum),
        };
        lock(&self.reductions[bucket]).work = Some(work);
        if self.sharding >= Sharding::Gradients {
            // At most two whole buckets exist at a time.
            (0..self.reductions.len())
                .filter(|&other| other != bucket)
                .try_for_each(|other| self.settle(other))?;
        }
        Ok(())
    }

    /// Waits for a bucket's reduction and, where gradients are sharded, adds the sum to what is kept.
    fn settle(&self, bucket: usize) -> Result<()> {
        let mut reducing = lock(&self.reductions[bucket]);
        let Some(work) = reducing.work.take() else { return Ok(()) };
        work.wait()?;
        let group = &self.buffers.groups()[bucket];
        if self.sharding >= Sharding::Gradients {
            group.store_gradients(reducing.accum)?;
            reducing.accum = Accum::Add;
            reducing.missing = group.params.len();
            group.params.iter().map(Param::leaf).for_each(Leaf::zero_gradient);
        }
        Ok(())
    }
}
