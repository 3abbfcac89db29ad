//! The set from which each sample of a blend comes: Megatron-LM's `build_blending_indices`.
//!
//! Each sample comes from the set that lags furthest behind its share: of sets with weights `w` and `c` samples taken, step
//! `s` takes the first with the largest `w * max(s, 1) - c`, in f64. A step depends on those before it alone, so the order
//! is computed as far as it is asked for and does not depend on the length of the run.

use std::sync::{Mutex, PoisonError};

/// Samples that each set has in reserve: Megatron's `mid_level_dataset_surplus`.
const SURPLUS: f64 = 0.005;

/// Weights divided by their sum, which is NumPy's.
pub(crate) fn normalized(weights: &[f64]) -> Vec<f64> {
    let sum = pairwise_sum(weights);
    weights.iter().map(|weight| weight / sum).collect()
}

/// The samples that Megatron makes of each set, for `samples` of all with these normalized weights.
pub(crate) fn needed(normalized: &[f64], samples: u64) -> Vec<u64> {
    let share = |weight: &f64| (samples as f64 * weight).ceil();
    normalized.iter().map(|weight| (share(weight) * (1.0 + SURPLUS)).ceil() as u64).collect()
}

/// The set of each sample, and the number of the sample within it.
pub(crate) struct BlendOrder {
    /// The share of each set.
    weights: Vec<f64>,
    /// The samples that each set has, if it is read once.
    sizes: Option<Vec<u64>>,
    steps: Mutex<Steps>,
}

struct Steps {
    /// Samples taken of each set; infinite of one that is spent.
    taken: Vec<f64>,
    /// Number of sets that have samples left.
    unspent: usize,
    /// The set of each step, and the number of its sample.
    rows: Vec<(u16, u32)>,
}

impl BlendOrder {
    /// The order for weights whose sum is 1.
    pub fn new(weights: Vec<f64>) -> BlendOrder {
        let unspent = weights.len();
        let steps = Steps { taken: vec![0.0; unspent], unspent, rows: Vec::new() };
        BlendOrder { weights, sizes: None, steps: Mutex::new(steps) }
    }

    /// The order in which a set leaves after so many samples.
    pub fn finite(weights: Vec<f64>, sizes: Vec<u64>) -> BlendOrder {
        let mut order = BlendOrder::new(weights);
        let steps = order.steps.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (taken, _) in steps.taken.iter_mut().zip(&sizes).filter(|(_, size)| **size == 0) {
            *taken = f64::INFINITY;
            steps.unspent -= 1;
        }
        BlendOrder { sizes: Some(sizes), ..order }
    }

    /// The share of each set.
    pub fn weights(&self) -> &[f64] {
        &self.weights
    }

    /// The set of sample `sample` and the number of the sample within it; `None` if all sets are spent before.
    pub fn at(&self, sample: u64) -> Option<(usize, u64)> {
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        while steps.rows.len() as u64 <= sample {
            self.step(&mut steps)?;
        }
        let (set, number) = steps.rows[sample as usize];
        Some((usize::from(set), number.into()))
    }

    /// The samples of each set among the first `samples`.
    pub fn taken(&self, samples: u64) -> Vec<u64> {
        if let Some(last) = samples.checked_sub(1) {
            self.at(last);
        }
        let mut taken = vec![0; self.weights.len()];
        let steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        steps.rows.iter().take(samples as usize).for_each(|row| taken[usize::from(row.0)] += 1);
        taken
    }

    fn step(&self, steps: &mut Steps) -> Option<()> {
        if steps.unspent == 0 {
            return None;
        }
        let number = (steps.rows.len() as u64).max(1) as f64;
        let set = furthest_behind(&self.weights, &steps.taken, number);
        steps.rows.push((set as u16, steps.taken[set] as u32));
        steps.taken[set] += 1.0;
        if self.sizes.as_ref().is_some_and(|sizes| sizes[set] as f64 == steps.taken[set]) {
            steps.taken[set] = f64::INFINITY;
            steps.unspent -= 1;
        }
        Some(())
    }
}

