//! Trains any [`Model`]: one step after another, in any layout, without a terminal.

mod asynchronous;
mod bad_step;
mod begin;
mod config;
mod equal_ranks;
mod graph;
mod imported_weights;
mod named_parameters;
mod outcome;
mod outstanding;
mod read;
mod report;
mod rewind;
mod step;
mod times;
mod unflushed;
mod window;

use ferrotron_nn::{
    Axis, LossScaleState, LossScaler, Module, Optimizer, ParamAndGradBuffer, Scope, StepConfig,
    UpdateConfig,
};
use ferrotron_parallel::data_parallel::DataParallel;
use ferrotron_parallel::mesh::Mesh;
use ferrotron_parallel::pipeline::{PipelineSchedule, WeightVersions};
use ferrotron_tensor::ops::loss_scale::DeviceLossScale;
use ferrotron_tensor::ops::step::DeviceStepParams;
use ferrotron_tensor::{Device, Error, Result};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};

use crate::io::checkpoint;
use crate::io::checkpoint::{
    Checkpoint, LocalShard, Moments, PendingSave, SavedModel, Snapshot, SnapshotBuffers, TrainState,
};
use crate::io::data::FiniteSamples;
use crate::io::tokenizer::Tokenizer;
use crate::training::evaluate::{Evaluation, LocalModel, evaluate};
use crate::training::stop::StopFlag;

pub use crate::training::microbatch::Microbatch;
pub use crate::training::model::{
    ActivationOptions, LossTerm, Model, ModelChunk, StageOutput, parameter_names,
};
pub use bad_step::{BadStepConfig, OnBadStep};
pub use begin::BegunStep;
pub use config::{
    ExecutionMode, ParallelConfig, PrecisionConfig, SaveMode, ScheduleUnit, TrainerConfig,
};
use equal_ranks::check_configs;
use graph::StepGraph;
use named_parameters::{check_kept_in_fp32, freeze, keep_in_fp32};
use outstanding::OutstandingStep;
use report::Reports;
pub use report::StepReport;
pub use times::RankTimes;

/// A model in training, or one rank's share of it.
pub struct Trainer<M: Model> {
    /// The steps that are replayed, with [`ExecutionMode::CudaGraph`]. They are dropped before the groups whose calls they have.
    graph: Option<StepGraph>,
    config: TrainerConfig,
    model: M::Config,
    scope: Scope,
    mesh: Mesh,
    /// This rank's chunks of the model.
    parts: Vec<M>,
    data_parallel: DataParallel,
    optimizer: Optimizer,
    loss_scaler: LossScaler,
    progress: TrainState,
    /// The device of numbers that ranks agree on before a step: a GPU's would have to be waited for.
    host: Device,
    /// The numbers of the step that the optimizer's kernels read.
    step: DeviceStepParams,
    /// The loss scale that the device's kernels read and adapt.
    loss_scale: DeviceLossScale,
    reports: Reports,
    times: RankTimes,
    /// The steps whose updates are not applied yet, earliest first.
    outstanding: VecDeque<OutstandingStep>,
    /// The loss terms that some rank has returned.
    returned_terms: Vec<&'static str>,
    /// The schedule of the last number of micro-batches.
    schedule: Option<(usize, PipelineSchedule)>,
    /// The versions of the weights, if the pipeline is not flushed between steps.
    versions: Option<WeightVersions>,
    /// Whether steps without a flush have failed: parameters may then have the weights of any step.
    window_failed: bool,
    /// The buffers from which checkpoints are written, with [`SaveMode::Async`].
    snapshot: Option<SnapshotBuffers>,
}

impl<M: Model> Trainer<M> {
    /// A model with fresh weights on this rank alone, at step 0.
    pub fn new(scope: &Scope, model: &M::Config, config: TrainerConfig) -> Result<Trainer<M>> {
        Self::on_mesh(scope, &Mesh::single(), model, config)
    }

