//! The loss scale in the memory of a device, which adapts it without the host.
//!
//! A skipped step is no update: bias correction and the learning rate of the steps behind it count one less. A host that is
//! several steps ahead does not know how many were skipped. It gives each step the number and the learning rate of the case
//! that none is; the device keeps these learning rates by number, and takes that of the update that it comes to.
//!
//! Overflows halve and steps without one double the scale, by the rule of Megatron-LM (`grad_scaler.py`).

use ferrotron_cuda::arguments;

pub use super::config::{LossScaleRule, LossScaleState};
use super::step::{DeviceStepParams, StepParams};
use crate::{DType, Device, Error, Result, Tensor, cuda};

impl LossScaleRule {
    /// The state behind a step with or without an overflow.
    ///
    /// ```
    /// use ferrotron_tensor::ops::loss_scale::{LossScaleRule, LossScaleState};
    /// let rule = LossScaleRule { window: 1000, hysteresis: 1, minimum: 1.0 };
    /// let state = LossScaleState { scale: 8.0, steady: 7, patience: 1 };
    /// assert_eq!(rule.next(state, true), LossScaleState { scale: 4.0, steady: 0, patience: 0 });
    /// assert_eq!(rule.next(state, false), LossScaleState { steady: 8, ..state });
    /// ```
    pub fn next(&self, state: LossScaleState, overflow: bool) -> LossScaleState {
        let LossScaleRule { window, hysteresis, minimum } = *self;
        let LossScaleState { scale, steady, patience } = state;
        if overflow {
            let patience = patience.saturating_sub(1);
            let scale = if patience == 0 { (scale / 2.0).max(minimum) } else { scale };
            return LossScaleState { scale, steady: 0, patience };
        }
        match steady + 1 == window {
            true => LossScaleState { scale: scale * 2.0, steady: 0, patience: hysteresis },
            false => LossScaleState { steady: steady + 1, ..state },
        }
    }
}

/// The loss scale that kernels of a device read and [`check_step`](super::outcome::check_step) adapts, and the number of
/// updates so far.
///
/// ```
/// use ferrotron_tensor::ops::loss_scale::{DeviceLossScale, LossScaleState};
/// use ferrotron_tensor::ops::step::{DeviceStepParams, StepParams};
/// use ferrotron_tensor::Device;
/// let device = Device::cpu(1)?;
/// let mut loss_scale = DeviceLossScale::new(&device, &LossScaleState::constant(8.0), 4)?;
/// assert_eq!(loss_scale.gradient(&device, 0.25)?.item()?, 2.0);
/// let numbers = StepParams { update: 1, lr: 0.1, grad_scale: 1.0 };
/// let mut step = DeviceStepParams::new(&device, &numbers)?;
/// loss_scale.begin_step(&mut step, &StepParams { update: 2, ..numbers }, None)?;
/// assert_eq!(step.read()?.unwrap().update, 1); // no step was applied yet
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug)]
pub struct DeviceLossScale(Storage);

#[derive(Debug)]
enum Storage {
    /// The state, and the learning rates of the latest possible updates, by their number.
    Host { state: arguments::LossScale, lrs: Vec<f64> },
    /// The state, followed by the learning rates.
    Gpu(Tensor),
}

impl DeviceLossScale {
    /// Writes the loss scale of a run without updates to memory that kernels of `device` read. The host may be `ahead` steps
    /// ahead, at least 1.
    pub fn new(device: &Device, state: &LossScaleState, ahead: usize) -> Result<DeviceLossScale> {
        let (state, lrs) = (with_updates(state, 0), vec![0.0; ahead.max(1)]);
        Ok(DeviceLossScale(match device.is_gpu() {
            true => Storage::Gpu(cuda::loss_scale::room(device, &state, &lrs)?),
            false => Storage::Host { state, lrs },
        }))
    }

    /// Enqueues writing the parameters of the next step to `step`, without synchronizing: `numbers` if the device skips none of
    /// the steps before it. Else the step has the number of the device's next update, and its learning rate.
    ///
    /// `known` is the loss scale, if the host has read the results of all steps before; it then knows that no further one was
    /// skipped either.
    ///
    /// Errors if `numbers.update` is 0, and while the device's work is captured.
    pub fn begin_step(
        &mut self,
        step: &mut DeviceStepParams,
        numbers: &StepParams,
        known: Option<&LossScaleState>,
    ) -> Result<()> {
        let Some(before) = numbers.update.checked_sub(1) else {
            return step.set(numbers); // which refuses it
        };
        let known = known.map(|known| with_updates(known, before));
        match &mut self.0 {
            Storage::Host { state, lrs } => {
                *state = known.unwrap_or(*state);
                let rows = lrs.len() as u64;
                lrs[(numbers.update % rows) as usize] = numbers.lr;
                let update = state.updates + 1;
                let lr = lrs[(update % rows) as usize];
                step.set(&StepParams { update, lr, ..*numbers })
            }
            Storage::Gpu(memory) => {
                cuda::loss_scale::next_step(step.gpu_mut()?, memory, numbers, known)
            }
        }
    }

    /// The gradient with which backward starts: a scalar of f64 on `device`, `factor` times the loss scale, without
    /// synchronizing.
    pub fn gradient(&self, device: &Device, factor: f64) -> Result<Tensor> {
        match &self.0 {
            Storage::Host { state, .. } => {
                Tensor::full(device, DType::F64, &[], factor * state.scale)
            }
            Storage::Gpu(memory) => cuda::loss_scale::gradient(memory, factor),
        }
    }

    /// The state, for CPU kernels.
    pub(crate) fn host_mut(&mut self) -> Result<&mut arguments::LossScale> {
        match &mut self.0 {
            Storage::Host { state, .. } => Ok(state),
            Storage::Gpu(_) => {
                Err(Error::device("loss_scale", "the loss scale is in memory of the GPU"))
            }
        }
    }

    /// The state in GPU memory, for the kernel that adapts it.
    pub(crate) fn gpu_mut(&mut self) -> Result<&mut Tensor> {
        match &mut self.0 {
            Storage::Gpu(memory) => Ok(memory),
            Storage::Host { .. } => {
                Err(Error::device("loss_scale", "the loss scale is in memory of the host"))
            }
        }
    }
}

/// The state of a loss scale behind so many updates.
fn with_updates(state: &LossScaleState, updates: u64) -> arguments::LossScale {
    let LossScaleState { scale, steady, patience } = *state;
    arguments::LossScale { scale, steady, patience, updates }
}
