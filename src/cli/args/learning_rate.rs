//! The options of the learning rate, in steps or in samples.

use clap::Args;
use ferrotron::models::trainer::ScheduleUnit;
use ferrotron::nn::schedule::{DecayStyle, LrSchedule, LrScheduleConfig, WsdDecayStyle};
use ferrotron::{Error, Result};

/// Most steps of the warm-up that is the default.
const WARMUP_STEPS: u64 = 100;

#[derive(Debug, Clone, Args)]
pub struct LearningRateArgs {
    /// Largest learning rate [default: 1e-3]
    #[arg(long, value_name = "X")]
    lr: Option<f64>,
    /// Smallest learning rate [default: a tenth of the largest]
    #[arg(long, value_name = "X")]
    min_lr: Option<f64>,
    /// Shape of the learning rate's decay: constant, linear, cosine, inverse-square-root or WSD
    #[arg(long, value_name = "STYLE", default_value = "cosine")]
    lr_decay_style: String,
    /// Steps after which the learning rate is the smallest, warm-up included [default: all]
    #[arg(long, value_name = "N")]
    lr_decay_iters: Option<u64>,
    /// The same in samples, with --train-samples [default: all]
    #[arg(long, value_name = "N")]
    lr_decay_samples: Option<u64>,
    /// Steps over which the learning rate rises first [default: a twentieth of all or of the decay steps, at most 100]
    #[arg(long, value_name = "N", conflicts_with = "lr_warmup_fraction")]
    lr_warmup_iters: Option<u64>,
    /// The same in samples, with --train-samples [default: as for steps, in whole batches]
    #[arg(long, value_name = "N", conflicts_with = "lr_warmup_fraction")]
    lr_warmup_samples: Option<u64>,
    /// The warm-up as a share of the decay steps or samples
    #[arg(long, value_name = "SHARE")]
    lr_warmup_fraction: Option<f64>,
    /// Learning rate from which the warm-up rises
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    lr_warmup_init: f64,
    /// Steps of the final decay of WSD [default: a tenth of the decay steps, at most those after the warm-up]
    #[arg(long, value_name = "N")]
    lr_wsd_decay_iters: Option<u64>,
    /// The same in samples, with --train-samples [default: as for steps]
    #[arg(long, value_name = "N")]
    lr_wsd_decay_samples: Option<u64>,
    /// Shape of the final decay of WSD: exponential, linear, cosine or minus_sqrt
    #[arg(long, value_name = "STYLE", default_value = "exponential")]
    lr_wsd_decay_style: String,
}

impl LearningRateArgs {
    /// Whether a largest rate is given.
    pub fn is_given(&self) -> bool {
        self.lr.is_some()
    }

    /// The schedule of a run of `length` steps or samples, whose global batch has `batch` samples.
    ///
    /// # Errors
    /// Lengths in the other unit; those of [`LrSchedule::new`].
    pub fn schedule(&self, unit: ScheduleUnit, length: u64, batch: usize) -> Result<LrSchedule> {
        self.check_units(unit)?;
        if let Some(share) = self.lr_warmup_fraction.filter(|share| !(0.0..=1.0).contains(share)) {
            let message = format!("must be in [0, 1], got {share}");
            return Err(Error::config("--lr-warmup-fraction", message));
        }
        let max_lr = self.lr.unwrap_or(1e-3);
        let decay = self.lr_decay_iters.or(self.lr_decay_samples).unwrap_or(length);
        let share = self.lr_warmup_fraction.map(|share| (share * decay as f64) as u64);
        // Values that were not typed are never refused: the defaults fit any decay and any warm-up.
        let most = match unit {
            ScheduleUnit::Steps => WARMUP_STEPS,
            ScheduleUnit::Samples => WARMUP_STEPS.saturating_mul(batch as u64),
        };
        // Whole batches: the first update after the warm-up has the highest rate.
        let step = match unit {
            ScheduleUnit::Steps => 1,
            ScheduleUnit::Samples => batch.max(1) as u64,
        };
        let warmup_default = (length.min(decay) / 20).min(most) / step * step;
        let warmup = self.lr_warmup_iters.or(self.lr_warmup_samples).or(share);
        let warmup_steps = warmup.unwrap_or(warmup_default);
        let wsd_default = (decay / 10).min(decay.saturating_sub(warmup_steps)).max(1);
        let wsd = self.lr_wsd_decay_iters.or(self.lr_wsd_decay_samples);
        let schedule = LrSchedule::new(LrScheduleConfig {
            style: self.lr_decay_style.parse::<DecayStyle>()?,
            max_lr,
            min_lr: self.min_lr.unwrap_or(max_lr / 10.0),
            warmup_init: self.lr_warmup_init,
            warmup_steps,
            decay_steps: decay,
            wsd_decay_steps: wsd.unwrap_or(wsd_default),
            wsd_decay_style: self.lr_wsd_decay_style.parse::<WsdDecayStyle>()?,
        });
        schedule.map_err(|error| match unit {
            ScheduleUnit::Steps => error,
            // The schedule itself does not know the unit.
            ScheduleUnit::Samples => {
                Error::config("schedule", error.context().replace("-iters", "-samples"))
            }
        })
    }

    fn check_units(&self, unit: ScheduleUnit) -> Result<()> {
        let lengths = [
            (
                ("--lr-decay-iters", self.lr_decay_iters),
                ("--lr-decay-samples", self.lr_decay_samples),
            ),
            (
                ("--lr-warmup-iters", self.lr_warmup_iters),
                ("--lr-warmup-samples", self.lr_warmup_samples),
            ),
            (
                ("--lr-wsd-decay-iters", self.lr_wsd_decay_iters),
                ("--lr-wsd-decay-samples", self.lr_wsd_decay_samples),
            ),
        ];
        for ((iters, in_steps), (samples, in_samples)) in lengths {
            let (name, message) = match unit {
                ScheduleUnit::Steps if in_samples.is_some() => {
                    (samples, format!("needs --train-samples: give that, or {iters}"))
                }
                ScheduleUnit::Samples if in_steps.is_some() => (
                    iters,
                    format!("counts steps, and --train-samples counts samples: give {samples}"),
                ),
                _ => continue,
            };
            return Err(Error::config(name, message));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        args: LearningRateArgs,
    }

    /// A twentieth of 1000 samples is 50, and a warm-up of 48 ends with a batch of 16.
    #[test]
    fn the_default_warm_up_in_samples_is_whole_batches() {
        let args = Only::parse_from(["train"]).args;
        let warmup =
            |unit, length, batch| args.schedule(unit, length, batch).unwrap().config().warmup_steps;
        assert_eq!(warmup(ScheduleUnit::Samples, 1000, 16), 48);
        assert_eq!(warmup(ScheduleUnit::Samples, 1000, 64), 0);
        assert_eq!(warmup(ScheduleUnit::Samples, 1_000_000, 16), 1600);
        assert_eq!(warmup(ScheduleUnit::Steps, 1000, 16), 50);
    }
}
