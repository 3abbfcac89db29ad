//! Learning-rate schedules: a linear warm-up, then constant, linear, cosine, inverse-square-root or
//! WSD (warm-up, stable, decay; Hu et al., "MiniCPM", 2024).
//!
//! A schedule is a pure function of the step, so resuming needs no state. Formulas and edge cases are
//! those of Megatron-LM's `OptimizerParamScheduler`, with `m` = `max_lr`, `l` = `min_lr`,
//! `W` = `warmup_steps`, `D` = `decay_steps` and `r = (step - W) / (D - W)`:
//!
//! | where | learning rate |
//! |---|---|
//! | `step <= W` (and `W > 0`) | `warmup_init + (m - warmup_init) * step / W` |
//! | constant | `m` |
//! | `step > D` (not constant) | `l` |
//! | inverse-square-root | `max(l, m * sqrt(max(W, 1)) / sqrt(max(step, 1)))` |
//! | linear | `l + (m - l) * (1 - r)` |
//! | cosine | `l + (m - l) * (1 + cos(pi * r)) / 2` |
//! | WSD, `step <= D - wsd_decay_steps` | `m` |
//! | WSD, later | `l + (m - l) * coefficient(q)`, `q = (step - D + wsd_decay_steps) / wsd_decay_steps` |
//!
//! **Step convention.** `lr(step)` is Megatron's: `step` counts the updates *already made*. A run that follows
//! Megatron uses `lr(0) = warmup_init` for its first update, which does not change the weights with the default
//! `warmup_init = 0`. Passing the number of the next update instead, counted from 1, avoids that and reaches `max_lr`
//! at update `W`.

use ferrotron_tensor::{Error, Result};
use std::{f64::consts::PI, fmt, str::FromStr};

/// The shape of the schedule after the warm-up (`--lr-decay-style`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DecayStyle {
    /// Constant `max_lr`.
    Constant,
    /// Linear from `max_lr` to `min_lr`: Megatron's default.
    #[default]
    Linear,
    /// Half a cosine from `max_lr` to `min_lr`.
    Cosine,
    /// `max_lr * sqrt(warmup / step)`, not below `min_lr`.
    InverseSquareRoot,
    /// `max_lr`, then a decay over the last `wsd_decay_steps` steps.
    Wsd,
}

/// The shape of the decay at the end of [`DecayStyle::Wsd`] (`--lr-wsd-decay-style`). It is the coefficient between
/// `max_lr` (1) and `min_lr` (0) as a function of `q` in 0..=1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WsdDecayStyle {
    /// `2 * 0.5^q - 1`: Megatron's default.
    #[default]
    Exponential,
    /// `1 - q`.
    Linear,
    /// `(1 + cos(pi q)) / 2`.
    Cosine,
    /// `1 - sqrt(q)` (Hägele et al., "Scaling Laws and Compute-Optimal Training", 2024).
    MinusSqrt,
}

/// Names of the decay styles on the command line, with their values.
const DECAY_STYLES: [(&str, DecayStyle); 5] = [
    ("constant", DecayStyle::Constant),
    ("linear", DecayStyle::Linear),
    ("cosine", DecayStyle::Cosine),
    ("inverse-square-root", DecayStyle::InverseSquareRoot),
    ("WSD", DecayStyle::Wsd),
];

/// Names of WSD's decay styles on the command line, with their values.
const WSD_DECAY_STYLES: [(&str, WsdDecayStyle); 4] = [
    ("exponential", WsdDecayStyle::Exponential),
    ("linear", WsdDecayStyle::Linear),
    ("cosine", WsdDecayStyle::Cosine),
    ("minus_sqrt", WsdDecayStyle::MinusSqrt),
];

/// The style called `name` in `table`, ignoring case, with `-` equal to `_`.
fn style_named<T: Copy>(option: &str, name: &str, table: &[(&str, T)]) -> Result<T> {
    let plain = |text: &str| text.to_ascii_lowercase().replace('_', "-");
    table.iter().find(|row| plain(row.0) == plain(name)).map(|row| row.1).ok_or_else(|| {
        let names: Vec<&str> = table.iter().map(|row| row.0).collect();
        Error::config("schedule", format!("unknown {option} '{name}': use {}", names.join(", ")))
    })
}

