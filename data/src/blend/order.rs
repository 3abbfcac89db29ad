//! The set from which each sample of a blend comes: Megatron-LM's `build_blending_indices`.
//!
//! Each sample comes from the set that lags furthest behind its share: of sets with weights `w` and `c` samples taken, step
//! `s` takes the first with the largest `w * max(s, 1) - c`, in f64. A step depends on those before it alone, so the order
//! is computed as far as it is asked for and does not depend on the length of the run.
//!
//! No formula gives `c`, since it depends on rounding. So a checkpoint keeps `c` as it is at the beginning of the block of
//! steps that its run is in, and a run that resumes takes the steps of that block once more. Without it, the run takes all
//! steps before. Steps are taken as samples are asked for. Memory holds those of one block so far, and `c` at the beginning of
//! each block that was reached: 8 bytes for each set and block, which is at most 1/16 byte for each sample of the run.

use std::collections::BTreeMap;
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
    /// Steps of a block.
    block: u64,
    steps: Mutex<Steps>,
}

/// The samples that are taken before a step.
#[derive(Clone)]
struct Taken {
    /// Number of samples of each set; infinite for one that is spent.
    of_set: Vec<f64>,
    /// Number of sets that have samples left.
    unspent: usize,
}

struct Steps {
    /// Samples that are taken before the first block, and before others that were reached.
    before_blocks: BTreeMap<u64, Taken>,
    /// The number of the block whose first steps are `rows`.
    current: u64,
    /// The set of each step so far, and the number of its sample.
    rows: Vec<(u16, u64)>,
    /// The samples that are taken before the step behind `rows`.
    behind_rows: Taken,
}

impl BlendOrder {
    /// The order for weights whose sum is 1.
    pub fn new(weights: Vec<f64>) -> BlendOrder {
        let taken = Taken { of_set: vec![0.0; weights.len()], unspent: weights.len() };
        BlendOrder::from(weights, None, taken)
    }

    /// The order in which a set leaves after so many samples.
    pub fn finite(weights: Vec<f64>, sizes: Vec<u64>) -> BlendOrder {
        let of_set: Vec<f64> =
            sizes.iter().map(|&size| if size == 0 { f64::INFINITY } else { 0.0 }).collect();
        let unspent = sizes.iter().filter(|size| **size > 0).count();
        BlendOrder::from(weights, Some(sizes), Taken { of_set, unspent })
    }

    fn from(weights: Vec<f64>, sizes: Option<Vec<u64>>, first: Taken) -> BlendOrder {
        // What is taken before blocks then needs little more memory than the steps of one.
        let block = (1 << 16).max(128 * weights.len() as u64);
        let before_blocks = BTreeMap::from([(0, first.clone())]);
        let steps = Steps { before_blocks, current: 0, rows: Vec::new(), behind_rows: first };
        BlendOrder { weights, sizes, block, steps: Mutex::new(steps) }
    }

    /// The share of each set.
    pub fn weights(&self) -> &[f64] {
        &self.weights
    }

    /// The set of sample `sample` and the number of the sample within it; `None` if all sets are spent before.
    pub fn at(&self, sample: u64) -> Option<(usize, u64)> {
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        let steps = &mut *steps;
        let (block, place) = (sample / self.block, (sample % self.block) as usize);
        if steps.current != block {
            steps.behind_rows = self.before(steps, block);
            steps.current = block;
            steps.rows.clear();
        }
        while steps.rows.len() <= place {
            let step = block * self.block + steps.rows.len() as u64;
            steps.rows.push(self.step(&mut steps.behind_rows, step)?);
            if steps.rows.len() as u64 == self.block {
                steps.before_blocks.insert(block + 1, steps.behind_rows.clone());
            }
        }
        let (set, number) = steps.rows[place];
        Some((usize::from(set), number))
    }

