//! Decides on the device whether a step is applied, the gradient scale, and the next loss scale.
//!
//!   loss = loss_sum / tokens, norm = sqrt(sq_norm) / loss_scale
//!   grad_scale = min(1, max_norm / (norm + 1e-6)) / loss_scale, Megatron's rule
//!
//! A norm that is not finite is an overflow, and the step is not applied. With a dynamic loss scale, which is adapted here,
//! training continues with the next step. Any other overflow, or a loss that is not finite, stops training: no later step is
//! applied either. The host may have enqueued many more steps, but weights and moments stay as they were. Everything
//! is computed in f64, identically on every device. No gradient.

pub use super::config::{CheckStepConfig, OverflowPolicy, StepSums};
use super::loss_scale::{DeviceLossScale, LossScaleState};
use crate::ops::optim::step::DeviceStepParams;
use crate::{DType, Device, Error, Result, Tensor, cuda};

/// Loss and gradient norm of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepMetrics {
    /// Mean loss of the valid tokens.
    pub loss: f64,
    /// Norm of the gradients before clipping.
    pub grad_norm: f64,
    /// Factor of the loss.
    pub loss_scale: f64,
}

/// The outcomes of the latest steps, on the device.
///
/// ```
/// use ferrotron_tensor::ops::loss_scale::{DeviceLossScale, LossScaleState};
/// use ferrotron_tensor::ops::outcome::{CheckStepConfig, StepMetricsLog, OverflowPolicy, StepSums, check_step};
/// use ferrotron_tensor::ops::step::{DeviceStepParams, StepParams};
/// use ferrotron_tensor::{Device, Tensor};
/// let device = Device::cpu(1)?;
/// let number = |x: f64| Tensor::from_slice(&device, &[x], &[1]);
/// let mut step = DeviceStepParams::new(&device, &StepParams { update: 1, lr: 0.1, grad_scale: 1.0 })?;
/// let mut loss_scale = DeviceLossScale::new(&device, &LossScaleState::constant(1.0), 2)?;
/// let mut outcomes = StepMetricsLog::new(&device, 2)?;
/// let config = CheckStepConfig { tokens: 4.0, max_norm: 1.0, overflow: OverflowPolicy::Stop };
/// for sq_norm in [9.0, f64::INFINITY] {
///     let (loss, sq_norm) = (&number(12.0)?, &number(sq_norm)?);
///     let sums = StepSums { loss, sq_norm, others: None };
///     check_step(&mut step, &mut loss_scale, &mut outcomes, &config, &sums)?;
/// }
/// let (found, stopped) = outcomes.read(2)?;
/// assert_eq!((found[0].loss, found[0].grad_norm, stopped), (3.0, 3.0, Some(1)));
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug)]
pub struct StepMetricsLog {
    /// Number of steps, one plus the index of the first failed step (0 if none), then the rows.
    numbers: Tensor,
}

/// Header length, and row length.
const HEADER: usize = 2;
const ROW: usize = 3;

impl StepMetricsLog {
    /// Creates an empty log that keeps the latest `rows` steps.
    pub fn new(device: &Device, rows: usize) -> Result<StepMetricsLog> {
        // Written by the host, so that a fake device also has valid numbers.
        let numbers = Tensor::full(device, DType::F64, &[HEADER + ROW * rows.max(1)], 0.0)?;
        Ok(StepMetricsLog { numbers })
    }

    /// Clears the log, so that a failed step can be repeated.
    pub fn clear(&mut self) -> Result<()> {
        self.numbers.write_bytes(|bytes| {
            bytes.fill(0);
            Ok(())
        })
    }

    /// Number of steps kept.
    pub fn rows(&self) -> usize {
        (self.numbers.numel() - HEADER) / ROW
    }

    /// The outcomes of the latest `count` steps, earliest first, and the position among them of the first failed
    /// step. Synchronizes with the device. A fake device returns losses of zero.
    ///
    /// Errors if fewer than `count` steps are kept.
    pub fn read(&self, count: usize) -> Result<(Vec<StepMetrics>, Option<usize>)> {
        if self.numbers.device().is_fake() {
            let nothing = StepMetrics { loss: 0.0, grad_norm: 0.0, loss_scale: 1.0 };
            return Ok((vec![nothing; count], None));
        }
        let numbers = self.numbers.to_vec::<f64>()?;
        let (seen, stopped, rows) = (numbers[0] as usize, numbers[1] as usize, self.rows());
        if count > rows.min(seen) {
            let message = format!("{count} of {seen} steps are asked for, {rows} are kept");
            return Err(Error::value("outcomes", message));
        }
        let first = seen - count;
        let outcome = |step: usize| {
            let row = &numbers[HEADER + ROW * (step % rows)..][..ROW];
            StepMetrics { loss: row[0], grad_norm: row[1], loss_scale: row[2] }
        };
        let stopped = stopped.checked_sub(1).map(|step| step.saturating_sub(first));
        Ok(((first..seen).map(outcome).collect(), stopped))
    }
}

