//! Loss scaling, which keeps small gradients representable in f16: Micikevicius et al., "Mixed Precision Training",
//! arXiv 1710.03740, section 3.2.
//!
//! Backward starts from the scale instead of 1, and the optimizer divides by it. An overflow makes the gradient norm,
//! which all ranks have, not finite. The step is then skipped, and weights and moments are unchanged. The scale is
//! updated by the rule of Megatron-LM (`grad_scaler.py`).

pub use ferrotron_tensor::ops::loss_scale::{LossScaleRule, LossScaleState};
use ferrotron_tensor::{Error, Result};

/// The choice of the loss scale.
///
/// ```
/// use ferrotron_nn::{LossScale, LossScaler};
/// let config = LossScale::Dynamic { initial: 1024.0, window: 2, hysteresis: 2, minimum: 1.0 };
/// let mut scaler = LossScaler::new(config)?;
/// scaler.update(true); // an overflow is forgiven ...
/// assert_eq!(scaler.scale(), 1024.0);
/// scaler.update(true); // ... a second one is not
/// assert_eq!(scaler.scale(), 512.0);
/// scaler.update(false);
/// scaler.update(false); // as many steps in a row as the window has
/// assert_eq!(scaler.scale(), 1024.0);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LossScale {
    /// A constant scale. An overflow is an error.
    Constant(f64),
    /// A dynamic scale: as large as possible without overflow.
    Dynamic {
        /// The initial scale.
        initial: f64,
        /// Steps without an overflow after which the scale is doubled.
        window: u64,
        /// Number of overflows until the scale is halved. Each further overflow halves it again, until it has been
        /// doubled.
        hysteresis: u64,
        /// Lower bound of the scale.
        minimum: f64,
    },
}

impl LossScale {
    /// No scaling: for dtypes with the exponent range of f32.
    pub const NONE: LossScale = LossScale::Constant(1.0);

    /// Megatron's defaults: from 2^32, doubled after 1000 steps, halved at the second overflow, at least 1.
    pub const DYNAMIC: LossScale =
        LossScale::Dynamic { initial: 4_294_967_296.0, window: 1000, hysteresis: 2, minimum: 1.0 };
}

/// The current scale of a run and its history.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScaler {
    config: LossScale,
    state: LossScaleState,
}

impl LossScaler {
    /// The state before the first step.
    ///
    /// Errors, naming it, if a constant is out of range.
    pub fn new(config: LossScale) -> Result<LossScaler> {
        let (name, scale, patience) = match config {
            LossScale::Constant(scale) => ("loss-scale", scale, 0),
            LossScale::Dynamic { initial, hysteresis, .. } => {
                ("initial-loss-scale", initial, hysteresis)
            }
        };
        let positive = |name, value: f64| match value.is_finite() && value > 0.0 {
            true => Ok(()),
            false => Err(Error::config(name, format!("must be positive, got {value}"))),
        };
        positive(name, scale)?;
        if let LossScale::Dynamic { initial, window, hysteresis, minimum } = config {
            positive("min-loss-scale", minimum)?;
            if minimum > initial {
                let message = format!("{minimum} is above the first scale {initial}");
                return Err(Error::config("min-loss-scale", message));
            }
            for (name, value) in [("loss-scale-window", window), ("hysteresis", hysteresis)] {
                if value == 0 {
                    return Err(Error::config(name, "must be at least 1, got 0"));
                }
            }
        }
        Ok(LossScaler { config, state: LossScaleState { scale, steady: 0, patience } })
    }

    /// Factor of the loss in the next step.
    pub fn scale(&self) -> f64 {
        self.state.scale
    }

    /// Returns whether a step with an overflow is skipped, which requires a dynamic scale.
    pub fn skips(&self) -> bool {
        self.rule().is_some()
    }

    /// The rule of a dynamic scale.
    pub fn rule(&self) -> Option<LossScaleRule> {
        match self.config {
            LossScale::Constant(_) => None,
            LossScale::Dynamic { window, hysteresis, minimum, .. } => {
                Some(LossScaleRule { window, hysteresis, minimum })
            }
        }
    }

    /// Updates the scale after a step with or without an overflow.
    pub fn update(&mut self, overflow: bool) {
        if let Some(rule) = self.rule() {
            self.state = rule.next(self.state, overflow);
        }
    }

    /// The scale and its history, for a checkpoint and for the device that adapts it.
    pub fn state(&self) -> LossScaleState {
        self.state
    }

    /// Restores a [`LossScaler::state`]; a constant scale is unchanged.
    pub fn set_state(&mut self, state: LossScaleState) {
        if self.skips() {
            self.state = state;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Megatron-LM's DynamicGradScaler, megatron/core/optimizer/grad_scaler.py, as a table: overflows and scales.
    #[test]
    fn the_scale_follows_megatrons_rule() {
        let config = LossScale::Dynamic { initial: 8.0, window: 3, hysteresis: 2, minimum: 2.0 };
        let mut scaler = LossScaler::new(config).unwrap();
        for (step, (overflow, want)) in [
            (true, 8.0),  // forgiven
            (false, 8.0), // does not restore patience
            (true, 4.0),  // second
            (true, 2.0),  // every further one
            (true, 2.0),  // the minimum
            (false, 2.0),
            (false, 2.0),
            (true, 2.0), // the window starts anew
            (false, 2.0),
            (false, 2.0),
            (false, 4.0), // three in a row
            (true, 4.0),  // patience is back
            (true, 2.0),
        ]
        .into_iter()
        .enumerate()
        {
            scaler.update(overflow);
            assert_eq!(scaler.scale(), want, "step {step}");
        }
        let mut other = LossScaler::new(config).unwrap();
        other.set_state(scaler.state());
        assert_eq!(other, scaler);
    }

    #[test]
    fn a_constant_scale_never_changes() {
        let mut scaler = LossScaler::new(LossScale::Constant(128.0)).unwrap();
        scaler.update(true);
        scaler.set_state(LossScaleState { scale: 1.0, steady: 2, patience: 3 });
        assert_eq!((scaler.scale(), scaler.skips()), (128.0, false));
    }

    #[test]
    fn constants_out_of_range_are_named() {
        let dynamic = |initial, window, hysteresis, minimum| {
            LossScaler::new(LossScale::Dynamic { initial, window, hysteresis, minimum })
        };
        for (result, name) in [
            (LossScaler::new(LossScale::Constant(0.0)), "loss-scale"),
            (LossScaler::new(LossScale::Constant(f64::INFINITY)), "loss-scale"),
            (dynamic(0.0, 1, 1, 2.0), "initial-loss-scale"),
            (dynamic(1.0, 1, 1, 2.0), "min-loss-scale"),
            (dynamic(4.0, 0, 1, 2.0), "loss-scale-window"),
            (dynamic(4.0, 1, 0, 2.0), "hysteresis"),
        ] {
            assert!(result.unwrap_err().to_string().starts_with(name));
        }
    }
}
