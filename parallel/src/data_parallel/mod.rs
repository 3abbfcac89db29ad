//! Data parallelism and ZeRO: gradients are summed over the ranks with other samples or positions, in buckets,
//! overlapped with backward. Moments, gradients and weights may be sharded.
//!
//! Rajbhandari et al., arXiv 1910.02054. With Psi parameters, N ranks along the batch axes and m micro-batches per
//! step, a rank sends, up to the rounding of shards (times (N - 1) / N):
//!
//! | [`Sharding`] | when a bucket's gradients are complete | after the update | elements per step |
//! |---|---|---|---|
//! | `None` | all-reduce, once per step | - | 2 Psi |
//! | `Optimizer` | reduce-scatter, once per step | all-gather, during the next forward | 2 Psi |
//! | `Gradients` | reduce-scatter, every micro-batch | all-gather, during the next forward | (m + 1) Psi |
//! | `Weights` | reduce-scatter, every micro-batch; all-gather of weights in forward and in backward | - | 3 m Psi |
//!
//! In a pipeline a micro-batch's gradients are those of one chunk of the stage, so no bucket spans two chunks, and weights
//! are gathered in the order in which the schedule runs chunks.
//!
//! `Weights` sends less than that, since two buckets stay gathered between forward and backward:
//! [`DataParallel::expected_traffic`] computes the exact bytes.
//!
//! Buckets are filled in the order in which backward completes them. The number of contributions that a bucket waits
//! for comes from [`Module::visit`], which visits a parameter once per use.
//!
//! With [`DataParallelConfig::synchronize_every`] above 1 this is local SGD (Stich, arXiv 1805.09767): ranks train
//! independently and average their weights periodically. With [`DataParallelConfig::async_updates`] they do not wait for
//! the updates of the latest steps.

mod asynchronous;
mod checkpoint_shares;
mod config;
mod digests;
mod equal_ranks;
mod facts;
mod gradient_parts;
mod module_params;
mod outstanding;
mod reductions;
mod replicas;
mod shard_exchange;
mod sharded_weights;
mod stages;
mod traffic;
mod unshard;
mod unused;
mod update;
mod whole_parameters;

pub use config::{AsyncUpdates, DataParallelConfig, ReplicaCheck, unsupported_reason};
pub use outstanding::UpdateSums;
pub use traffic::ExpectedTraffic;

use ferrotron_autograd::{Leaf, lock};
use ferrotron_nn::{
    Axis, BufferConfig, Module, Param, ParamAndGradBucket, ParamAndGradBuffer, Sharding, Unused,
};
use ferrotron_tensor::{DType, Device, Error, Result, Tensor};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use crate::collective::{Group, Reduction, Work};
use crate::mesh::Mesh;
use equal_ranks::check_setup;
use facts::{check_facts, check_gathers};
use module_params::ModuleParams;
use outstanding::Outstanding;
use reductions::ReductionState;
use stages::check_stages;

/// The parameters of this rank, with the reductions of their gradients and their norm.
///
/// The order of calls in a step, for one rank or many:
///
/// ```
/// use ferrotron_autograd::Var;
/// use ferrotron_nn::{
///     Bias, Init, Linear, Optimizer, OptimizerConfig, Scope, Sharding, StepConfig, clip_coefficient,
/// };
/// use ferrotron_parallel::collective::{WorldConfig, run_threads};
/// use ferrotron_parallel::data_parallel::{DataParallel, DataParallelConfig};
/// use ferrotron_parallel::mesh::{ParallelDims, Mesh};
/// use ferrotron_parallel::tensor_parallel::SequenceParallel;
/// use ferrotron_tensor::{DType, Device, Tensor};
///
/// let norms = run_threads(2, &WorldConfig::default(), |world| {
///     let mesh = Mesh::new(&world, ParallelDims::new(2, 1, 1, 1)?, SequenceParallel::Off)?; // dp 2
///     let device = Device::cpu(1)?;
///     let layer = Linear::new(&Scope::new(&device, DType::F64, 1), 3, 1, Bias::No, Init::Ones)?;
///     let config = DataParallelConfig { sharding: Sharding::Optimizer, ..DataParallelConfig::default() };
///     let parallel = DataParallel::new(&[&layer], &mesh, &config)?;
///     let mut optimizer = Optimizer::new(OptimizerConfig::SGD, parallel.buffers())?;
///
///     let microbatches = 2;
///     parallel.begin_step(microbatches);
///     for _ in 0..microbatches {
///         let x = Tensor::full(&device, DType::F64, &[1, 3], 1.0)?; // this rank's sample
///         let loss = layer.forward(&Var::constant(x))?.sum_all()?;
///         loss.backward_scaled(1.0 / 4.0)?; // one over what counts in the global batch
///         parallel.end_backward()?;
///     }
///     parallel.finish_step()?;
///     let norm = parallel.grad_norm()?;
///     let step = StepConfig { lr: 0.1, grad_scale: clip_coefficient(norm, 1.0) };
///     parallel.update(&mut optimizer, &step)?;
///     Ok(norm)
/// });
/// for norm in norms {
///     assert_eq!(norm?, 3.0_f64.sqrt()); // each derivative is the mean over four samples of 1
/// }
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub struct DataParallel {
    shared: Arc<ReductionState>,
    /// Each trainable parameter with its bucket, in the order of use in a forward pass.
    visits: Vec<(Leaf, usize)>,
    /// The ranges of visits of the modules: the chunks of a pipeline stage.
    chunks: Vec<Range<usize>>,
    /// The ranges of visits whose forward is recomputed in backward.
    recomputed: Vec<Range<usize>>,
    device: Device,
    /// Whether gradients that are parts over the tensor axis were seen to differ between ranks.
    parts_differ: AtomicBool,
    /// Whether the gradients of the step are summed over all ranks.
    is_reduced: AtomicBool,
    outstanding: Mutex<Outstanding>,
}

