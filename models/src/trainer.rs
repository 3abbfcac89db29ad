//! One training step after another: the loop's parts, without files and without a terminal.

use ferrotron_nn::schedule::Schedule;
use ferrotron_nn::{
    Context, Mode, Module, Optimizer, OptimizerConfig, ParamBuffers, Scope, StepConfig,
    clip_coefficient,
};
use ferrotron_tensor::{Device, Error, Result, Tensor};
use std::time::Instant;

use crate::batch_size::BatchSize;
use crate::checkpoint::Progress;
use crate::data::{Batch, Sampler};
use crate::gpt::{Gpt, GptConfig};

/// What a trainer needs besides model and data.
#[derive(Debug, Clone)]
pub struct TrainerConfig {
    /// Seed of initial weights, dropout and sample order.
    pub seed: u64,
    /// Which optimizer, with its constants.
    pub optimizer: OptimizerConfig,
    /// Learning rate by step.
    pub schedule: Schedule,
    /// Largest global gradient norm; 0 switches clipping off.
    pub clip_grad: f64,
    /// Samples per step and per micro-batch.
    pub batch_size: BatchSize,
}

/// What one step found.
#[derive(Debug, Clone, Copy)]
pub struct StepReport {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean loss over the counted tokens of the global batch.
    pub loss: f64,
    /// Learning rate used.
    pub lr: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Tokens seen.
    pub tokens: u64,
    /// Duration in seconds.
    pub seconds: f64,
}

/// A model in training.
pub struct Trainer {
    config: TrainerConfig,
    scope: Scope,
    gpt: Gpt,
    buffers: ParamBuffers,
    optimizer: Optimizer,
    progress: Progress,
}

impl Trainer {
    /// A model with fresh weights, at step 0.
    pub fn new(scope: &Scope, model: &GptConfig, config: TrainerConfig) -> Result<Trainer> {
        Self::with_model(scope, Gpt::new(scope, model)?, config)
    }

    /// A model with the weights it has, at step 0.
    pub fn with_model(scope: &Scope, gpt: Gpt, config: TrainerConfig) -> Result<Trainer> {
        let buffers = ParamBuffers::new(&gpt.params())?;
        let optimizer = Optimizer::new(config.optimizer, &buffers)?;
        Ok(Trainer {
            config,
            scope: scope.clone(),
            gpt,
            buffers,
            optimizer,
            progress: Progress::default(),
        })
    }

    /// What it was made with.
    pub fn config(&self) -> &TrainerConfig {
        &self.config
    }

    /// The model.
    pub fn gpt(&self) -> &Gpt {
        &self.gpt
    }

    /// Where the model was made.
    pub fn scope(&self) -> &Scope {
        &self.scope
    }

    /// The parameters, laid out for the optimizer.
    pub fn buffers(&self) -> &ParamBuffers {
        &self.buffers
    }

    /// The optimizer's state.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// The optimizer's state, to be overwritten from a checkpoint.
    pub fn optimizer_mut(&mut self) -> &mut Optimizer {
        &mut self.optimizer
    }

    /// How far the run is.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Continues from where a checkpoint was; its weights and moments are loaded by itself.
    pub fn set_progress(&mut self, progress: Progress) {
        self.progress = progress;
    }

    /// Takes one step over the next global batch of `sampler`.
    ///
    /// Errors, without touching weights or moments, if the loss or the gradient norm is not finite; the
    /// message names the step and the first offending parameter.
    pub fn step(&mut self, sampler: &Sampler) -> Result<StepReport> {
        let started = Instant::now();
        let device = self.scope.device().clone();
        let report = device.run(|| self.step_on_device(sampler))?;
        Ok(StepReport { seconds: started.elapsed().as_secs_f64(), ..report })
    }

    fn step_on_device(&mut self, sampler: &Sampler) -> Result<StepReport> {
        let consumed = self.progress.consumed_samples;
        let batches = &self.config.batch_size;
        let (global, micro) = (batches.global(consumed), batches.micro());
        let batches = (0..batches.microbatches(consumed))
            .map(|i| sampler.batch(batches.first_sample(consumed, i, 0), micro))
            .collect::<Result<Vec<Batch>>>()?;
        // Known before the first forward, so that the scale of the loss depends on no layout.
        let counted: u64 = batches.iter().map(Batch::counted).sum();

        self.buffers.zero_gradients();
        let pass = Context::new(
            self.config.seed,
            self.progress.step,
            Mode::Train,
            global,
            sampler.seq_length(),
        );
        let mut loss = 0.0;
        for batch in &batches {
            let ctx = pass.clone().micro_batch((batch.first_sample - consumed) as usize, micro);
            let (inputs, targets) = batch_tensors(self.scope.device(), batch)?;
            let sum = self.gpt.loss(&ctx, &inputs, &targets)?.sum;
            loss += sum.value().item()?;
            sum.backward_scaled(1.0 / counted as f64)?;
        }
        loss /= counted as f64;
        self.buffers.check_gradients()?;

        let grad_norm = self.buffers.sq_norm()?.sqrt();
        if !loss.is_finite() || !grad_norm.is_finite() {
            return Err(self.not_finite(loss, grad_norm)?);
        }
        let lr = self.config.schedule.lr(self.progress.step + 1);
        let grad_scale = clip_coefficient(grad_norm, self.config.clip_grad);
        self.optimizer.step(&self.buffers, &StepConfig { lr, grad_scale })?;
        self.progress.step += 1;
        self.progress.consumed_samples += global as u64;
        let tokens = (global * sampler.seq_length()) as u64;
        Ok(StepReport { step: self.progress.step, loss, lr, grad_norm, tokens, seconds: 0.0 })
    }

    fn not_finite(&self, loss: f64, grad_norm: f64) -> Result<Error> {
        let culprit = self.buffers.first_non_finite()?;
        let culprit = culprit
            .map_or("every parameter is finite".into(), |name| format!("first offender: {name}"));
        let step = self.progress.step + 1;
        Ok(Error::value(
            "train",
            format!("step {step}: loss {loss}, gradient norm {grad_norm}; {culprit}"),
        ))
    }
}

/// The tensors of a batch: inputs (B, T) and targets (B, T).
pub fn batch_tensors(device: &Device, batch: &Batch) -> Result<(Tensor, Tensor)> {
    let dims = [batch.micro_batch, batch.seq_length];
    Ok((
        Tensor::from_slice(device, &batch.inputs, &dims)?,
        Tensor::from_slice(device, &batch.targets, &dims)?,
    ))
}