    /// This rank's share of a model with fresh weights, at step 0.
    ///
    /// Errors, in one line, if parts of the configuration do not go together or do not suit the mesh, or if ranks have
    /// other configurations.
    pub fn on_mesh(
        scope: &Scope,
        mesh: &Mesh,
        model: &M::Config,
        config: TrainerConfig,
    ) -> Result<Trainer<M>> {
        let pipeline = mesh.axis(Axis::Pipeline);
        let (rank, ranks, chunks) = (pipeline.rank(), pipeline.size(), config.parallel.chunks);
        let parts = ModelChunk::chunks(M::num_blocks(model), rank, ranks, chunks)?;
        let scope = &keep_in_fp32::<M>(&config, scope, model)?;
        let parts = parts.iter().map(|part| M::new_chunk(scope, mesh, model, part));
        Self::with_parts(scope, mesh, model, parts.collect::<Result<_>>()?, config)
    }

    /// A model with the weights it has, on this rank alone, at step 0; `config` is the one it was made of.
    pub fn with_model(
        scope: &Scope,
        config: &M::Config,
        model: M,
        trainer: TrainerConfig,
    ) -> Result<Trainer<M>> {
        let parts = vec![model];
        check_kept_in_fp32(&trainer, scope, config, &parts)?;
        Self::with_parts(scope, &Mesh::single(), config, parts, trainer)
    }

    fn with_parts(
        scope: &Scope,
        mesh: &Mesh,
        model: &M::Config,
        parts: Vec<M>,
        mut config: TrainerConfig,
    ) -> Result<Trainer<M>> {
        check_configs::<M>(scope, mesh, model, &config)?;
        config.parallel.data_parallel.optimizer = config.optimizer;
        config.batch_size.check_ranks(mesh.axis(Axis::Data).size())?;
        config.check_execution(mesh.axis(Axis::Pipeline).size())?;
        config.check_bad_steps()?;
        config.check_async()?;
        config.check_unflushed()?;
        if config.ema_decay.is_some() && config.parallel.data_parallel.synchronize_every > 1 {
            let message = "does not go with replicas that take steps of their own: it would be that of the first one";
            return Err(Error::config("ema-decay", message));
        }
        let device = scope.device();
        if config.parallel.data_parallel.stale_updates().is_some() && device.is_gpu() {
            return Err(Error::config("--async-data-parallel", TrainerConfig::ASYNC_NEEDS_CPU));
        }
        config.execution.check(device, mesh.world())?;
        let loss_scaler = config.precision.loss_scaler(&config.parallel)?;
        let ParallelConfig { recompute, saved_activations, optimizer_states, .. } = config.parallel;
        let offloader = saved_activations.offloader(scope.device())?;
        let options = ActivationOptions { recompute, saved_activations, offloader };
        let configured = |part: M| part.with_activation_options(&options);
        let parts: Vec<M> = parts.into_iter().map(configured).collect::<Result<_>>()?;
        freeze(&config, scope, model, &parts)?;
        let modules: Vec<&dyn Module> = parts.iter().map(|part| part as &dyn Module).collect();
        let data_parallel = DataParallel::new(&modules, mesh, &config.parallel.data_parallel)?
            .recomputing(parts.iter().flat_map(M::recomputed));
        let PrecisionConfig { weight_update, rounding, .. } = config.precision;
        let (states, ema_decay) = (optimizer_states, config.ema_decay);
        let update = UpdateConfig { weights: weight_update, rounding, states, ema_decay };
        let optimizer = Optimizer::with_update(config.optimizer, data_parallel.buffers(), &update)?;
        config.check_rule(&optimizer)?;
        let host = if device.is_gpu() { Device::cpu(1)? } else { device.clone() };
        let versions = config.weight_versions(mesh, &data_parallel, &host)?;
        let numbers = optimizer.numbers(&StepConfig { lr: 0.0, grad_scale: 1.0 });
        let step = DeviceStepParams::new(device, &numbers)?;
        let reports = Reports::new(device)?;
        let loss_scale =
            DeviceLossScale::new(device, &loss_scaler.state(), reports.outcomes.rows())?;
        let mut trainer = Trainer {
            model: model.clone(),
            config,
            scope: scope.clone(),
            mesh: mesh.clone(),
            parts,
            data_parallel,
            optimizer,
            loss_scaler,
            progress: TrainState::default(),
            host,
            step,
            loss_scale,
            reports,
            times: RankTimes::default(),
            outstanding: VecDeque::new(),
            returned_terms: Vec::new(),
            schedule: None,
            versions,
            window_failed: false,
            graph: None,
            snapshot: None,
        };
        if trainer.config.saves == SaveMode::Async {
            let (weights, moments) = trainer.local_shards()?;
            trainer.snapshot = Some(checkpoint::allocate_buffers(weights, Some(moments))?);
        }
        Ok(trainer)
    }

