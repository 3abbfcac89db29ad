//! A keyed pseudo-random permutation of `0..len` that is computed, not stored.
//!
//! A Feistel network whose round function is Philox permutes the smallest domain of 2^(2h) numbers
//! that holds `0..len`; a result outside `0..len` is permuted again until it falls inside (cycle
//! walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002), less than four
//! times on average. Both steps are bijections, so every number comes out exactly once, and looking
//! up any one of them costs the same and needs no table, whatever the length.

use ferrotron_tensor::RandomKey;

/// Luby and Rackoff (1988) need four rounds on long halves; the halves are short here, where more
/// rounds mix better.
const ROUNDS: u64 = 8;

/// A permutation of `0..len`, chosen by a key.
///
/// ```
/// use ferrotron_data::Permutation;
/// use ferrotron_tensor::RandomKey;
/// let order = Permutation::new(RandomKey::new(1234, 0, "example"), 10);
/// let mut all: Vec<u64> = (0..10).map(|i| order.at(i)).collect();
/// all.sort();
/// assert_eq!(all, (0..10).collect::<Vec<u64>>());
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Permutation {
    key: RandomKey,
    len: u64,
    /// Bits of each half, at most 32.
    half: u32,
}

impl Permutation {
    /// The permutation of `0..len` that belongs to `key`.
    pub fn new(key: RandomKey, len: u64) -> Self {
        let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
        Permutation { key, len, half: bits.div_ceil(2) }
    }

    /// Maps `index` to its place in the permutation.
    ///
    /// # Panics
    /// If `index >= len`.
    pub fn at(&self, index: u64) -> u64 {
        assert!(index < self.len, "permutation: index {index} of {}", self.len);
        // The walk follows the cycle that `index` lies on, so it ends at the latest at `index` itself.
        let mut at = self.permute_domain(index);
        while at >= self.len {
            at = self.permute_domain(at);
        }
        at
    }

    /// One pass of the Feistel network over the 2^(2 half) numbers of the domain.
    fn permute_domain(&self, value: u64) -> u64 {
        let mask = (1 << self.half) - 1;
        let (mut left, mut right) = (value >> self.half, value & mask);
        for round in 0..ROUNDS {
            let noise = u64::from(self.key.block(round << 32 | right)[0]) & mask;
            (left, right) = (right, left ^ noise);
        }
        left << self.half | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn order(seed: u64, len: u64) -> Vec<u64> {
        let permutation = Permutation::new(RandomKey::new(seed, 0, "test"), len);
        (0..len).map(|index| permutation.at(index)).collect()
    }

    #[test]
    fn every_small_length_is_a_bijection() {
        for len in 1..300 {
            let mut all = order(7, len);
            all.sort_unstable();
            assert_eq!(all, (0..len).collect::<Vec<u64>>(), "length {len}");
        }
    }

    proptest! {
        #[test]
        fn any_length_stays_in_range_and_is_injective(
            seed: u64, len in 1u64.., indices in proptest::collection::hash_set(any::<u64>(), 1..40)
        ) {
            let permutation = Permutation::new(RandomKey::new(seed, 0, "test"), len);
            let mut seen = HashMap::new();
            for index in indices.into_iter().map(|index| index % len) {
                let at = permutation.at(index);
                prop_assert!(at < len);
                prop_assert_eq!(*seen.entry(at).or_insert(index), index);
            }
        }
    }

    #[test]
    fn all_orders_of_a_few_are_equally_likely() {
        // Chi-square of the 24 orders of four over 24000 keys: 23 degrees of freedom, 63 has a
        // probability of 1e-5.
        let mut counts = HashMap::new();
        for seed in 0..24_000 {
            *counts.entry(order(seed, 4)).or_insert(0u32) += 1;
        }
        assert_eq!(counts.len(), 24);
        let chi: f64 = counts.values().map(|&n| (f64::from(n) - 1000.0).powi(2) / 1000.0).sum();
        assert!(chi < 63.0, "{chi}");
    }

    #[test]
    fn neighbours_do_not_stay_neighbours() {
        let order = order(1, 10_000);
        let close = order.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) <= 10).count();
        // Expected 20 in 10000 pairs, with a standard deviation of 4.5.
        assert!(close < 50, "{close}");
    }
}