/// The factor that clips a gradient of norm `norm` to `max_norm`: Megatron's max / (norm + 1e-6), at most 1. It is 1
/// if `max_norm` is 0. It is NaN if the norm is not finite, and an optimizer refuses it: no factor makes such gradients
/// finite.
pub fn clip_coefficient(norm: f64, max_norm: f64) -> f64 {
    if !norm.is_finite() {
        return f64::NAN;
    }
    if max_norm > 0.0 { (max_norm / (norm + 1e-6)).min(1.0) } else { 1.0 }
}

/// Sets the gradient scale in `step` and whether the step is applied, and appends the outcome, without synchronizing. Counts
/// the step in `loss_scale` if it is applied, and adapts the scale for the next one.
///
/// Errors if a sum is not an f64 tensor of one element.
pub fn check_step(
    step: &mut DeviceStepParams,
    loss_scale: &mut DeviceLossScale,
    outcomes: &mut StepMetricsLog,
    config: &CheckStepConfig,
    sums: &StepSums,
) -> Result<()> {
    let StepSums { loss, sq_norm, others } = *sums;
    for x in [loss, sq_norm].into_iter().chain(others) {
        if (x.dtype(), x.numel()) != (DType::F64, 1) {
            return Err(Error::shape("outcome", format!("{x:?} is no number of f64")));
        }
    }
    let rows = outcomes.rows();
    if step.is_on_gpu() {
        return cuda::outcome::check_step(
            step.gpu_mut()?,
            loss_scale.gpu_mut()?,
            (&mut outcomes.numbers, rows),
            config,
            sums,
        );
    }
    let CheckStepConfig { tokens, max_norm, overflow } = *config;
    let now = loss_scale.host_mut()?;
    let (scale, steady, patience) = (now.scale, now.steady, now.patience);
    let (loss, norm) = (loss.item()? / tokens, sq_norm.item()?.sqrt() / scale);
    let overflows = !norm.is_finite();
    let others_go_on = others.map_or(Ok(true), |others| others.item().map(f64::is_finite))?;
    let stops = overflows && overflow == OverflowPolicy::Stop;
    let lost = !loss.is_finite() || stops || !others_go_on;
    let numbers = outcomes.numbers.as_mut_slice::<f64>()?;
    let before = numbers[0] as usize;
    numbers[HEADER + ROW * (before % rows)..][..ROW].copy_from_slice(&[loss, norm, scale]);
    numbers[0] += 1.0;
    if lost && numbers[1] == 0.0 {
        numbers[1] = numbers[0];
    }
    let stopped = numbers[1] != 0.0;
    if !stopped {
        now.updates += u64::from(!overflows);
        if let OverflowPolicy::SkipStep(rule) = overflow {
            let next = rule.next(LossScaleState { scale, steady, patience }, overflows);
            (now.scale, now.steady, now.patience) = (next.scale, next.steady, next.patience);
        }
    }
    step.set_found_inf(clip_coefficient(norm, max_norm) / scale, overflows || stopped)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::optim::config::LossScaleRule;
    use crate::ops::optim::step::StepParams;

    /// The outcomes of steps with these sums, and the step parameters after each.
    fn outcomes(
        config: CheckStepConfig,
        sums: &[(f64, f64, Option<f64>)],
    ) -> (StepMetricsLog, Vec<Option<f64>>) {
        let device = Device::cpu(1).unwrap();
        let scale = LossScaleState { scale: 8.0, steady: 0, patience: 9 };
        let mut loss_scale = DeviceLossScale::new(&device, &scale, 1).unwrap();
        let number = |x: f64| Tensor::from_slice(&device, &[x], &[1]).unwrap();
        let mut outcomes = StepMetricsLog::new(&device, 3).unwrap();
        let mut scales = Vec::new();
        for &(loss, sq_norm, others) in sums {
            let numbers = StepParams { update: 1, lr: 0.1, grad_scale: 7.0 };
            let mut step = DeviceStepParams::new(&device, &numbers).unwrap();
            let (loss, sq_norm, others) = (number(loss), number(sq_norm), others.map(number));
            let sums = StepSums { loss: &loss, sq_norm: &sq_norm, others: others.as_ref() };
            check_step(&mut step, &mut loss_scale, &mut outcomes, &config, &sums).unwrap();
            scales.push(step.host().unwrap().map(|numbers| numbers.grad_scale));
        }
        (outcomes, scales)
    }

    const CONFIG: CheckStepConfig = CheckStepConfig {
        tokens: 2.0,
        max_norm: 1.0,
        overflow: OverflowPolicy::SkipStep(LossScaleRule {
            window: 9,
            hysteresis: 9,
            minimum: 1.0,
        }),
    };

    #[test]
    fn an_overflow_is_passed_over_and_the_rest_is_clipped() {
        let sums =
            [(4.0, 64.0, None), (6.0, f64::NAN, None), (8.0, 6400.0, None), (2.0, 1.0, None)];
        let (found, scales) = outcomes(CONFIG, &sums);
        let clipped = |norm| Some(clip_coefficient(norm, 1.0) / 8.0);
        assert_eq!(scales, [clipped(1.0), None, clipped(10.0), Some(0.125)]);
        let (latest, stopped) = found.read(3).unwrap();
        assert_eq!(
            (latest[1], latest[2]),
            (
                StepMetrics { loss: 4.0, grad_norm: 10.0, loss_scale: 8.0 },
                StepMetrics { loss: 1.0, grad_norm: 0.125, loss_scale: 8.0 }
            )
        );
        assert!(latest[0].loss == 3.0 && latest[0].grad_norm.is_nan() && stopped.is_none());
        assert!(found.read(4).unwrap_err().to_string().contains("4 of 4 steps"));
    }

    /// A host that reads nothing gives each step the number of the case that none is skipped.
    #[test]
    fn updates_behind_skipped_steps_have_the_number_and_the_learning_rate_of_their_own() {
        let device = Device::cpu(1).unwrap();
        let number = |x: f64| Tensor::from_slice(&device, &[x], &[1]).unwrap();
        let rule = LossScaleRule { window: 2, hysteresis: 1, minimum: 1.0 };
        let config = CheckStepConfig { overflow: OverflowPolicy::SkipStep(rule), ..CONFIG };
        let known = LossScaleState { scale: 8.0, steady: 1, patience: 1 };
        let mut loss_scale = DeviceLossScale::new(&device, &known, 8).unwrap();
        let mut outcomes = StepMetricsLog::new(&device, 8).unwrap();
        let numbers = |update: u64| StepParams { update, lr: update as f64, grad_scale: 1.0 };
        let mut step = DeviceStepParams::new(&device, &numbers(1)).unwrap();
        let mut found = Vec::new();
        for (i, overflows) in [false, true, false, true, true, false, false].into_iter().enumerate()
        {
            let given = numbers(41 + i as u64);
            loss_scale.begin_step(&mut step, &given, (i == 0).then_some(&known)).unwrap();
            let began = step.read().unwrap().unwrap();
            assert_eq!(began.lr, began.update as f64);
            let (loss, sq_norm) = (number(1.0), number(if overflows { f64::NAN } else { 1.0 }));
            let sums = StepSums { loss: &loss, sq_norm: &sq_norm, others: None };
            let gradient = loss_scale.gradient(&device, 0.5).unwrap().item().unwrap();
            check_step(&mut step, &mut loss_scale, &mut outcomes, &config, &sums).unwrap();
            found.push((began.update, gradient));
        }
        // Doubled by the first, halved by each overflow, doubled by the last two: the next one has twice the scale.
        let want = [(41, 4.0), (42, 8.0), (42, 4.0), (43, 4.0), (43, 2.0), (43, 1.0), (44, 1.0)];
        assert_eq!(found, want);
        assert_eq!(loss_scale.gradient(&device, 1.0).unwrap().item().unwrap(), 4.0);
        let scales = outcomes.read(7).unwrap().0.into_iter().map(|step| step.loss_scale);
        assert!(scales.eq(want.iter().map(|(_, gradient)| 2.0 * gradient)));
    }

    #[test]
    fn after_a_loss_that_is_not_finite_no_step_changes_anything() {
        let stops = CheckStepConfig { overflow: OverflowPolicy::Stop, ..CONFIG };
        let fine = (4.0, 64.0, Some(0.0));
        for (config, bad) in [
            (CONFIG, (f64::NAN, 64.0, None)),
            (stops, (4.0, f64::INFINITY, None)),
            (CONFIG, (4.0, 64.0, Some(f64::INFINITY))),
        ] {
            let (found, scales) = outcomes(config, &[fine, bad, fine, bad]);
            let changed: Vec<bool> = scales.iter().map(Option::is_some).collect();
            assert_eq!(changed, [true, false, false, false], "{bad:?}");
            assert_eq!(found.read(3).unwrap().1, Some(0), "{bad:?}");
        }
    }
}
