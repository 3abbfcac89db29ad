//! Several data sets in one order, by weight: Megatron-LM's `BlendedDataset`.
//!
//! Each sample comes from the set that lags furthest behind its share.

use ferrotron_tensor::{Error, Result};

/// Samples that each set has in reserve: Megatron's `mid_level_dataset_surplus`.
const SURPLUS: f64 = 0.005;

/// Weights whose sum is 1.
#[derive(Debug, Clone, PartialEq)]
pub struct Weights(Vec<f64>);

impl Weights {
    /// Divides weights by their sum.
    ///
    /// # Errors
    /// A weight that is not positive and finite; more sets than 2^15.
    pub fn new(weights: &[f64]) -> Result<Weights> {
        if let Some(weight) = weights.iter().find(|weight| !(weight.is_finite() && **weight > 0.0))
        {
            let message = format!("{weight} is no weight of a data set: above 0 and finite");
            return Err(Error::config("--data", message));
        }
        if weights.len() > i16::MAX as usize {
            let message =
                format!("{} data sets, and Megatron's order counts up to 32767", weights.len());
            return Err(Error::config("--data", message));
        }
        let sum = pairwise_sum(weights);
        Ok(Weights(weights.iter().map(|weight| weight / sum).collect()))
    }

    /// Samples that each set must have.
    pub fn needed(&self, samples: u64) -> Vec<u64> {
        let share = |weight: &f64| (samples as f64 * weight).ceil();
        self.0.iter().map(|weight| (share(weight) * (1.0 + SURPLUS)).ceil() as u64).collect()
    }

    /// The set of each of the first `samples` samples, and the number of the sample within it.
    pub fn order(&self, samples: u64) -> Vec<(u16, u32)> {
        let mut taken = vec![0_u32; self.0.len()];
        let next = |step: u64| {
            let step = step.max(1) as f64;
            let lag = |set: usize| self.0[set] * step - f64::from(taken[set]);
            // The first of several that lag equally.
            let furthest = |best: usize, set: usize| if lag(set) > lag(best) { set } else { best };
            let set = (1..self.0.len()).fold(0, furthest);
            taken[set] += 1;
            (set as u16, taken[set] - 1)
        };
        (0..samples).map(next).collect()
    }
}

/// NumPy's sum, in its order of additions.
fn pairwise_sum(values: &[f64]) -> f64 {
    match values.len() {
        0..8 => values.iter().fold(0.0, |sum, value| sum + value),
        8..=128 => {
            let (blocks, rest) = values.as_chunks::<8>();
            let mut sums = blocks[0];
            for block in &blocks[1..] {
                sums.iter_mut().zip(block).for_each(|(sum, value)| *sum += value);
            }
            let [a, b, c, d, e, f, g, h] = sums;
            rest.iter().fold(((a + b) + (c + d)) + ((e + f) + (g + h)), |sum, value| sum + value)
        }
        len => {
            let (first, rest) = values.split_at(len / 2 - len / 2 % 8);
            pairwise_sum(first) + pairwise_sum(rest)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_is_that_of_megatron() {
        let sets = |weights: &[f64]| {
            let order = Weights::new(weights).unwrap().order(10);
            order.into_iter().map(|(set, _)| set).collect::<Vec<u16>>()
        };
        assert_eq!(sets(&[0.3, 0.7]), [1, 0, 1, 1, 0, 1, 1, 0, 1, 1]);
        assert_eq!(sets(&[0.5, 0.3, 0.2]), [0, 1, 2, 0, 1, 0, 2, 0, 1, 0]);
        assert_eq!(sets(&[30.0, 70.0]), sets(&[0.3, 0.7]));
        let order = Weights::new(&[1.0, 3.0]).unwrap().order(4000);
        assert_eq!(order.iter().filter(|(set, _)| *set == 0).count(), 1000);
        let second: Vec<u32> = order.iter().filter(|row| row.0 == 1).map(|row| row.1).collect();
        assert_eq!(second, (0..3000).collect::<Vec<u32>>());
    }

    /// CRC-32 of the two indices of a blend as Megatron keeps them; `data/tests/megatron_order.py` computes them with
    /// NumPy.
    #[test]
    fn blends_are_those_of_a_restatement_with_numpy() {
        let few: Vec<f64> = (0..37).map(|i| 1.0 / f64::from(i + 3)).collect();
        let many: Vec<f64> = (0..300).map(|i| f64::from(i * 7919 % 1000 + 1) / 3.0).collect();
        for (weights, want) in
            [(few, [0x7bd0_0448, 0xf375_9d86]), (many, [0x8ee1_6434, 0xbde2_d6b1])]
        {
            let order = Weights::new(&weights).unwrap().order(50_000);
            let sets: Vec<u8> = order.iter().flat_map(|row| row.0.to_le_bytes()).collect();
            let samples: Vec<u8> =
                order.iter().flat_map(|row| u64::from(row.1).to_le_bytes()).collect();
            assert_eq!([&sets, &samples].map(|bytes| crc32fast::hash(bytes)), want);
        }
    }

    #[test]
    fn sets_have_samples_in_reserve() {
        let weights = Weights::new(&[0.3, 0.7]).unwrap();
        assert_eq!(weights.needed(1001), [303, 705]);
        for wrong in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(Weights::new(&[1.0, wrong]).is_err());
        }
    }
}
