//! The reaction to a bad step: one whose loss or gradient norm is not finite, or whose loss is far above its running mean.
//!
//! With a factor F, a step is bad if loss > F m, where m is the mean of the losses of earlier steps:
//!
//!   m_1 = l_1,  m_n = m_(n-1) + (l_n - m_(n-1)) / min(n, 100)
//!
//! Only steps that are applied count in m, which is in the [`TrainState`], so a resumed run decides alike. Loss and norm
//! are sums over all ranks, so all ranks decide alike. Gradients that overflow under a dynamic loss scale are no bad
//! step: the loss scaler handles them.

use ferrotron_parallel::data_parallel::DataParallelConfig;
use ferrotron_tensor::{Error, Result};
use std::fmt;
use std::str::FromStr;

use crate::io::checkpoint::TrainState;

/// Number of losses after which the running mean forgets.
const WINDOW: u64 = 100;

/// Number of applied steps that make up for a bad one.
const APPLIED_PER_BAD: u64 = 10;

/// Number of bad steps in a row at which training stops: it would skip all that are left, or rewind for ever.
const MOST_IN_A_ROW: u64 = 10;

/// The reaction to a bad step. Weights and optimizer state are as before the step in each case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnBadStep {
    /// The step is an error.
    #[default]
    Stop,
    /// The step counts and its samples are consumed, as those of a step whose gradients overflow.
    Skip,
    /// Like [`OnBadStep::Skip`], and [`Trainer::rewind`](super::Trainer::rewind) to the last checkpoint follows, which
    /// [`run`](crate::run::run) calls.
    Rewind,
}

/// The remedy that the error of a step names, where ranks take every step together or not.
pub(super) fn remedy(data_parallel: &DataParallelConfig) -> &'static str {
    match data_parallel.synchronization_interval() {
        1 => "to go on without such steps, add --on-bad-step skip or rewind",
        _ => "go on from the last checkpoint with a smaller --lr or --clip-grad",
    }
}

/// Names of the reactions on the command line.
const NAMES: [(&str, OnBadStep); 3] =
    [("stop", OnBadStep::Stop), ("skip", OnBadStep::Skip), ("rewind", OnBadStep::Rewind)];

impl FromStr for OnBadStep {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        NAMES.iter().find(|row| row.0 == name).map(|row| row.1).ok_or_else(|| {
            Error::config("--on-bad-step", format!("must be stop, skip or rewind, got '{name}'"))
        })
    }
}

impl fmt::Display for OnBadStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(NAMES.iter().find(|row| row.1 == *self).map_or("", |row| row.0))
    }
}

/// The steps that are bad, and the reaction to them.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct BadStepConfig {
    /// The reaction.
    pub on_bad_step: OnBadStep,
    /// A step whose loss is over this factor times its running mean is bad; `None` compares nothing.
    pub loss_spike_factor: Option<f64>,
}

impl BadStepConfig {
    /// Errors if the factor is not above 1, or if replicas that take `synchronize_every` steps of their own would skip
    /// some.
    pub(super) fn check(&self, synchronize_every: usize) -> Result<()> {
        if let Some(factor) = self.loss_spike_factor.filter(|x| !(x.is_finite() && *x > 1.0)) {
            let message = format!("must be a number above 1, got {factor}");
            return Err(Error::config("--loss-spike-factor", message));
        }
        if synchronize_every > 1 && self.on_bad_step != OnBadStep::Stop {
            let message = format!(
                "{} does not go with replicas that take {synchronize_every} steps of their own, which would be \
                 synchronized after other steps than before: use stop",
                self.on_bad_step
            );
            return Err(Error::config("--on-bad-step", message));
        }
        Ok(())
    }

    /// Whether the host has to see a step's loss before the update.
    pub(super) fn needs_host(&self) -> bool {
        *self != BadStepConfig::default()
    }

    /// Whether training continues behind a bad step.
    pub(super) fn continues(&self) -> bool {
        self.on_bad_step != OnBadStep::Stop
    }

    /// Says why a finite `loss` behind the steps of `state` is a spike, if it is one.
    pub(super) fn spike(&self, loss: f64, state: &TrainState) -> Option<String> {
        let (factor, (mean, _)) = (self.loss_spike_factor?, state.loss_mean?);
        (mean > 0.0 && loss > factor * mean)
            .then(|| format!("loss {loss:.4} is over {factor} times its running mean {mean:.4}"))
    }

