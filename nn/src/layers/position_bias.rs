//! Biases of attention scores by the distance of query and key: the slopes of ALiBi, the trained buckets of T5.

use ferrotron_tensor::{Error, Result};

/// Bias of the scores by the distance of query and key, in place of positions of the inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PositionBias {
    /// ALiBi (Press et al., arXiv 2108.12409): minus the distance times a slope of the head, which is not trained. The
    /// slopes of 8 heads are 1/2, 1/4, ..., 1/256.
    Alibi,
    /// T5 (Raffel et al., arXiv 1910.10683, section 2.1): a trained number for each head and bucket of distances. Half of
    /// the buckets have one distance each, the others grow with the logarithm of the distance, and the last one has all
    /// from `max_distance` on. Where queries see later keys, these have half of all buckets.
    Relative {
        /// Number of buckets: 32 in T5.
        buckets: usize,
        /// The distance from which on all are in one bucket: 128 in T5.
        max_distance: usize,
    },
}

impl PositionBias {
    /// Errors unless the buckets have a distance each and the last one is farther.
    pub(crate) fn check(self, causal: bool) -> Result<()> {
        let PositionBias::Relative { buckets, max_distance } = self else { return Ok(()) };
        let exact = if causal { buckets / 2 } else { buckets / 4 };
        if exact == 0 || max_distance <= exact || !causal && !buckets.is_multiple_of(2) {
            let least = if causal { "2 or more" } else { "an even number of 4 or more" };
            let message = format!(
                "relative positions need {least} buckets and a max_distance above {exact}, got {buckets} buckets and \
                 {max_distance}"
            );
            return Err(Error::config("attention", message));
        }
        Ok(())
    }
}

/// The slope of each head: 2^(-8 i / n) for i from 1 to n, the largest power of two up to `heads`; further heads have
/// every other slope of 2 n heads, as in the published code.
pub(crate) fn alibi_slopes(heads: usize) -> Vec<f64> {
    let base = if heads == 0 { 1 } else { 1 << heads.ilog2() };
    let of = |n: usize| (1..=n).map(move |i| 2_f64.powf(-8.0 * i as f64 / n as f64));
    of(base).chain(of(2 * base).step_by(2)).take(heads).collect()
}

/// The bucket of a distance in one direction, counted from 0.
pub(crate) fn bucket(distance: usize, buckets: usize, max_distance: usize, causal: bool) -> u32 {
    let own = if causal { buckets } else { buckets / 2 };
    let exact = own / 2;
    if distance < exact {
        return distance as u32;
    }
    let ratio = (distance as f64 / exact as f64).ln() / (max_distance as f64 / exact as f64).ln();
    (exact + (ratio * (own - exact) as f64) as usize).min(own - 1) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_those_of_the_paper() {
        assert_eq!(alibi_slopes(8), (1..=8).map(|i| 0.5_f64.powi(i)).collect::<Vec<_>>());
        assert_eq!(alibi_slopes(1), [1.0 / 256.0]);
        // Four slopes of 4 heads, then the first and the third of 8.
        let want = [1, 2, 3, 4].map(|i| 0.25_f64.powi(i));
        assert_eq!(alibi_slopes(6), [&want[..], &[0.5, 0.125]].concat());
    }

    #[test]
    fn buckets_are_those_of_t5() {
        // 32 buckets up to a distance of 128, as `T5Attention._relative_position_bucket` of transformers gives them.
        let causal = |distance| bucket(distance, 32, 128, true);
        let got = [0, 1, 15, 16, 17, 19, 20, 31, 32, 64, 112, 127, 128, 1000].map(causal);
        assert_eq!(got, [0, 1, 15, 16, 16, 17, 17, 21, 21, 26, 30, 31, 31, 31]);
        let both = |distance| bucket(distance, 32, 128, false);
        let got = [0, 7, 8, 11, 12, 16, 23, 64, 127, 128, 1000].map(both);
        assert_eq!(got, [0, 7, 8, 8, 9, 10, 11, 14, 15, 15, 15]);
    }
}