impl FromStr for DecayStyle {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        style_named("--lr-decay-style", name, &DECAY_STYLES)
    }
}

impl FromStr for WsdDecayStyle {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        style_named("--lr-wsd-decay-style", name, &WSD_DECAY_STYLES)
    }
}

impl fmt::Display for DecayStyle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = DECAY_STYLES.iter().find(|row| row.1 == *self);
        f.pad(row.map_or("", |row| row.0))
    }
}

impl fmt::Display for WsdDecayStyle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = WSD_DECAY_STYLES.iter().find(|row| row.1 == *self);
        f.pad(row.map_or("", |row| row.0))
    }
}

/// Configuration of a [`LrSchedule`]; steps are optimizer updates.
#[derive(Debug, Clone, PartialEq)]
pub struct LrScheduleConfig {
    /// The shape after the warm-up.
    pub style: DecayStyle,
    /// Maximum learning rate (`--lr`).
    pub max_lr: f64,
    /// Minimum learning rate (`--min-lr`).
    pub min_lr: f64,
    /// Learning rate at the start of the warm-up (`--lr-warmup-init`).
    pub warmup_init: f64,
    /// Length of the warm-up (`--lr-warmup-iters`); 0 for none.
    pub warmup_steps: u64,
    /// Step at which `min_lr` is reached, including the warm-up (`--lr-decay-iters`).
    pub decay_steps: u64,
    /// Length of the decay at the end of a WSD schedule (`--lr-wsd-decay-iters`).
    pub wsd_decay_steps: u64,
    /// Shape of that decay.
    pub wsd_decay_style: WsdDecayStyle,
}

impl Default for LrScheduleConfig {
    /// A constant rate of 1e-3 without warm-up.
    fn default() -> Self {
        LrScheduleConfig {
            style: DecayStyle::Constant,
            max_lr: 1e-3,
            min_lr: 0.0,
            warmup_init: 0.0,
            warmup_steps: 0,
            decay_steps: 1,
            wsd_decay_steps: 0,
            wsd_decay_style: WsdDecayStyle::default(),
        }
    }
}

/// A validated schedule.
///
/// ```
/// use ferrotron_nn::schedule::{DecayStyle, LrSchedule, LrScheduleConfig};
/// let schedule = LrSchedule::new(LrScheduleConfig {
///     style: DecayStyle::Cosine,
///     max_lr: 1e-3,
///     min_lr: 1e-4,
///     warmup_steps: 100,
///     decay_steps: 2000,
///     ..LrScheduleConfig::default()
/// })?;
/// assert_eq!(schedule.lr(50), 0.5e-3); // half way up
/// assert_eq!(schedule.lr(100), 1e-3); // the peak
/// assert_eq!(schedule.lr(2001), 1e-4); // the floor
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct LrSchedule(LrScheduleConfig);

impl LrSchedule {
    /// Checks the configuration.
    ///
    /// # Errors
    /// Errors if a rate is negative or not finite, or if `min_lr` or `warmup_init` exceeds `max_lr`. Errors if the warm-up
    /// is not shorter than the decay, or if a WSD decay does not fit after the warm-up.
    pub fn new(config: LrScheduleConfig) -> Result<Self> {
        let LrScheduleConfig { max_lr, min_lr, warmup_init, warmup_steps, decay_steps, .. } =
            config;
        let refuse = |context: String| Err(Error::config("schedule", context));
        for (name, value) in
            [("--lr", max_lr), ("--min-lr", min_lr), ("--lr-warmup-init", warmup_init)]
        {
            if !(value.is_finite() && value >= 0.0) {
                return refuse(format!("{name} must be finite and not negative, got {value}"));
            }
        }
        if min_lr > max_lr {
            return refuse(format!("--min-lr {min_lr} is above --lr {max_lr}"));
        }
        if warmup_init > max_lr {
            return refuse(format!("--lr-warmup-init {warmup_init} is above --lr {max_lr}"));
        }
        if config.style != DecayStyle::Constant && warmup_steps >= decay_steps {
            return refuse(format!(
                "--lr-warmup-iters {warmup_steps} must be less than --lr-decay-iters {decay_steps}"
            ));
        }
        if config.style == DecayStyle::Wsd {
            let room = decay_steps - warmup_steps;
            if config.wsd_decay_steps == 0 || config.wsd_decay_steps > room {
                return refuse(format!(
                    "--lr-wsd-decay-iters must be in 1..={room} (--lr-decay-iters {decay_steps} less the warm-up's \
                     {warmup_steps}), got {}",
                    config.wsd_decay_steps
                ));
            }
        }
        Ok(LrSchedule(config))
    }

