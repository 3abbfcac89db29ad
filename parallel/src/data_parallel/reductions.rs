//! The reductions of buckets: begun by the last gradient that arrives, waited for when the sums are needed.

use ferrotron_autograd::{Accum, Fetch, Leaf, lock, missing_gradients};
use ferrotron_nn::{Axis, AxisSet, Param, ParamBuffers, ParamGroup, Sharding};
use ferrotron_tensor::{Error, Result};
use std::sync::{Arc, Mutex};

use super::DataParallelConfig;
use super::sharded_weights::GatheredWeights;
use super::whole_parameters;
use crate::collective::{Group, Reduction, Work};
use crate::mesh::Mesh;

/// What the hooks of leaves refer to.
pub(super) struct Shared {
    pub mesh: Mesh,
    pub config: DataParallelConfig,
    pub buffers: ParamBuffers,
    /// How often a forward pass uses each parameter of each bucket.
    uses: Vec<Vec<usize>>,
    reductions: Vec<Mutex<Reducing>>,
    weights: Mutex<GatheredWeights>,
}

/// How far the gradients of a bucket are.
#[derive(Default)]
struct Reducing {
    /// Parameters whose contributions are not complete yet.
    missing: usize,
    /// Micro-batches of the step.
    microbatches: usize,
    /// How often the bucket has still to be complete in this step: once, or after each micro-batch.
    rounds: usize,
    /// The reduction under way.
    work: Option<Work<()>>,
    /// Whether sums are kept to which the next is added.
    has_sums: bool,
}