    /// The trainer's configuration.
    pub fn config(&self) -> &TrainerConfig {
        &self.config
    }

    /// The model's configuration.
    pub fn model(&self) -> &M::Config {
        &self.model
    }

    /// This rank's chunks of the model.
    pub fn parts(&self) -> &[M] {
        &self.parts
    }

    /// The scope in which the model was made.
    pub fn scope(&self) -> &Scope {
        &self.scope
    }

    /// The device on which ranks agree on numbers of the host, so that none waits for a GPU: the scope's, where that is
    /// a CPU.
    pub fn host(&self) -> &Device {
        &self.host
    }

    /// The ranks that train together.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The parameters, laid out for the optimizer.
    pub fn buffers(&self) -> &ParamAndGradBuffer {
        self.data_parallel.buffers()
    }

    /// The parameters and the reductions of their gradients.
    pub fn data_parallel(&self) -> &DataParallel {
        &self.data_parallel
    }

    /// The optimizer's state.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// Evaluates the model on all of `samples`; `None` if a rank was asked to stop. All ranks of the mesh call this.
    ///
    /// Errors as [`evaluate`].
    pub fn evaluate(
        &self,
        samples: &dyn FiniteSamples,
        stop: &StopFlag,
    ) -> Result<Option<Evaluation>> {
        self.check_state("evaluate")?;
        evaluate(&self.local_model(), samples, self.config.batch_size, stop, |_| ())
    }