impl DataParallel {
    /// Places the parameters of `modules`, which are all parameters of this rank, in buckets, and registers the
    /// reductions of their gradients over `mesh`.
    ///
    /// # Errors
    ///
    /// Errors if there is no parameter, all are frozen on the only pipeline stage, two have the same name, or were
    /// made in scopes of different dtypes. Errors if [`unsupported_reason`] rejects
    /// the configuration. Errors, naming it, if the facts of a parameter would train it wrongly on `mesh`: a shard that
    /// is said to be replicated, or, with sequence parallelism, a replicated parameter that says nothing of its
    /// gradients along the tensor axis. Errors, without any change, if other buffers train a parameter, or if it was of a
    /// `DataParallel` that was dropped with shards of its weights instead of [`DataParallel::unshard`]; and on all ranks
    /// along the pipeline, which exchange the names of their parameters, if two stages hold a parameter that is not of a
    /// [`Mesh::tied_scope`], or that others than the first and the last stage hold, or have random layers on one path.
    /// Errors on all ranks if their scopes have other seeds, those of other pipeline stages included, or if `config` is not
    /// the same.
    pub fn new(
        modules: &[&dyn Module],
        mesh: &Mesh,
        config: &DataParallelConfig,
    ) -> Result<DataParallel> {
        let modules = ModuleParams::new(modules);
        let (params, chunks) = (&modules.params, modules.chunks());
        let is_only_stage = mesh.layout().size(Axis::Pipeline) == 1;
        // Where a pipeline interleaves chunks, each completes the gradients of its micro-batch apart.
        let is_cut = config.sharding >= Sharding::Gradients && !is_only_stage && chunks.len() > 1;
        // Refusals may differ between ranks, which exchange them: none may return before.
        let refusal = unsupported_reason(config, mesh.layout()).or_else(|| {
            let stage = config.sharding as usize;
            if is_cut && config.unused == Unused::Skip {
                Some(format!(
                    "ZeRO stage {stage} reduces the gradients of each chunk of a pipeline stage apart, so it needs those of \
                     all parameters: make one chunk, or let unused parameters be refused"
                ))
            } else if let Some(name) = modules.shared.as_ref().filter(|_| is_cut) {
                Some(format!(
                    "ZeRO stage {stage} reduces the gradients of each chunk of a pipeline stage apart, and two chunks use \
                     '{name}': use stage 0 or 1"
                ))
            } else if params.is_empty() {
                Some(format!("rank {} has no parameters: use fewer stages", mesh.rank()))
            } else if is_only_stage && !params.iter().any(Param::is_trainable) {
                Some(format!(
                    "all {} parameters are frozen: nothing is left to train",
                    params.len()
                ))
            } else {
                None
            }
        });
        let refused = refusal.map_or(Ok(()), |why| Err(Error::config("data_parallel", why)));
        let check = |param: &Param| {
            check_facts(param, mesh)?;
            check_gathers(param, mesh, config.optimizer)?;
            // Before anything moves: the buffers of another owner would no longer be those of its parameters.
            param.check_unowned()
        };
        let checked = refused.and_then(|()| params.iter().try_for_each(check));
        check_setup(params, mesh, config, checked)?;
        check_stages(params, mesh)?;
        let device = params[0].leaf().device().clone();
        let bucket_numel = config.bucket_numel(&device);
        let trained = params.iter().filter(|param| param.is_trainable());
        let numel: usize = trained.map(|param| param.leaf().numel()).sum();
        // What fits into one bucket is not cut into several because of an axis with one rank.
        let is_one_bucket = is_only_stage && numel <= bucket_numel;
        let divides = |&axis: &Axis| match axis {
            _ if !is_one_bucket => true,
            // Gradients are summed over both at once.
            Axis::Context | Axis::Data => mesh.dp_cp().size() > 1,
            Axis::Tensor | Axis::Pipeline => mesh.axis(axis).size() > 1,
        };
        let layout = BufferConfig {
            bucket_numel,
            sharding: config.sharding,
            optimizer: config.optimizer,
            shard: (mesh.dp_cp().rank(), mesh.dp_cp().size()),
            gradients: config.gradients,
            unused: config.unused,
            ranks: mesh.world().size(),
            axes: Axis::ALL.into_iter().filter(divides).collect(),
        };
        let buffers = match is_cut {
            true => ParamAndGradBuffer::with_chunks(&chunks, &layout)?,
            false => ParamAndGradBuffer::with_config(params, &layout)?,
        };
        let ((visits, chunks), uses) = (modules.visits(&buffers), modules.uses(&buffers));
        let outstanding = Mutex::new(Outstanding::new(&buffers, config.stale_updates())?);
        let shared = ReductionState::new(mesh, config, buffers, uses)?;
        let (parts_differ, is_reduced) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(DataParallel {
            shared,
            visits,
            chunks,
            recomputed: Vec::new(),
            device,
            parts_differ,
            is_reduced,
            outstanding,
        })
    }

