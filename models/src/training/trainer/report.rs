//! Step reports, read back from the device. On a GPU the host reads the results of many steps at once, on request.

use ferrotron_nn::{LossScaleState, LossScaler};
use ferrotron_parallel::agreement::wait_for_all;
use ferrotron_parallel::collective::Group;
use ferrotron_tensor::ops::outcome::{StepMetrics, StepMetricsLog};
use ferrotron_tensor::{Device, Result, Tensor};
use std::time::Instant;

use crate::io::checkpoint::TrainState;
use crate::training::loss::LossReduction;

/// The results of one step.
#[derive(Debug, Clone)]
pub struct StepReport {
    /// Index of the step, from 1.
    pub step: u64,
    /// The loss: the weighted sum of its terms.
    pub loss: f64,
    /// The mean of each loss term over the global batch, by name.
    pub losses: Vec<(&'static str, f64)>,
    /// Learning rate of the step.
    pub lr: f64,
    /// Global gradient norm before clipping; not finite if the step was skipped.
    pub grad_norm: f64,
    /// Factor of the loss before backward.
    pub loss_scale: f64,
    /// Whether the gradients overflowed under a dynamic loss scale, and the update was skipped.
    pub skipped: bool,
    /// The reason why the step is bad and its update was skipped: see [`BadStepConfig`](super::BadStepConfig).
    pub bad_step: Option<String>,
    /// Step of the checkpoint to which training was rewound behind a bad step.
    pub rewound_to: Option<u64>,
    /// The updates that the weights missed at which each rank along the data axis computed its gradient of the step; empty
    /// unless they are [asynchronous](ferrotron_parallel::data_parallel::AsyncUpdates).
    pub staleness: Vec<usize>,
    /// Samples of the global batch.
    pub samples: u64,
    /// Tokens of the global batch.
    pub tokens: u64,
    /// Duration in seconds; the mean if several steps were read together.
    pub seconds: f64,
    /// Seconds that this rank has waited for samples.
    pub data_seconds: f64,
}

/// Number of steps whose results a GPU keeps. When it is reached, they are read.
const KEPT: usize = 1024;

/// The steps whose reports were not returned yet.
pub(super) struct Reports {
    /// The results, in device memory.
    pub outcomes: StepMetricsLog,
    /// Steps whose results were not read.
    unread: Vec<InFlightStep>,
    /// Reports that were read.
    read: Vec<StepReport>,
}

/// The host's record of a step that was enqueued.
pub(super) struct InFlightStep {
    pub lr: f64,
    pub loss_scale: f64,
    pub samples: u64,
    pub tokens: u64,
    pub started: Instant,
    /// Seconds until the samples were there.
    pub data_seconds: f64,
    /// The reduction of loss terms to means.
    pub loss: LossReduction,
    /// The sums of several loss terms, in device memory.
    pub sums: Option<Tensor>,
    /// The state of the run and of the optimizer before the step.
    pub before: TrainState,
    pub updates: u64,
    /// The updates that the weights of each rank missed.
    pub staleness: Vec<usize>,
}

/// A step whose loss or gradient norm was not finite.
pub(super) struct FailedStep {
    pub given: InFlightStep,
    pub loss: f64,
    pub grad_norm: f64,
    /// Number of later steps.
    pub later: usize,
}

/// The state of a dynamic loss scale as [`TrainState`] has it.
pub(super) fn saved_state(scaler: &LossScaler) -> Option<(f64, u64, u64)> {
    let LossScaleState { scale, steady, patience } = scaler.state();
    scaler.skips().then_some((scale, steady, patience))
}

/// The steps that were skipped among those that are read, and the loss scale behind them.
pub(super) struct SkippedSteps {
    pub scaler: LossScaler,
    pub steps: u64,
    pub samples: u64,
}

impl SkippedSteps {
    /// None yet, behind the state `scaler`.
    pub fn new(scaler: LossScaler) -> SkippedSteps {
        SkippedSteps { scaler, steps: 0, samples: 0 }
    }

    /// Corrects the host's record of the next step, which took those before it for applied.
    fn correct(&self, given: &mut InFlightStep) {
        given.updates -= self.steps;
        given.before.skipped_samples += self.samples;
        given.before.loss_scaler = saved_state(&self.scaler);
    }

    /// Counts a step that has not failed.
    fn count(&mut self, given: &InFlightStep, skipped: bool) {
        self.scaler.update(skipped);
        self.steps += u64::from(skipped);
        self.samples += if skipped { given.samples } else { 0 };
    }
}

impl Reports {
    /// Creates an empty log. On a CPU the results of each step are read immediately.
    pub fn new(device: &Device) -> Result<Reports> {
        let kept = if device.is_gpu() { KEPT } else { 1 };
        Ok(Reports {
            outcomes: StepMetricsLog::new(device, kept)?,
            unread: Vec::new(),
            read: Vec::new(),
        })
    }

