//! One training step after another: the loop's parts, without a terminal.

mod config;

use ferrotron_nn::{
    Axis, Context, LossScaler, Mode, Module, Optimizer, ParamBuffers, Scope, StepConfig,
    UpdateConfig, clip_coefficient,
};
use ferrotron_parallel::data_parallel::DataParallel;
use ferrotron_parallel::mesh::Mesh;
use ferrotron_parallel::pipeline::{PipelineConfig, Schedule, execute};
use ferrotron_tensor::{Error, Result};
use std::path::{Path, PathBuf};
use std::time::Instant;
use tracing::trace_span;

use crate::checkpoint::{self, Checkpoint, Held, Moments, Progress, Snapshot};
use crate::data::{Batch, Samples};
use crate::gpt::{Gpt, GptConfig, GptPart};
use crate::stage::StageModel;
use crate::tokenizer::Tokenizer;

pub use config::{ParallelConfig, PrecisionConfig, TrainerConfig};

/// What one step found.
#[derive(Debug, Clone, Copy)]
pub struct StepReport {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean loss over the counted tokens of the global batch.
    pub loss: f64,
    /// Learning rate used.
    pub lr: f64,
    /// Global gradient norm before clipping; not finite in a step that was skipped.
    pub grad_norm: f64,
    /// What the loss was multiplied with before backward.
    pub loss_scale: f64,
    /// Whether the gradients overflowed and nothing was updated.
    pub skipped: bool,
    /// Tokens seen.
    pub tokens: u64,
    /// Duration in seconds.
    pub seconds: f64,
}

/// A model in training, or one rank's share of it.
pub struct Trainer {
    config: TrainerConfig,
    model: GptConfig,
    scope: Scope,
    mesh: Mesh,
    /// This rank's chunks of the model.
    parts: Vec<Gpt>,
    data_parallel: DataParallel,
    optimizer: Optimizer,
    loss_scaler: LossScaler,
    progress: Progress,
}

impl Trainer {
    /// A model with fresh weights on this rank alone, at step 0.
    pub fn new(scope: &Scope, model: &GptConfig, config: TrainerConfig) -> Result<Trainer> {
        Self::on_mesh(scope, &Mesh::single(), model, config)
    }

    /// This rank's share of a model with fresh weights, at step 0.
    pub fn on_mesh(
        scope: &Scope,
        mesh: &Mesh,
        model: &GptConfig,
        config: TrainerConfig,
    ) -> Result<Trainer> {
        let pipeline = mesh.axis(Axis::Pipeline);
        let (rank, ranks, chunks) = (pipeline.rank(), pipeline.size(), config.parallel.chunks);
        let parts = GptPart::chunks(model, rank, ranks, chunks)?;
        let parts = parts.iter().map(|part| Gpt::part(scope, mesh, model, part));
        Self::with_parts(scope, mesh, parts.collect::<Result<_>>()?, config)
    }

    /// A model with the weights it has, on this rank alone, at step 0.
    pub fn with_model(scope: &Scope, gpt: Gpt, config: TrainerConfig) -> Result<Trainer> {
        Self::with_parts(scope, &Mesh::single(), vec![gpt], config)
    }

    fn with_parts(
        scope: &Scope,
        mesh: &Mesh,
        parts: Vec<Gpt>,
        mut config: TrainerConfig,
    ) -> Result<Trainer> {
        config.parallel.data_parallel.shard_unit = config.optimizer.shard_unit();
        let loss_scaler = config.precision.loss_scaler(&config.parallel)?;
        let ParallelConfig { recompute, saved_activations, optimizer_states, .. } = config.parallel;
        let offloader = saved_activations.offloader(scope.device())?;
        let configured = |gpt: Gpt| {
            gpt.with_recompute(recompute)
                .with_saved_activations(saved_activations, offloader.clone())
        };
        let parts: Vec<Gpt> = parts.into_iter().map(configured).collect();
        let modules: Vec<&dyn Module> = parts.iter().map(|gpt| gpt as &dyn Module).collect();
        let data_parallel = DataParallel::new(&modules, mesh, &config.parallel.data_parallel)?
            .recomputing(parts.iter().flat_map(Gpt::recomputed));
        let PrecisionConfig { weight_update, rounding, .. } = config.precision;
        let update = UpdateConfig { weights: weight_update, rounding, states: optimizer_states };
        let optimizer = Optimizer::with_update(config.optimizer, data_parallel.buffers(), &update)?;
        Ok(Trainer {
            model: parts[0].config().clone(),
            config,
            scope: scope.clone(),
            mesh: mesh.clone(),
            parts,
            data_parallel,
            optimizer,
            loss_scaler,
            progress: Progress::default(),
        })
    }