    /// A constant learning rate of `lr`.
    ///
    /// # Errors
    /// A rate that is negative or not finite.
    pub fn constant(lr: f64) -> Result<Self> {
        LrSchedule::new(LrScheduleConfig { max_lr: lr, ..LrScheduleConfig::default() })
    }

    /// The configuration.
    pub fn config(&self) -> &LrScheduleConfig {
        &self.0
    }

    /// The learning rate after `step` updates (see the module documentation for the convention).
    pub fn lr(&self, step: u64) -> f64 {
        let LrScheduleConfig { style, max_lr, min_lr, warmup_steps, decay_steps, .. } = self.0;
        if warmup_steps > 0 && step <= warmup_steps {
            let init = self.0.warmup_init;
            return init + (max_lr - init) * step as f64 / warmup_steps as f64;
        }
        if style == DecayStyle::Constant {
            return max_lr;
        }
        if step > decay_steps {
            return min_lr;
        }
        let ratio = (step - warmup_steps) as f64 / (decay_steps - warmup_steps) as f64;
        let coefficient = match style {
            DecayStyle::Constant => 1.0,
            DecayStyle::InverseSquareRoot => {
                let lr = max_lr * (warmup_steps.max(1) as f64 / step.max(1) as f64).sqrt();
                return lr.max(min_lr);
            }
            DecayStyle::Linear => 1.0 - ratio,
            DecayStyle::Cosine => half_cosine(ratio),
            DecayStyle::Wsd => self.wsd_coefficient(step),
        };
        min_lr + coefficient * (max_lr - min_lr)
    }

    /// 1 on the plateau, then the chosen decay down to 0 at `decay_steps`.
    fn wsd_coefficient(&self, step: u64) -> f64 {
        let decay_start = self.0.decay_steps - self.0.wsd_decay_steps;
        if step <= decay_start {
            return 1.0;
        }
        let ratio = (step - decay_start) as f64 / self.0.wsd_decay_steps as f64;
        match self.0.wsd_decay_style {
            WsdDecayStyle::Exponential => 2.0 * 0.5f64.powf(ratio) - 1.0,
            WsdDecayStyle::Linear => 1.0 - ratio,
            WsdDecayStyle::Cosine => half_cosine(ratio),
            WsdDecayStyle::MinusSqrt => 1.0 - ratio.sqrt(),
        }
    }
}

