//! Frequencies of rotary positions for sequences longer than those of the first training.

use ferrotron_tensor::{Error, Result};
use std::f64::consts::TAU;

/// Llama 3.1's scaling of rotary frequencies: pairs that turn slowly are slowed down by `factor`, fast ones are left,
/// and those between are interpolated. `rope_type` llama3 in Hugging Face, `--use-rope-scaling` in Megatron.
///
/// With the wavelength w = 2 pi / frequency and the original length L, a frequency becomes
///
/// - itself if w < L / `high_freq_factor`;
/// - frequency / `factor` if w > L / `low_freq_factor`;
/// - (1 - s) frequency / `factor` + s frequency otherwise, s = (L / w - low) / (high - low).
///
/// ```
/// use ferrotron_nn::{AttentionConfig, RopeScaling};
/// let llama = AttentionConfig {
///     rotary_base: Some(500_000.0),
///     rope_scaling: Some(RopeScaling::llama3(8.0)),
///     ..AttentionConfig::new(4096, 32)
/// };
/// assert_eq!(llama.rope_scaling.unwrap().scaled(1e-6), 1.25e-7);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeScaling {
    /// Divides the frequencies of slow pairs: about the new length over the original.
    pub factor: f64,
    /// Pairs that turn fewer times than this in the original length are slow.
    pub low_freq_factor: f64,
    /// Pairs that turn more times than this in the original length are fast.
    pub high_freq_factor: f64,
    /// L: longest sequence of the first training.
    pub original_max_position_embeddings: usize,
}

impl RopeScaling {
    /// The scaling of Llama 3.1 (`factor` 8) and Llama 3.2 (32), first trained on sequences of 8192.
    pub const fn llama3(factor: f64) -> RopeScaling {
        RopeScaling {
            factor,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        }
    }

    /// A frequency, in radians per position, after scaling.
    pub fn scaled(&self, frequency: f64) -> f64 {
        let turns = self.original_max_position_embeddings as f64 * frequency / TAU;
        let slow = frequency / self.factor;
        if turns > self.high_freq_factor {
            frequency
        } else if turns < self.low_freq_factor {
            slow
        } else {
            let span = self.high_freq_factor - self.low_freq_factor;
            let share = (turns - self.low_freq_factor) / span;
            (1.0 - share) * slow + share * frequency
        }
    }

    /// Errors, naming the values, if the factors are no scaling, or if there is nothing to scale.
    pub fn check(&self, rotary: bool) -> Result<()> {
        let refuse = |message: String| Err(Error::config("rope_scaling", message));
        let RopeScaling { factor, low_freq_factor: low, high_freq_factor: high, .. } = *self;
        if !rotary {
            return refuse("means nothing without rotary positions".to_string());
        }
        if !(factor >= 1.0 && factor.is_finite()) {
            return refuse(format!("the factor must be at least 1, got {factor}"));
        }
        if !(low > 0.0 && high > low && high.is_finite()) {
            return refuse(format!("low_freq_factor {low} must be below high_freq_factor {high}"));
        }
        if self.original_max_position_embeddings == 0 {
            return refuse("original_max_position_embeddings must be positive, got 0".to_string());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrotron_tensor::ops::rotary::RotaryTable;

    /// Ratios of Llama 3.1 8B as `transformers` computes them: heads of 128, base 500,000, factor 8.
    #[test]
    fn the_scaling_is_that_of_llama_3() -> Result<()> {
        let scaling = RopeScaling::llama3(8.0);
        let frequencies = RotaryTable::frequencies(128, 500_000.0)?;
        for (pair, want) in [
            (0, 1.0),
            (28, 1.0),
            (29, 0.828_168_411_8),
            (30, 0.643_743_133_1),
            (32, 0.371_122_279_5),
            (34, 0.190_210_743_6),
            (35, 0.125),
            (63, 0.125),
        ] {
            let ratio = scaling.scaled(frequencies[pair]) / frequencies[pair];
            assert!((ratio - want).abs() < 1e-7, "pair {pair}: {ratio}, want {want}");
        }
        Ok(())
    }

    #[test]
    fn what_is_no_scaling_is_refused() {
        let llama3 = RopeScaling::llama3(8.0);
        for (rotary, scaling, wanted) in [
            (false, llama3, "without rotary positions"),
            (true, RopeScaling::llama3(0.5), "the factor must be at least 1, got 0.5"),
            (true, RopeScaling { low_freq_factor: 4.0, ..llama3 }, "4 must be below"),
            (true, RopeScaling { original_max_position_embeddings: 0, ..llama3 }, "got 0"),
        ] {
            let error = scaling.check(rotary).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }
}