    /// The samples of each set among the first `samples`, in an order without sizes.
    pub fn taken(&self, samples: u64) -> Vec<u64> {
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        let block = samples / self.block;
        let mut taken = self.before(&mut steps, block);
        let known = if steps.current == block { &steps.rows[..] } else { &[] };
        let rest = (samples % self.block) as usize;
        let known = &known[..known.len().min(rest)];
        known.iter().for_each(|(set, _)| taken.of_set[usize::from(*set)] += 1.0);
        for step in block * self.block + known.len() as u64..samples {
            self.step(&mut taken, step);
        }
        taken.of_set.iter().map(|&taken| taken as u64).collect()
    }

    /// The first set of which more than its size are among the first `samples`, and how many are, in an order without sizes.
    pub fn first_short(&self, samples: u64, sizes: &[u64]) -> Option<(usize, u64)> {
        // A set is taken only if it lags behind, so it is never more than one sample ahead.
        let most = |weight: f64| weight * samples.saturating_sub(1) as f64 + 1.001;
        let enough = |(weight, size): (&f64, &u64)| most(*weight) < (*size + 1) as f64;
        if self.weights.iter().zip(sizes).all(enough) {
            return None;
        }
        let taken = self.taken(samples);
        let short = (0..sizes.len()).find(|&set| taken[set] > sizes[set])?;
        Some((short, taken[short]))
    }

    /// The state of the order before `sample`, for [`BlendOrder::resume`]: a checksum of the weights, the number of the
    /// block, and what is taken of each set before it. Of an order without sizes.
    pub fn state(&self, sample: u64) -> Vec<u64> {
        let block = sample / self.block;
        [self.crc32(), block].into_iter().chain(self.taken(block * self.block)).collect()
    }

    /// Takes the state of the same order; that of another one is ignored.
    pub fn resume(&self, state: &[u64]) {
        let [crc32, block, taken @ ..] = state else { return };
        let sum = taken.iter().try_fold(0_u64, |sum, &taken| sum.checked_add(taken));
        let steps_before = block.checked_mul(self.block);
        if *crc32 != self.crc32() || taken.len() != self.weights.len() || sum != steps_before {
            return;
        }
        let of_set = taken.iter().map(|&taken| taken as f64).collect();
        let before = Taken { of_set, unspent: self.weights.len() };
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        steps.before_blocks.entry(*block).or_insert(before);
    }

    fn crc32(&self) -> u64 {
        let bytes: Vec<u8> = self.weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
        crc32fast::hash(&bytes).into()
    }

    /// The samples that are taken before a block. The steps between the last block that was reached and this one are taken,
    /// and no rows change.
    fn before(&self, steps: &mut Steps, block: u64) -> Taken {
        let (&known, taken) = steps.before_blocks.range(..=block).next_back().expect("0 is there");
        let (mut first, mut taken) = (known * self.block, taken.clone());
        if known == steps.current && known < block {
            (first, taken) = (first + steps.rows.len() as u64, steps.behind_rows.clone());
        }
        for step in first..block * self.block {
            self.step(&mut taken, step);
            if (step + 1).is_multiple_of(self.block) {
                steps.before_blocks.insert((step + 1) / self.block, taken.clone());
            }
        }
        taken
    }

