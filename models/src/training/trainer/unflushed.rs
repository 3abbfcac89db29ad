//! Checks of the configuration of a pipeline without a flush, and its weight versions.

use ferrotron_nn::{Axis, Param};
use ferrotron_parallel::data_parallel::DataParallel;
use ferrotron_parallel::mesh::Mesh;
use ferrotron_parallel::pipeline::WeightVersions;
use ferrotron_tensor::{Device, Error, Result};

use super::TrainerConfig;

impl TrainerConfig {
    /// Errors, in one line, if the pipeline is not flushed and something in the configuration needs one.
    ///
    /// | rejected | reason |
    /// |---|---|
    /// | clipping by the global norm | the norm of a step is not known when its first stage is updated |
    /// | a dynamic loss scale; bad steps that are skipped, spikes of the loss | a step would be taken back on stages that have had later updates |
    /// | replicas that take steps of their own | two kinds of staleness |
    /// | a batch size that grows | all steps between two drains have one schedule |
    pub fn check_unflushed(&self) -> Result<()> {
        let (kind, every) = (self.parallel.pipeline_schedule, self.parallel.drain_interval);
        if kind.flushes() {
            return Ok(());
        }
        let mut sizes = self.batch_size.all_microbatches();
        let first = sizes.next();
        let why = if every == 0 {
            return Err(Error::config("--pipeline-drain-interval", "must be positive, got 0"));
        } else if self.clip_grad > 0.0 {
            format!(
                "{kind} updates stages before the global gradient norm is known, and clip-grad is {}: add --clip-grad 0",
                self.clip_grad
            )
        } else if self.precision.loss_scaler(&self.parallel)?.skips() {
            format!(
                "{kind} cannot take back a step that overflows: use bf16, or give a constant --loss-scale"
            )
        } else if self.bad_steps.needs_host() {
            format!(
                "{kind} cannot take back a bad step: leave out --on-bad-step skip or rewind, and --loss-spike-factor"
            )
        } else if self.parallel.data_parallel.synchronize_every > 1 {
            format!(
                "{kind} does not go with replicas that take steps of their own: leave out --local-sgd-steps"
            )
        } else if sizes.any(|size| Some(size) != first) {
            format!("{kind} needs the same batch size in all steps: leave out --rampup-batch-size")
        } else {
            return Ok(());
        };
        Err(Error::config("--pipeline-schedule", why))
    }

    /// Memory for the weight versions of this rank's stage, if the pipeline is not flushed.
    ///
    /// Errors on all ranks if two stages hold one parameter: its gradients would be of different steps.
    pub(super) fn weight_versions(
        &self,
        mesh: &Mesh,
        data_parallel: &DataParallel,
        host: &Device,
    ) -> Result<Option<WeightVersions>> {
        let kind = self.parallel.pipeline_schedule;
        if kind.flushes() {
            return Ok(None);
        }
        let shared = |param: &Param| param.grad_partial().contains(Axis::Pipeline);
        let shared = data_parallel.buffers().params().any(shared);
        if mesh.world().sum(host, f64::from(u8::from(shared)))? > 0.0 {
            let remedy = "add --untie-embeddings-and-output-weights if it is a GPT, or use 1f1b";
            return Err(Error::config("--pipeline-schedule", kind.refuses_tied_embeddings(remedy)));
        }
        let pipeline = mesh.axis(Axis::Pipeline);
        let stored = kind.stashed_versions(pipeline.size(), pipeline.rank());
        WeightVersions::new(data_parallel.buffers(), stored).map(Some)
    }
}