    /// What it was made with.
    pub fn config(&self) -> &TrainerConfig {
        &self.config
    }

    /// What the model is made of.
    pub fn model(&self) -> &GptConfig {
        &self.model
    }

    /// This rank's chunks of the model.
    pub fn parts(&self) -> &[Gpt] {
        &self.parts
    }

    /// Where the model was made.
    pub fn scope(&self) -> &Scope {
        &self.scope
    }

    /// The ranks that train together.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The parameters, laid out for the optimizer.
    pub fn buffers(&self) -> &ParamBuffers {
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

    /// How far the run is.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Continues from where a checkpoint was; its weights and moments are loaded by themselves.
    pub fn set_progress(&mut self, progress: Progress) {
        if let Some(state) = progress.loss_scaler {
            self.loss_scaler.set_state(state);
        }
        self.progress = progress;
    }

    /// Steps that are still to be taken until all replicas of the model are the same: 0 unless they take steps
    /// of their own.
    pub fn steps_to_synchronization(&self) -> u64 {
        self.data_parallel.steps_to_synchronization(self.optimizer.steps())
    }

    /// What this rank writes into a checkpoint: of weights that several ranks hold, only the first one's.
    ///
    /// Where replicas take steps of their own they have the same weights now and then, but never the same
    /// moments: a checkpoint has those of the first replica, with which all of them go on.
    ///
    /// Errors, with the step at which it is possible, while the replicas' weights differ.
    pub fn held(&self) -> Result<(Vec<Held>, Moments)> {
        let (step, wait) = (self.progress.step, self.steps_to_synchronization());
        if wait > 0 {
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
            weights.push(Held { name: name.to_string(), place: place.clone(), tensor });
            Ok(())
        })?;
        let owns = |replicated| self.data_parallel.owns_replicated(replicated);
        let moments = Moments::of(&self.optimizer, owns)?;
        Ok((weights, moments))
    }

    /// Writes a checkpoint into a folder of its own under `folder`, and returns it. All ranks of the mesh call
    /// this; `run` is what the checkpoint says of how the run was started.
    ///
    /// Errors on every rank as [`Trainer::held`] and [`checkpoint::save`].
    pub fn save(
        &self,
        folder: &Path,
        tokenizer: Option<&Tokenizer>,
        run: serde_json::Value,
    ) -> Result<PathBuf> {
        let (weights, moments) = self.held()?;
        let (config, progress) = (&self.model, &self.progress);
        let moments = Some(moments);
        let snapshot = Snapshot { weights, moments, config, progress, tokenizer, run };
        checkpoint::save(folder, self.mesh.world(), snapshot)
    }

    /// Goes on from where a checkpoint was, saved in any layout. All ranks of the mesh call this; a checkpoint
    /// that was [peeked](Checkpoint::peek) at is verified by all of them together.
    ///
    /// Errors if it is of another model or damaged.
    pub fn load(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        checkpoint.check_config(&self.model)?;
        checkpoint.verify(self.mesh.world())?;
        self.data_parallel.load(|params| checkpoint.load_params_of_part(params))?;
        checkpoint.load_optimizer(&mut self.optimizer)?;
        self.set_progress(checkpoint.progress().clone());
        Ok(())
    }

    /// Takes one step over the next global batch of `samples`.
    ///
    /// Where the loss scale is dynamic and gradients overflow, neither weights nor moments change; the step counts,
    /// and its samples are consumed.
    ///
    /// Errors on every rank, without touching weights or moments, if the loss or, with another scale, the gradient
    /// norm of any replica is not finite; the message names the step and the first offending parameter.
    pub fn step(&mut self, samples: &dyn Samples) -> Result<StepReport> {
        let started = Instant::now();
        let device = self.scope.device().clone();
        let _span = trace_span!("step", step = self.progress.step + 1).entered();
        let report = device.run(|| self.step_on_device(samples))?;
        Ok(StepReport { seconds: started.elapsed().as_secs_f64(), ..report })
    }