impl Shared {
    /// The reductions of `buffers`, whose leaves from now on ask here for what is sharded.
    pub fn new(
        mesh: &Mesh,
        config: &DataParallelConfig,
        buffers: ParamBuffers,
        uses: Vec<Vec<usize>>,
    ) -> Result<Arc<Shared>> {
        let shared = Arc::new(Shared {
            mesh: mesh.clone(),
            config: *config,
            uses,
            reductions: buffers.groups().iter().map(|_| Mutex::default()).collect(),
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
        Ok(shared)
    }

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

    pub fn sharding(&self) -> Sharding {
        self.config.sharding
    }

    /// Whether ranks take steps of their own.
    pub fn is_local(&self) -> bool {
        self.config.synchronize_every > 1
    }

    /// Whether the gradients of all micro-batches are added up here before they are reduced, once a step.
    pub fn keeps_gradients(&self) -> bool {
        self.sharding() < Sharding::Gradients
    }

    /// Whether this rank's part of what is the same along the axes `replicated` counts in the norm: within a
    /// replica of the model, every element counts once.
    pub fn counts(&self, replicated: AxisSet) -> bool {
        let first = |(axis, ranks): (Axis, &Group)| !replicated.contains(axis) || ranks.rank() == 0;
        self.holders().into_iter().all(first)
    }

    /// The axes besides those of the batch along which ranks hold the same parameters, and the ranks that
    /// do. Along the pipeline they are its two ends.
    pub fn holders(&self) -> [(Axis, &Group); 2] {
        [(Axis::Tensor, self.mesh.axis(Axis::Tensor)), (Axis::Pipeline, &self.mesh.stages().ends)]
    }

    pub fn free_weights(&self) -> Result<()> {
        lock(&self.weights).free_all(self)
    }

    pub fn begin_step(self: &Arc<Shared>, microbatches: usize) {
        // How often a bucket is complete, and after how many micro-batches.
        let (rounds, each) =
            if self.keeps_gradients() { (1, microbatches) } else { (microbatches, 1) };
        for (bucket, group) in self.buffers.groups().iter().enumerate() {
            let missing = group.params.len();
            *lock(&self.reductions[bucket]) =
                Reducing { missing, microbatches, rounds, work: None, has_sums: false };
            for (param, uses) in group.params.iter().zip(&self.uses[bucket]) {
                let arrived = Shared::lend(self, move |shared| shared.arrived(bucket));
                param.leaf().zero_gradient();
                param.leaf().set_hook(uses * each, move |_| arrived());
            }
        }
    }

    /// A parameter's gradient is complete.
    fn arrived(&self, bucket: usize) -> Result<()> {
        {
            let mut reducing = lock(&self.reductions[bucket]);
            if reducing.rounds == 0 {
                return Err(self.miscounted(bucket, 0));
            }
            reducing.missing -= 1;
            if reducing.missing > 0 {
                return Ok(());
            }
            reducing.rounds -= 1;
            reducing.missing = self.buffers.groups()[bucket].params.len();
        }
        if self.is_local() {
            return Ok(());
        }
        let group = &self.buffers.groups()[bucket];
        let batch = self.mesh.batch();
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
        // Only this bucket and those being filled are whole.
        (0..self.reductions.len())
            .filter(|&other| other != bucket)
            .try_for_each(|other| self.settle(other))
    }

    pub fn settle_all(&self) -> Result<()> {
        (0..self.reductions.len()).try_for_each(|bucket| self.settle(bucket))
    }

    /// Waits for a bucket's reduction and, where gradients are sharded, adds the sum to what is kept.
    fn settle(&self, bucket: usize) -> Result<()> {
        let mut reducing = lock(&self.reductions[bucket]);
        let Some(work) = reducing.work.take() else { return Ok(()) };
        work.wait()?;
        if self.keeps_gradients() {
            return Ok(());
        }
        let group = &self.buffers.groups()[bucket];
        self.check_counts(bucket, 1)?;
        group.store_gradients(if reducing.has_sums { Accum::Add } else { Accum::Replace })?;
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
            if self.keeps_gradients() {
                self.check_counts(bucket, microbatches)?;
                continue;
            }
            let untouched = group.params.iter().all(|param| param.leaf().contributions() == 0);
            if rounds > 0 && rounds < microbatches && untouched {
                return Err(fewer(microbatches - rounds, microbatches));
            }
            self.check_counts(bucket, usize::from(rounds > 0))?;
        }
        Ok(())
    }

    /// Errors unless every parameter of a bucket got the contributions of `microbatches`.
    fn check_counts(&self, bucket: usize, microbatches: usize) -> Result<()> {
        let params = self.buffers.groups()[bucket].params.iter().zip(&self.uses[bucket]);
        let mut counts = params.map(|(param, uses)| (param.leaf().contributions(), uses));
        if counts.all(|(found, uses)| found == uses * microbatches) {
            return Ok(());
        }
        Err(self.miscounted(bucket, microbatches))
    }

    /// Why not every parameter of a bucket got the contributions of `microbatches`.
    fn miscounted(&self, bucket: usize, microbatches: usize) -> Error {
        let params = &self.buffers.groups()[bucket].params;
        let missing = missing_gradients(params.iter().map(Param::leaf));
        if microbatches > 0 && !missing.is_empty() {
            let message = format!("the loss does not depend on {}", missing.join(", "));
            return Error::graph("backward", message);
        }
        for (param, &uses) in params.iter().zip(&self.uses[bucket]) {
            let (name, found) = (param.name(), param.leaf().contributions());
            let wanted = uses * microbatches;
            if found < wanted && found.is_multiple_of(uses) {
                return fewer(found / uses, microbatches);
            }
            if found != wanted {
                let message = format!(
                    "'{name}' got {found} contributions to its gradient instead of {wanted}: its module's `visit` must meet it once for each \
                     use, and `begin_step` must be told the number of micro-batches"
                );
                return Error::graph("backward", message);
            }
        }
        Error::graph("backward", "a gradient arrived outside of a step: call `begin_step` first")
    }

    /// Gathers the weights of a group, of which each rank has updated what it owns.
    pub fn gather_weights(&self, group: &ParamGroup) -> Result<Work<()>> {
        if group.owners.is_empty() {
            return Ok(self.mesh.batch().all_gather_flat(&group.weights));
        }
        whole_parameters::gather(self.mesh.batch(), group)?;
        Ok(Work::ready(()))
    }

    /// Steps that are still to be taken, after `steps` of them, until all ranks have the same weights.
    pub fn steps_to_synchronization(&self, steps: u64) -> u64 {
        let every = self.config.synchronize_every as u64;
        steps.next_multiple_of(every) - steps
    }

    /// The mean of the weights of all ranks of the batch, on each of them.
    pub fn average_weights(&self) -> Result<()> {
        let batch = self.mesh.batch();
        let sum = |group: &ParamGroup| batch.all_reduce_flat(&group.weights, Reduction::Sum);
        let works: Vec<_> = self.buffers.groups().iter().map(sum).collect();
        works.into_iter().try_for_each(Work::wait)?;
        self.buffers.groups().iter().try_for_each(|group| group.divide_weights(batch.size()))
    }
}

fn fewer(found: usize, told: usize) -> Error {
    let message = format!("the step had {found} micro-batches where `begin_step` was told {told}");
    Error::graph("backward", message)
}

/// Errors unless the facts of a parameter are such that its gradients can be reduced: parts along the axes of
/// the batch, and along another axis only if all ranks there hold the same elements.
pub(super) fn check_facts(param: &Param) -> Result<()> {
    let (partial, replicated) = (param.grad_partial(), param.replicated());
    let batch = [Axis::Context, Axis::Data]
        .into_iter()
        .all(|axis| partial.contains(axis) && replicated.contains(axis));
    if batch && partial.iter().all(|axis| replicated.contains(axis)) {
        return Ok(());
    }
    let name = param.name();
    let message = format!(
        "'{name}' is replicated along {replicated:?} with partial gradients along {partial:?}: gradients must be parts \
         along Context and Data, and along no axis that cuts the parameter"
    );
    Err(Error::config("data_parallel", message))
}