/// The first set with the largest `weight * number - taken`. A run that resumes takes all steps again, so the largest value
/// is found with vector instructions, and its place after that.
fn furthest_behind(weights: &[f64], taken: &[f64], number: f64) -> usize {
    let larger = |a: f64, b: f64| if b > a { b } else { a };
    let ((weight_blocks, weight_rest), (taken_blocks, taken_rest)) =
        (weights.as_chunks::<8>(), taken.as_chunks::<8>());
    let mut most = [f64::NEG_INFINITY; 8];
    for (weights, taken) in weight_blocks.iter().zip(taken_blocks) {
        for lane in 0..8 {
            most[lane] = larger(most[lane], weights[lane] * number - taken[lane]);
        }
    }
    let rest = weight_rest.iter().zip(taken_rest).map(|(weight, taken)| weight * number - taken);
    let most = rest.chain(most).fold(f64::NEG_INFINITY, larger);
    let is_most = |(weight, taken): (&f64, &f64)| weight * number - taken == most;
    weights.iter().zip(taken).position(is_most).unwrap_or(0)
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

    /// The order of Megatron's two normalizations.
    fn order(weights: &[f64]) -> BlendOrder {
        BlendOrder::new(normalized(&normalized(weights)))
    }

    fn rows(order: &BlendOrder, samples: u64) -> Vec<(usize, u64)> {
        (0..samples).map_while(|sample| order.at(sample)).collect()
    }

    #[test]
    fn the_order_is_that_of_megatron() {
        let sets = |weights: &[f64]| {
            rows(&order(weights), 10).into_iter().map(|row| row.0).collect::<Vec<usize>>()
        };
        assert_eq!(sets(&[0.3, 0.7]), [1, 0, 1, 1, 0, 1, 1, 0, 1, 1]);
        assert_eq!(sets(&[0.5, 0.3, 0.2]), [0, 1, 2, 0, 1, 0, 2, 0, 1, 0]);
        assert_eq!(sets(&[30.0, 70.0]), sets(&[0.3, 0.7]));
        let order = order(&[1.0, 3.0]);
        assert_eq!(order.taken(4000), [1000, 3000]);
        let second = rows(&order, 4000).into_iter().filter(|row| row.0 == 1).map(|row| row.1);
        assert_eq!(second.collect::<Vec<u64>>(), (0..3000).collect::<Vec<u64>>());
    }

    /// CRC-32 of the two indices of a blend as Megatron keeps them; `data/tests/megatron_order.py` computes them with
    /// NumPy.
    #[test]
    fn blends_are_those_of_a_restatement_with_numpy() {
        let few: Vec<f64> = (0..37).map(|i| 1.0 / f64::from(i + 3)).collect();
        let many: Vec<f64> = (0..300).map(|i| f64::from(i * 7919 % 1000 + 1) / 3.0).collect();
        for (weights, want) in
            [(few, [0x7bd0_0448, 0xf375_9d86]), (many, [0x989e_4e4c, 0x4bf0_98bb])]
        {
            let rows = rows(&order(&weights), 50_000);
            let sets: Vec<u8> = rows.iter().flat_map(|row| (row.0 as u16).to_le_bytes()).collect();
            let samples: Vec<u8> = rows.iter().flat_map(|row| row.1.to_le_bytes()).collect();
            assert_eq!([&sets, &samples].map(|bytes| crc32fast::hash(bytes)), want);
        }
    }

    #[test]
    fn the_first_of_the_sets_furthest_behind_is_taken() {
        for sets in [1, 7, 8, 9, 31] {
            let weights: Vec<f64> = (0..sets).map(|i| f64::from(i * 7919 % 5 + 1)).collect();
            let weights = normalized(&weights);
            let taken: Vec<f64> = (0..sets).map(|i| f64::from(i * 104_729 % 3)).collect();
            let lags = weights.iter().zip(&taken).map(|(weight, taken)| weight * 4.0 - taken);
            let lags: Vec<f64> = lags.collect();
            let want =
                (1..lags.len()).fold(0, |best, i| if lags[i] > lags[best] { i } else { best });
            assert_eq!(furthest_behind(&weights, &taken, 4.0), want, "{sets} sets");
        }
    }

    #[test]
    fn a_spent_set_leaves() {
        let order = BlendOrder::finite(normalized(&[3.0, 1.0]), vec![2, 4]);
        let sets: Vec<usize> = rows(&order, 100).into_iter().map(|row| row.0).collect();
        assert_eq!(sets, [0, 1, 0, 1, 1, 1]);
        assert_eq!(BlendOrder::finite(vec![0.5, 0.5], vec![0, 0]).at(0), None);
    }

    #[test]
    fn sets_have_samples_in_reserve() {
        assert_eq!(needed(&normalized(&[0.3, 0.7]), 1001), [303, 705]);
    }
}