    /// Adds a step that was enqueued.
    pub fn push(&mut self, given: InFlightStep) {
        self.unread.push(given);
    }

    /// Returns whether the log is full.
    pub fn is_full(&self) -> bool {
        self.unread.len() == self.outcomes.rows()
    }

    /// The samples of the latest step that was not read.
    pub fn samples_in_flight(&self) -> Option<u64> {
        self.unread.last().map(|given| given.samples)
    }

    /// Returns whether there are unread steps.
    pub fn is_unread(&self) -> bool {
        !self.unread.is_empty()
    }

    /// Reads the results of all steps, in one transfer, and returns the first failed step, if any. Later steps get no
    /// reports. Counts the skipped steps before it.
    ///
    /// Errors if a collective of `world` has failed, which makes the results invalid, and as [`LossReduction::means`].
    pub fn read(
        &mut self,
        world: &Group,
        skipped_steps: &mut SkippedSteps,
    ) -> Result<Option<FailedStep>> {
        let Some(first) = self.unread.first() else { return Ok(None) };
        let (found, stopped) = self.outcomes.read(self.unread.len())?;
        world.check()?;
        let seconds = first.started.elapsed().as_secs_f64() / found.len() as f64;
        let (mut lost, count) = (None, found.len());
        // By the number of applied steps before: see `DeviceLossScale`.
        let lrs: Vec<f64> = self.unread.iter().map(|given| given.lr).collect();
        for (index, (mut given, found)) in self.unread.drain(..).zip(found).enumerate() {
            let StepMetrics { loss, grad_norm, loss_scale } = found;
            skipped_steps.correct(&mut given);
            (given.lr, given.loss_scale) = (lrs[index - skipped_steps.steps as usize], loss_scale);
            if Some(index) == stopped {
                lost = Some(FailedStep { given, loss, grad_norm, later: count - index - 1 });
                break;
            }
            let skipped = !grad_norm.is_finite();
            skipped_steps.count(&given, skipped);
            let report = report(&given, loss, grad_norm);
            let report = report.inspect_err(|_| wait_for_all(world))?;
            self.read.push(StepReport { skipped, seconds, ..report });
        }
        Ok(lost)
    }

    /// Adds the report of a step whose results were read otherwise, after `seconds`. Errors as [`LossReduction::means`].
    pub fn push_read(
        &mut self,
        given: InFlightStep,
        loss: f64,
        grad_norm: f64,
        seconds: f64,
    ) -> Result<()> {
        let report = report(&given, loss, grad_norm)?;
        self.read.push(StepReport { seconds, ..report });
        Ok(())
    }

    /// Adds the report of a bad step behind which training continues, and clears the log.
    pub fn push_bad(&mut self, failed: &FailedStep, why: String) -> Result<()> {
        let FailedStep { given, loss, grad_norm, .. } = failed;
        let report = report(given, *loss, *grad_norm)?;
        self.read.push(StepReport { bad_step: Some(why), ..report });
        self.outcomes.clear()
    }

    /// The report of the most recent step, if it was read.
    pub fn last(&mut self) -> Option<&mut StepReport> {
        self.read.last_mut().filter(|_| self.unread.is_empty())
    }

    /// Discards the most recent report that was read.
    pub fn drop_last(&mut self) {
        self.read.pop();
    }

    /// Discards all steps.
    pub fn forget(&mut self) -> Result<()> {
        self.unread.clear();
        self.read.clear();
        self.outcomes.clear()
    }

    /// Puts reports that were [taken](Reports::take) before all others.
    pub fn put_back(&mut self, reports: Vec<StepReport>) {
        self.read.splice(0..0, reports);
    }

    /// Takes the reports that were read.
    pub fn take(&mut self) -> Vec<StepReport> {
        std::mem::take(&mut self.read)
    }
}

/// The report of a step with these results.
fn report(given: &InFlightStep, loss: f64, grad_norm: f64) -> Result<StepReport> {
    let sums = given.sums.as_ref().map(Tensor::to_f64).transpose()?;
    Ok(StepReport {
        step: given.before.step + 1,
        loss,
        losses: given.loss.means(loss, sums.as_deref())?,
        lr: given.lr,
        grad_norm,
        loss_scale: given.loss_scale,
        skipped: false,
        bad_step: None,
        rewound_to: None,
        staleness: given.staleness.clone(),
        samples: given.samples,
        tokens: given.tokens,
        seconds: given.started.elapsed().as_secs_f64(),
        data_seconds: given.data_seconds,
    })
}