    /// Declares the recomputed regions by their parameters, in the order of the modules. Only
    /// [`DataParallel::expected_traffic`] uses this.
    #[must_use]
    pub fn recomputing(mut self, regions: impl IntoIterator<Item = Vec<Param>>) -> DataParallel {
        let place = |mut params: Vec<Param>| {
            params.retain(Param::is_trainable);
            if params.is_empty() {
                return None;
            }
            let is_here = |start: &usize| {
                let visited = self.visits[*start..].iter().map(|(leaf, _)| leaf);
                visited.take(params.len()).eq(params.iter().map(Param::leaf))
            };
            let start = (0..self.visits.len()).find(is_here)?;
            Some(start..start + params.len())
        };
        self.recomputed = regions.into_iter().filter_map(place).collect();
        self
    }

    /// The parameters in flat buffers for the optimizer.
    pub fn buffers(&self) -> &ParamAndGradBuffer {
        &self.shared.buffers
    }

    /// The group over which the loss is averaged: all ranks along the data axis, or this rank alone if ranks take
    /// independent steps or do not wait for updates. The loss is scaled by one over the number of valid tokens in this
    /// group, and by one over the number of ranks too where gradients are summed without waiting.
    pub fn loss_ranks(&self) -> Group {
        if self.shared.is_local() || self.shared.config.stale_updates().is_some() {
            return Group::single();
        }
        self.shared.mesh.axis(Axis::Data).clone()
    }

    /// Starts a step of `microbatches` micro-batches: discards all gradients. To be called before the first forward.
    pub fn begin_step(&self, microbatches: usize) {
        self.is_reduced.store(false, Relaxed);
        lock(&self.outstanding).begin_step();
        self.shared.begin_step(microbatches);
    }

    /// Ends the backward of a micro-batch in a chunk; call it after each. If gradients are sharded, reduces those of the
    /// micro-batch and frees their memory: in a pipeline the forwards of later micro-batches may have run before.
    pub fn end_backward(&self) -> Result<()> {
        if self.shared.keeps_gradients() {
            return Ok(());
        }
        self.shared.complete_unused()?;
        self.shared.finish_reductions()?;
        match self.shared.gathers_all() {
            true => self.shared.reshard_weights(),
            false => Ok(()),
        }
    }