/// `(1 + cos(pi * ratio)) / 2`: 1 at 0, 0 at 1.
fn half_cosine(ratio: f64) -> f64 {
    0.5 * ((PI * ratio).cos() + 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The configuration of Megatron-LM's test_optimizer_param_scheduler.py.
    fn megatron(style: DecayStyle) -> LrScheduleConfig {
        LrScheduleConfig {
            style,
            max_lr: 0.1,
            min_lr: 0.001,
            warmup_init: 0.01,
            warmup_steps: 100,
            decay_steps: 1000,
            wsd_decay_steps: 200,
            ..LrScheduleConfig::default()
        }
    }

    fn lr(style: DecayStyle, step: u64) -> f64 {
        LrSchedule::new(megatron(style)).unwrap().lr(step)
    }

    fn assert_close(got: f64, want: f64, what: &str) {
        assert!((got - want).abs() <= 1e-5 * want.abs(), "{what}: got {got}, want {want}");
    }

    #[test]
    fn values_are_megatrons() {
        use DecayStyle::*;
        let rows = [
            (Linear, 0, 0.01),
            (Linear, 50, 0.055),
            (Linear, 100, 0.1),
            (Linear, 500, 0.1 - 0.099 * 400.0 / 900.0),
            (Linear, 1000, 0.001),
            (Linear, 1001, 0.001),
            (Linear, u64::MAX, 0.001),
            (Cosine, 50, 0.055),
            (Cosine, 500, 0.001 + 0.099 * 0.5 * ((PI * 400.0 / 900.0).cos() + 1.0)),
            (Cosine, 550, 0.0505),
            (Cosine, 1000, 0.001),
            (InverseSquareRoot, 400, 0.05),
            (InverseSquareRoot, 1000, 0.1 / 10f64.sqrt()),
            (InverseSquareRoot, 1001, 0.001),
            (Constant, 50, 0.055),
            (Constant, 5000, 0.1),
            (Wsd, 50, 0.055),
            (Wsd, 500, 0.1),
            (Wsd, 800, 0.1),
            (Wsd, 900, 0.001 + 0.099 * (2f64.sqrt() - 1.0)),
            (Wsd, 1000, 0.001),
            (Wsd, 1001, 0.001),
        ];
        for (style, step, want) in rows {
            assert_close(lr(style, step), want, &format!("{style} at {step}"));
        }
    }

    #[test]
    fn wsd_decays_in_each_style() {
        for (style, want) in [
            (WsdDecayStyle::Linear, 0.75),
            (WsdDecayStyle::Cosine, 0.5 * ((PI * 0.25).cos() + 1.0)),
            (WsdDecayStyle::MinusSqrt, 0.5),
            (WsdDecayStyle::Exponential, 2.0 * 0.5f64.powf(0.25) - 1.0),
        ] {
            let config = LrScheduleConfig { wsd_decay_style: style, ..megatron(DecayStyle::Wsd) };
            let got = LrSchedule::new(config).unwrap().lr(850);
            assert_close(got, 0.001 + 0.099 * want, &style.to_string());
        }
    }

    #[test]
    fn schedules_stay_between_floor_and_peak_and_fall_after_the_warm_up() {
        for (_, style) in DECAY_STYLES {
            let schedule = LrSchedule::new(megatron(style)).unwrap();
            for step in 0..1200 {
                let now = schedule.lr(step);
                assert!((0.001..=0.1 + 1e-15).contains(&now), "{style} at {step}: {now}");
                if step > 100 {
                    assert!(now <= schedule.lr(step - 1), "{style} rises at {step}");
                }
            }
        }
    }

    #[test]
    fn no_warm_up_starts_at_the_peak() {
        let config = LrScheduleConfig { warmup_steps: 0, ..megatron(DecayStyle::Cosine) };
        assert_eq!(LrSchedule::new(config).unwrap().lr(0), 0.1);
    }

    #[test]
    fn wrong_configurations_are_refused_with_their_values() {
        let base = || megatron(DecayStyle::Wsd);
        for (config, words) in [
            (LrScheduleConfig { max_lr: f64::NAN, ..base() }, "--lr must be finite"),
            (LrScheduleConfig { min_lr: -1.0, ..base() }, "--min-lr must be finite"),
            (LrScheduleConfig { min_lr: 1.0, ..base() }, "--min-lr 1 is above --lr 0.1"),
            (LrScheduleConfig { warmup_init: 1.0, ..base() }, "--lr-warmup-init 1 is above"),
            (LrScheduleConfig { warmup_steps: 1000, ..base() }, "1000 must be less than"),
            (LrScheduleConfig { wsd_decay_steps: 0, ..base() }, "must be in 1..=900"),
            (LrScheduleConfig { wsd_decay_steps: 901, ..base() }, "got 901"),
        ] {
            let error = LrSchedule::new(config).unwrap_err().to_string();
            assert!(error.contains(words), "'{error}' does not say '{words}'");
        }
    }

    #[test]
    fn styles_parse_in_either_case_and_unknown_ones_list_the_choices() {
        for (name, style) in DECAY_STYLES {
            assert_eq!(name.parse::<DecayStyle>().unwrap(), style);
            assert_eq!(name.to_lowercase().parse::<DecayStyle>().unwrap(), style);
            assert_eq!(style.to_string(), name);
        }
        for (name, style) in WSD_DECAY_STYLES {
            assert_eq!(name.replace('_', "-").parse::<WsdDecayStyle>().unwrap(), style);
            assert_eq!(style.to_string(), name);
        }
        let error = "cosinus".parse::<DecayStyle>().unwrap_err().to_string();
        assert_eq!(
            error,
            "schedule: unknown --lr-decay-style 'cosinus': use constant, linear, cosine, inverse-square-root, WSD"
        );
    }
}