    /// Counts the loss of a step that is applied.
    pub(super) fn count_applied(&self, loss: f64, state: &mut TrainState) {
        // Only where training continues behind bad steps: with `stop` the host of a GPU does not see each step.
        if self.continues() {
            state.bad_step_balance = state.bad_step_balance.saturating_sub(1);
        }
        if self.loss_spike_factor.is_some() {
            let (mean, losses) = state.loss_mean.unwrap_or((0.0, 0));
            let losses = losses + 1;
            let mean = mean + (loss - mean) / losses.min(WINDOW) as f64;
            state.loss_mean = Some((mean, losses));
        }
    }

    /// Counts a bad step, of which `why` says what is wrong.
    ///
    /// # Errors
    /// Too many of them.
    pub(super) fn count_bad(&self, why: &str, state: &mut TrainState) -> Result<()> {
        state.bad_step_balance += APPLIED_PER_BAD;
        if state.bad_step_balance < APPLIED_PER_BAD * MOST_IN_A_ROW {
            return Ok(());
        }
        let message = format!(
            "step {}: {why}; there are too many bad steps, {MOST_IN_A_ROW} in a row or more than one among \
             {APPLIED_PER_BAD}, so it is not their samples: lower --lr, or resume from an earlier checkpoint",
            state.step + 1,
        );
        Err(Error::value("train", message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The host of a GPU sees a step with `stop` only when reports are read: nothing counts there that it would miss.
    #[test]
    fn applied_steps_make_up_for_bad_ones_where_training_continues() {
        let balance = |on_bad_step| {
            let config = BadStepConfig { on_bad_step, ..BadStepConfig::default() };
            let mut state = TrainState { bad_step_balance: 5, ..TrainState::default() };
            config.count_applied(1.0, &mut state);
            state.bad_step_balance
        };
        assert_eq!([OnBadStep::Stop, OnBadStep::Skip, OnBadStep::Rewind].map(balance), [5, 4, 4]);
    }

    #[test]
    fn a_loss_far_above_the_mean_of_those_before_it_is_a_spike() {
        let config = BadStepConfig { loss_spike_factor: Some(2.0), ..BadStepConfig::default() };
        let mut state = TrainState::default();
        assert_eq!(config.spike(1e9, &state), None, "there is no mean before the first step");
        for loss in [4.0, 2.0] {
            config.count_applied(loss, &mut state);
        }
        assert_eq!(state.loss_mean, Some((3.0, 2)));
        assert_eq!(config.spike(6.0, &state), None);
        let why = config.spike(6.5, &state).unwrap();
        assert_eq!(why, "loss 6.5000 is over 2 times its running mean 3.0000");
        // Behind the window the mean forgets: of a step to 1 all but e^-3 is there after three windows.
        (0..3 * WINDOW).for_each(|_| config.count_applied(1.0, &mut state));
        let (mean, _) = state.loss_mean.unwrap();
        assert!((1.0..1.04).contains(&mean), "{mean}");
        // A mean that is not positive says nothing about factors.
        state.loss_mean = Some((-1.0, 5));
        assert_eq!(config.spike(3.0, &state), None);
        let unset = BadStepConfig::default();
        unset.count_applied(1.0, &mut state);
        assert_eq!((unset.spike(1e9, &state), state.loss_mean), (None, Some((-1.0, 5))));
    }

    #[test]
    fn too_many_bad_steps_are_an_error() {
        let config = BadStepConfig { on_bad_step: OnBadStep::Skip, ..BadStepConfig::default() };
        // Bad steps until there are too many, with as many applied ones behind each.
        let bad_steps = |applied: u64| {
            let mut state = TrainState { step: 6, ..TrainState::default() };
            (1..100_u64).find(|_| {
                let counted = config.count_bad("loss NaN", &mut state);
                (0..applied).for_each(|_| config.count_applied(1.0, &mut state));
                counted.is_err_and(|error| {
                    assert!(error.to_string().contains("step 7: loss NaN; there are too many"));
                    true
                })
            })
        };
        assert_eq!([0, 1, 9, 10].map(bad_steps), [Some(10), Some(11), Some(91), None]);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for factor in [1.0, 0.0, -2.0, f64::NAN, f64::INFINITY] {
            let config =
                BadStepConfig { loss_spike_factor: Some(factor), ..BadStepConfig::default() };
            let error = config.check(1).unwrap_err().to_string();
            assert!(error.contains("--loss-spike-factor: must be a number above 1"), "{error}");
        }
        for (name, reaction) in NAMES {
            assert_eq!(name.parse::<OnBadStep>().unwrap(), reaction);
            let config = BadStepConfig { on_bad_step: reaction, ..BadStepConfig::default() };
            config.check(1).unwrap();
            assert_eq!(config.check(4).is_ok(), reaction == OnBadStep::Stop);
        }
        assert!("ignore".parse::<OnBadStep>().is_err());
    }
}
