//! Splits a token stream into training, validation and test parts.

use ferrotron_tensor::{Error, Result};
use std::ops::Range;

/// Fractions of a token stream that are held out at its end: first those for validation, then those for testing, which
/// nothing here reads. The rest is for training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Split {
    /// The ends of training and validation, in units; the whole stream has `whole` units.
    ends: [f64; 2],
    whole: f64,
    /// Training, validation, testing.
    parts: [f64; 3],
}

impl Split {
    /// Holds out `fraction` for validation.
    ///
    /// # Errors
    /// A fraction outside `0.0 .. 1.0`.
    pub fn valid_fraction(fraction: f64) -> Result<Split> {
        if !(0.0..1.0).contains(&fraction) {
            let message =
                format!("{fraction} is not the fraction for validation: at least 0, below 1");
            return Err(Error::config("--valid-fraction", message));
        }
        Ok(Split {
            ends: [1.0 - fraction, 1.0],
            whole: 1.0,
            parts: [1.0 - fraction, fraction, 0.0],
        })
    }

    /// Divides in proportion to `parts`: training, validation, testing, as Megatron-LM's `--split`.
    ///
    /// # Errors
    /// No proportion for training, one below 0, or one that is not finite.
    ///
    /// ```
    /// use ferrotron_data::Split;
    /// assert_eq!(Split::valid_fraction(0.1)?.tokens(1000), [900, 100, 0]);
    /// assert_eq!(Split::proportions([949.0, 50.0, 1.0])?.tokens(1000), [949, 50, 1]);
    /// assert!(Split::proportions([0.0, 1.0, 1.0]).is_err());
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn proportions(parts: [f64; 3]) -> Result<Split> {
        let [training, validation, test] = parts;
        let sum: f64 = parts.iter().sum();
        if !(training > 0.0 && validation >= 0.0 && test >= 0.0 && sum.is_finite()) {
            let message = format!(
                "{training},{validation},{test} are no proportions for training, validation and testing: the first \
                 must be positive, the others at least 0"
            );
            return Err(Error::config("--split", message));
        }
        Ok(Split { ends: [training, training + validation], whole: sum, parts })
    }

    /// The numbers of training, validation and test tokens among `all`. The ends of the first two are rounded down:
    /// nanoGPT's `text[:int(n * 0.9)]` for a tenth held out.
    pub fn tokens(&self, all: u64) -> [u64; 3] {
        let tokens = self.ends.map(|end| match end == self.whole {
            true => all,
            false => (all as f64 * end / self.whole) as u64,
        });
        [tokens[0], tokens[1] - tokens[0], all - tokens[1]]
    }

    /// The sequences of `all` that Megatron-LM takes for training, validation and testing: cumulated shares, rounded to
    /// the nearest, ties to even.
    ///
    /// ```
    /// use ferrotron_data::Split;
    /// assert_eq!(Split::proportions([969.0, 30.0, 1.0])?.sequences(1500), [0..1454, 1454..1498, 1498..1500]);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn sequences(&self, all: u64) -> [Range<u64>; 3] {
        let sum: f64 = self.parts.iter().sum();
        let (mut share, mut start) = (0.0, 0);
        self.parts.map(|part| {
            share += part / sum;
            let end = ((share * all as f64).round_ties_even() as u64).clamp(start, all);
            let range = start..end;
            start = end;
            range
        })
    }
}

impl Default for Split {
    /// Holds out the last tenth for validation.
    fn default() -> Split {
        Split { ends: [0.9, 1.0], whole: 1.0, parts: [0.9, 0.1, 0.0] }
    }
}