    /// This rank's chunks of the model, to evaluate it.
    pub fn local_model(&self) -> LocalModel<'_, M> {
        let Trainer { parts, model: config, scope, mesh, .. } = self;
        LocalModel { parts, config, scope, mesh }
    }

    /// The progress of the run.
    pub fn progress(&self) -> &TrainState {
        &self.progress
    }

    /// Releases the memory of a captured step, with [`ExecutionMode::CudaGraph`]. An evaluation then takes no more
    /// beside the weights than a step did. The steps after it are captured anew.
    pub fn release_graph(&mut self) {
        self.graph = None;
    }

    /// Continues from where a checkpoint was; its weights and moments are loaded by themselves.
    pub fn set_progress(&mut self, progress: TrainState) {
        if let Some((scale, steady, patience)) = progress.loss_scaler {
            self.loss_scaler.set_state(LossScaleState { scale, steady, patience });
        }
        self.progress = progress;
    }

    /// Returns the tensors that this rank writes into a checkpoint: its share of state that several ranks along the
    /// batch axes hold.
    ///
    /// Replicas that take steps of their own have equal weights after each synchronization, but never equal moments. A
    /// checkpoint has the moments of the first replica, and all replicas resume with them.
    ///
    /// Errors while the replicas' weights differ, with the step at which they will not. Errors until the caller has
    /// read the [reports](Trainer::drain_reports) of all steps, and behind steps without a flush that have failed.
    pub fn local_shards(&self) -> Result<(Vec<LocalShard>, Moments)> {
        if self.reports.is_unread() {
            let message = "nobody knows yet whether a step was lost: ask for the reports first";
            return Err(Error::config("checkpoint", message));
        }
        self.check_state("checkpoint")?;
        let (step, wait) = (self.progress.step, self.steps_to_synchronization());
        if wait > 0 && !self.is_async() {
            let every = self.config.parallel.data_parallel.synchronize_every;
            let message = format!(
                "the replicas' weights differ after step {step}, they are synchronized every {every} steps: it can \
                 be saved after step {}",
                step + wait
            );
            return Err(Error::config("checkpoint", message));
        }
        let mut weights = Vec::new();
        self.data_parallel.visit_weights(|name, place, tensor| {
            weights.push(LocalShard { name: name.to_string(), place: place.clone(), tensor });
            Ok(())
        })?;
        let moments =
            Moments::from_optimizer(&self.optimizer, self.data_parallel.written_states())?;
        Ok((weights, moments))
    }

    /// Writes a checkpoint into a folder of its own under `folder`, and returns it. All ranks of the mesh call
    /// this; `run` is what the checkpoint says of how the run was started.
    ///
    /// Errors on every rank as [`Trainer::local_shards`] and [`checkpoint::save`].
    pub fn save(
        &self,
        folder: &Path,
        tokenizer: Option<&Tokenizer>,
        run: serde_json::Value,
    ) -> Result<PathBuf> {
        checkpoint::save(folder, self.mesh.world(), self.checkpoint_snapshot(tokenizer, run)?)
    }

    /// Like [`Trainer::save`], but waits for no disk: it returns when weights and optimizer state are copied. See
    /// [`PendingSave`].
    ///
    /// Errors as [`Trainer::save`]; without [`SaveMode::Async`]; and while an earlier save is not done.
    pub fn save_async(
        &self,
        folder: &Path,
        tokenizer: Option<&Tokenizer>,
        run: serde_json::Value,
    ) -> Result<PendingSave> {
        let Some(buffers) = &self.snapshot else {
            let message = "the trainer has no memory for a copy: make it with SaveMode::Async";
            return Err(Error::config("checkpoint", message));
        };
        let snapshot = self.checkpoint_snapshot(tokenizer, run)?;
        checkpoint::save_async(folder, self.mesh.world(), snapshot, buffers)
    }

    /// This rank's part of a checkpoint.
    fn checkpoint_snapshot<'a>(
        &'a self,
        tokenizer: Option<&'a Tokenizer>,
        run: serde_json::Value,
    ) -> Result<Snapshot<'a>> {
        let (weights, moments) = self.local_shards()?;
        let model = SavedModel::new(M::ARCHITECTURE, &self.model)?;
        Ok(Snapshot {
            weights,
            moments: Some(moments),
            model,
            progress: &self.progress,
            tokenizer,
            run,
        })
    }

    /// Resumes from a checkpoint, saved in any layout. All ranks of the mesh call this, and read it together: each file is
    /// read once, compared with its checksum meanwhile, and each rank gets what it holds. So [`Checkpoint::peek`] is enough.
    ///
    /// Errors if it is of another model, or has a weight that the model has not, which the next checkpoint would lose;
    /// nothing is changed then. Errors on all ranks if a file is damaged; the trainer may then go on from another
    /// checkpoint, and from nothing else. Entries of its progress that are not known are kept for the next one.
    pub fn load(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        self.check_drained("checkpoint")?;
        M::check_checkpoint(checkpoint, &self.model)?;
        let names = parameter_names::<M>(&self.model, self.scope.dtype())?;
        checkpoint.check_names(names.iter().map(String::as_str))?;
        self.graph = None; // it knows where weights and moments were
        self.reports.forget()?;
        if let Some(versions) = &mut self.versions {
            // Those of failed steps may have left another version in the parameters than the newest.
            versions.restart(self.data_parallel.buffers())?;
        }
        let world = self.mesh.world();
        checkpoint.load_training_state(world, &self.data_parallel, &mut self.optimizer)?;
        self.set_progress(checkpoint.progress().clone());
        self.window_failed = false;
        Ok(())
    }
}