    /// Starts the reductions that wait for parameters which this rank did not use in the step: see
    /// [`Unused::Skip`]. [`DataParallel::finish_step`] does it otherwise.
    ///
    /// Ranks start different reductions here. To start another collective before `finish_step`, as of the loss, call
    /// this first: groups of the same ranks carry out their calls in one order, which must be the same on every rank.
    pub fn reduce_unused(&self) -> Result<()> {
        match self.shared.keeps_gradients() {
            true => self.shared.complete_unused(),
            false => Ok(()), // each `end_backward` did
        }
    }

    /// Ends the step; call it after its last backward. Waits until every gradient is summed over all ranks with a
    /// partial gradient.
    ///
    /// Errors, naming them, if parameters got fewer or more contributions than they have uses, and with
    /// [`ReplicaCheck::EveryStep`] as [`DataParallel::check_replicas`]. Errors in the first step if, with sequence
    /// parallelism, a model does not cut its positions: sums over the tensor axis would be too large.
    pub fn finish_step(&self) -> Result<()> {
        self.reduce_unused()?;
        let shared = &self.shared;
        shared.finish_reductions()?;
        shared.check_complete()?;
        shared.tell_contributions(self.device())?;
        self.check_parts()?;
        // Gradients that are partial along other axes too: of norms with sequence parallelism, then of embeddings
        // shared by two stages.
        for (axis, group) in shared.holders() {
            let partial = |bucket: &&ParamAndGradBucket| bucket.grad_partial.contains(axis);
            let works: Vec<Work<()>> = shared
                .buffers
                .groups()
                .iter()
                .filter(partial)
                .map(|bucket| group.all_reduce_flat(bucket.reduced_grads(), Reduction::Sum))
                .collect();
            works.into_iter().try_for_each(Work::wait)?;
        }
        self.is_reduced.store(true, Relaxed);
        match shared.config.replica_check {
            ReplicaCheck::Off => Ok(()),
            ReplicaCheck::EveryStep => self.check_replicas(),
        }
    }

    /// Errors before [`DataParallel::finish_step`] of a step: sums of gradients over ranks are still to be made.
    fn check_reduced(&self) -> Result<()> {
        if self.is_reduced.load(Relaxed) {
            return Ok(());
        }
        let message = "the gradients are not summed over ranks yet: call `finish_step` after the last backward of a step";
        Err(Error::graph("data_parallel", message))
    }

    /// The global gradient norm, equal on every rank: each element of the model counts once. If ranks take
    /// independent steps, it is the norm of this rank's own gradients.
    ///
    /// Errors before [`DataParallel::finish_step`].
    pub fn grad_norm(&self) -> Result<f64> {
        Ok(self.sq_norm()?.item()?.sqrt())
    }

    /// The square of [`DataParallel::grad_norm`], an f64 tensor of one element on the device. It does not
    /// synchronize, unless collectives of GPU tensors go through host memory.
    pub fn sq_norm(&self) -> Result<Tensor> {
        self.sq_norm_over(&[Axis::Tensor, Axis::Pipeline])
    }

    /// The square of the norm of this pipeline stage's gradients, equal on its ranks. Other stages take no part.
    pub fn stage_sq_norm(&self) -> Result<Tensor> {
        self.sq_norm_over(&[Axis::Tensor])
    }

    fn sq_norm_over(&self, axes: &[Axis]) -> Result<Tensor> {
        self.check_reduced()?;
        let shared = &self.shared;
        // Written by the host, so that a fake device also has a valid number.
        let mut sum = Tensor::full(self.device(), DType::F64, &[1], 0.0)?;
        for group in shared.buffers.groups().iter().filter(|group| shared.counts(group.replicated))
        {
            group.add_sq_norm(&mut sum)?;
        }
        for axis in axes {
            sum = shared.mesh.axis(*axis).blocking().all_reduce(sum, Reduction::Sum)?.wait()?;
        }
        if shared.sharding() > Sharding::None {
            sum = shared.mesh.dp_cp().blocking().all_reduce(sum, Reduction::Sum)?.wait()?;
        }
        Ok(sum)
    }

    fn device(&self) -> &Device {
        &self.device
    }

    /// Number of steps, after `steps` steps, until all ranks along the batch axes have equal weights: 0 unless they take
    /// independent steps or do not wait for updates. The caller counts: updates where ranks take independent steps, as
    /// [`DataParallel::update`] does; steps of the run with its skipped ones where they do not wait. A resumed run
    /// keeps the same period.
    pub fn steps_to_synchronization(&self, steps: u64) -> u64 {
        self.shared.steps_to_synchronization(steps)
    }
}