    /// The set of a step and the number of its sample, which is taken; `None` if all sets are spent.
    fn step(&self, taken: &mut Taken, step: u64) -> Option<(u16, u64)> {
        if taken.unspent == 0 {
            return None;
        }
        let set = furthest_behind(&self.weights, &taken.of_set, step.max(1) as f64);
        let number = taken.of_set[set];
        taken.of_set[set] += 1.0;
        if self.sizes.as_ref().is_some_and(|sizes| sizes[set] as f64 == taken.of_set[set]) {
            taken.of_set[set] = f64::INFINITY;
            taken.unspent -= 1;
        }
        Some((set as u16, number as u64))
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

    /// Any step, in any order of asking, is that of a loop over all of them, which keeps them all.
    #[test]
    fn steps_far_apart_are_those_of_a_plain_loop() {
        let weights = normalized(&normalized(&[0.1, 0.2, 0.4, 0.03]));
        let (mut taken, mut all) = ([0_u64; 4], Vec::new());
        for step in 0..400_000_u64 {
            let lag = |set: usize| weights[set] * step.max(1) as f64 - taken[set] as f64;
            let set = (1..4).fold(0, |best, set| if lag(set) > lag(best) { set } else { best });
            all.push((set, taken[set]));
            taken[set] += 1;
        }
        let order = order(&[0.1, 0.2, 0.4, 0.03]);
        for step in [399_999, 0, 65_535, 65_536, 65_537, 131_072, 12, 262_143, 300_000] {
            assert_eq!(order.at(step), Some(all[step as usize]), "step {step}");
        }
        for samples in [0, 1, 65_535, 65_536, 200_001] {
            let count = |set| all[..samples].iter().filter(|row| row.0 == set).count() as u64;
            assert_eq!(order.taken(samples as u64), (0..4).map(count).collect::<Vec<u64>>());
        }
    }

    /// A run that resumes at a late sample takes the steps of one block, not the billion before it.
    #[test]
    fn an_order_resumes_at_any_sample_by_its_state() {
        let weights = [0.1, 0.2, 0.4, 0.03];
        let unbroken = order(&weights);
        for sample in [0, 65_535, 65_536, 300_000] {
            let resumed = order(&weights);
            resumed.resume(&unbroken.state(sample));
            for step in [sample, sample + 1, sample + 100_000, 5] {
                assert_eq!(resumed.at(step), unbroken.at(step), "{step}");
            }
        }
        // The state at a sample far behind, without any step before it.
        let blocks = 1_000_000_000_000 / 65_536;
        let total = blocks * 65_536;
        let even = order(&[1.0, 1.0]);
        let state = [even.state(0)[0], blocks, total / 2, total / 2];
        even.resume(&state);
        assert_eq!(even.at(total + 4), Some((0, total / 2 + 2)));
        assert_eq!(even.state(total + 4), state);
        // States of other orders, and damaged ones.
        let fresh = order(&weights);
        for state in
            [vec![], vec![1, 2], even.state(70_000), vec![fresh.state(0)[0], 9, 1, 1, 1, 1]]
        {
            fresh.resume(&state);
            assert_eq!(fresh.at(700_000), unbroken.at(700_000));
        }
    }

    /// Many sets would hold a run up for seconds if a block were computed at once, or for each state.
    #[test]
    fn a_sample_takes_the_steps_up_to_it_and_a_state_takes_none() {
        let order = order(&[0.1, 0.2, 0.4, 0.03]);
        let rows = |order: &BlendOrder| {
            let steps = order.steps.lock().unwrap();
            (steps.current, steps.rows.len())
        };
        order.at(65_536 + 99);
        assert_eq!(rows(&order), (1, 100));
        order.state(65_536 + 50);
        order.taken(30);
        order.taken(65_536 + 120);
        order.state(400_000);
        assert_eq!(rows(&order), (1, 100));
        order.at(65_536 + 100);
        assert_eq!(rows(&order), (1, 101));
        // Steps behind those rows are not taken again.
        order.at(2 * 65_536 - 1);
        assert!(order.steps.lock().unwrap().before_blocks.contains_key(&2));
    }

    #[test]
    fn sets_with_enough_samples_need_no_steps() {
        let weights = normalized(&normalized(&[0.3, 0.7]));
        let order = BlendOrder::new(weights.clone());
        assert_eq!(order.first_short(1 << 50, &needed(&weights, 1 << 50)), None);
        assert_eq!(order.first_short(1000, &[299, 705]), Some((0, 300)));
        assert_eq!(order.first_short(1000, &[300, 700]), None);
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