    fn step_on_device(&mut self, samples: &dyn Samples) -> Result<StepReport> {
        let consumed = self.progress.consumed_samples;
        let sizes = self.config.batch_size;
        let (global, micro) = (sizes.global(consumed), sizes.micro());
        let data = self.mesh.axis(Axis::Data).clone();
        let batches = (0..sizes.microbatches(consumed))
            .map(|i| samples.batch(sizes.first_sample(consumed, i, data.rank()), micro))
            .collect::<Result<Vec<Batch>>>()?;
        // Known before the first forward, so that the scale of the loss depends on no layout.
        let counted: u64 = batches.iter().map(Batch::counted).sum();
        let ranks = self.data_parallel.loss_ranks();
        let own = ranks.sum(self.scope.device(), counted as f64)?;
        // Where ranks take steps of their own, one may have nothing to learn from.
        let scale = if own > 0.0 { 1.0 / own } else { 0.0 };
        let together = ranks.size() == data.size();
        let total = if together { own } else { data.sum(self.scope.device(), counted as f64)? };
        let seed = self.config.seed;
        let pass =
            Context::new(seed, self.progress.step, Mode::Train, global, samples.seq_length());
        let schedule = self.schedule(batches.len())?;

        self.data_parallel.begin_step(batches.len());
        let mut model = StageModel::new(&self.parts, &self.mesh, &batches, |batch| {
            pass.clone().micro_batch((batch.first_sample - consumed) as usize, micro)
        })?
        .reduced_by(&self.data_parallel);
        let loss_scale = self.loss_scaler.scale();
        execute(&schedule, &mut model, &self.mesh, scale * loss_scale)?;
        let loss = self.mesh.world().sum(self.scope.device(), model.loss()?)? / total;
        self.data_parallel.finish_step()?;

        let grad_norm = self.data_parallel.grad_norm()? / loss_scale;
        let overflow = !grad_norm.is_finite();
        let lost = !loss.is_finite() || (overflow && !self.loss_scaler.skips());
        // The norm is the replica's own where it takes steps of its own: all go on, or none.
        let lost_anywhere = match together {
            true => lost,
            false => data.sum(self.scope.device(), f64::from(u8::from(lost)))? > 0.0,
        };
        if lost_anywhere {
            return Err(self.not_finite(loss, grad_norm)?);
        }
        let update = self.optimizer.steps() + 1;
        let lr = self.config.schedule.lr(update);
        let lr = self.config.optimizer.learning_rate(lr, update);
        if !overflow {
            let _span = trace_span!("optimizer").entered();
            let grad_scale = clip_coefficient(grad_norm, self.config.clip_grad) / loss_scale;
            self.data_parallel.update(&mut self.optimizer, &StepConfig { lr, grad_scale })?;
        }
        self.loss_scaler.update(overflow);
        self.progress.loss_scaler = self.loss_scaler.skips().then(|| self.loss_scaler.state());
        self.progress.step += 1;
        self.progress.consumed_samples += global as u64;
        let tokens = (global * samples.seq_length()) as u64;
        Ok(StepReport {
            step: self.progress.step,
            loss,
            lr,
            grad_norm,
            loss_scale,
            skipped: overflow,
            tokens,
            seconds: 0.0,
        })
    }

    fn schedule(&self, microbatches: usize) -> Result<Schedule> {
        Schedule::new(&PipelineConfig {
            kind: self.config.parallel.pipeline_schedule,
            stages: self.mesh.axis(Axis::Pipeline).size(),
            microbatches,
            chunks: self.config.parallel.chunks,
        })
    }

    fn not_finite(&self, loss: f64, grad_norm: f64) -> Result<Error> {
        let culprit = self.buffers().first_non_finite()?;
        let culprit = match culprit {
            Some(name) => format!("first offender: {name}"),
            None if loss.is_finite() && grad_norm.is_finite() => {
                "another replica's gradient norm is not finite".into()
            }
            None => "every parameter of this rank is finite".into(),
        };
        let step = self.progress.step + 1;
        Ok(Error::value(
            "train",
            format!("step {step}: loss {loss}, gradient norm {grad_norm}; {culprit}"),
        ))
    }
}
