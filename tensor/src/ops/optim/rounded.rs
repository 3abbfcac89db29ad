//! The 16-bit weights that an update writes in the pass in which it changes weights in the accumulator type.
//!
//! Each task of an update rounds a few elements as soon as it has changed them. They are in the nearest cache then. It also
//! fetches later elements of all operands: memory delivers them while random numbers are computed.

use super::at_random::at_random;
use super::round::{Stochastic, check_pair, round, to_nearest};
use crate::numeric::disjoint::Disjoint;
use crate::numeric::prefetch::{self, AHEAD, Stream};
use crate::ops::optim::step::check_vectors;
use crate::ops::random::for_stretches_of;
use crate::{Element, Error, RandomKey, Result, ShardSpec, Tensor};
use std::ops::Range;

/// Elements that are updated before any of them is rounded: a few groups of random numbers.
const PIECE: usize = 256;

/// Weights that an update rounds from those in the accumulator type.
#[derive(Debug)]
pub struct Rounded<'a> {
    /// The rounded weights, a dense vector.
    pub target: &'a mut Tensor,
    /// The source of random numbers, or none to round to nearest.
    pub stochastic: Option<Stochastic<'a>>,
}

impl<'a> Rounded<'a> {
    /// Weights that are rounded to nearest.
    pub fn nearest(target: &'a mut Tensor) -> Rounded<'a> {
        Rounded { target, stochastic: None }
    }

    /// Rounds all weights, in a pass of its own.
    ///
    /// # Errors
    ///
    /// As [`round`].
    pub fn round(self, weights: &Tensor) -> Result<()> {
        round(self.target, weights, self.stochastic)
    }

    /// Errors unless these are roundings of `weights`.
    pub(crate) fn check(&self, op: &'static str, weights: &Tensor) -> Result<()> {
        check_vectors(op, &[weights, self.target])?;
        check_pair(op, self.target.dtype(), weights.dtype())?;
        let (n, copies) = (weights.numel(), self.target.numel());
        if copies != n {
            return Err(Error::shape(op, format!("{n} weights, copies of {copies}")));
        }
        let placed = self.stochastic.map_or(n, |it| it.place.dims().iter().product());
        if placed != n {
            return Err(Error::shape(op, format!("{n} weights, a place of {placed}")));
        }
        Ok(())
    }

    /// The weights for the tasks of update number `update`, on the CPU.
    pub(crate) fn shared<D: Element>(self, update: u64) -> Result<SharedRounded<'a, D>> {
        let random = self.stochastic.map(|it| {
            let key = if it.step.is_some() { it.key.at_step(update) } else { *it.key };
            (key, it.place)
        });
        Ok(SharedRounded { target: Disjoint::new(self.target.as_mut_slice::<D>()?), random })
    }
}

/// Weights that the tasks of an update round, each its own elements.
pub(crate) struct SharedRounded<'a, D> {
    target: Disjoint<'a, D>,
    random: Option<(RandomKey, &'a ShardSpec)>,
}

impl<D: Element> SharedRounded<'_, D> {
    /// Calls `update` with consecutive parts of `weights`, which are the elements from `start` on, and their ranges among
    /// them, and rounds each part once it is updated. Meanwhile fetches later weights, and later elements of what else is
    /// `read`.
    ///
    /// # Safety
    ///
    /// As [`Disjoint::part`], for as many elements as there are weights.
    pub(crate) unsafe fn update<T: Element<Acc = D::Acc>>(
        &self,
        start: usize,
        weights: &mut [T],
        read: &[Stream],
        mut update: impl FnMut(Range<usize>, &mut [T]),
    ) {
        let len = weights.len();
        // SAFETY: the caller's promise.
        let target = unsafe { self.target.part(start, len) };
        let [written, changed] = [Stream::new(target), Stream::new(weights)];
        let fetch = |first: usize| {
            written.fetch::<PIECE>(first, prefetch::to_write);
            changed.fetch::<PIECE>(first, prefetch::to_l1);
            read.iter().for_each(|stream| stream.fetch::<PIECE>(first, prefetch::to_l1));
        };
        let mut updated = 0;
        let mut round = |mut global: u64, range: Range<usize>| {
            let mut from = range.start;
            while from < range.end {
                // Cut at multiples of a piece among global indices, so that no random numbers are drawn twice.
                let to = range.end.min(from + PIECE - (global % PIECE as u64) as usize);
                while updated < to {
                    let next = updated..len.min(updated + PIECE);
                    updated = next.end;
                    fetch(next.start + AHEAD);
                    update(next.clone(), &mut weights[next]);
                }
                let (target, weights) = (&mut target[from..to], &weights[from..to]);
                match &self.random {
                    None => to_nearest(target, weights),
                    Some((key, _)) => at_random(key, global, target, weights),
                }
                (global, from) = (global + (to - from) as u64, to);
            }
        };
        match self.random {
            None => round(0, 0..len),
            Some((_, place)) => for_stretches_of(place, start..start + len, round),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::adafactor::{Adafactor, MatrixBatch, RowColFactors, SquareSums, adafactor};
    use crate::ops::adamw::{AdamW, adamw};
    use crate::ops::lion::{Lion, lion};
    use crate::ops::sgd::{Nesterov, Sgd, sgd};
    use crate::ops::step::{DeviceStepParams, StepParams};
    use crate::ops::testing::{bits, message, tensor, values};
    use crate::{DType, Device};

    const RULES: [&str; 5] = ["adamw", "sgd", "plain sgd", "lion", "adafactor"];

    /// A shard of several ranges in each dim, with chunks that begin within rows.
    fn place() -> ShardSpec {
        ShardSpec::new(&[400, 300], &[&[(3, 100), (150, 90)], &[(1, 120), (200, 97)]]).unwrap()
    }

    /// One step of a rule over weights of 1 with a state of 0.5.
    fn update(
        rule: &str,
        step: &DeviceStepParams,
        w: &mut Tensor,
        g: &Tensor,
        copy: Option<Rounded>,
    ) -> Result<()> {
        let (device, n, dims) = (w.device().clone(), w.numel(), place().dims().to_vec());
        let full = |n, x| Tensor::full(&device, DType::F32, &[n], x);
        let (mut m, mut v) = (full(n, 0.5)?, full(n, 0.25)?);
        let momentum = if rule == "sgd" { 0.9 } else { 0.0 };
        let sgd_of = Sgd { momentum, weight_decay: 0.1, nesterov: Nesterov::Off };
        match rule {
            "adamw" => adamw(&AdamW::default(), step, w, g, &mut m, &mut v, copy),
            "sgd" => sgd(&sgd_of, step, w, g, &mut m, copy),
            "plain sgd" => sgd(&sgd_of, step, w, g, &mut full(0, 0.0)?, copy),
            "lion" => lion(&Lion::default(), step, w, g, &mut m, copy),
            _ => {
                let config =
                    Adafactor { eps2: 0.0, clip_threshold: 1e9, beta1: 0.0, weight_decay: 1.0 };
                let shape = MatrixBatch::from_dims(&dims);
                let (rows, columns) = (full(dims[0], 0.5)?, full(dims[1], 0.25)?);
                let factors = RowColFactors { shape, rows, columns };
                let update = Tensor::full(&device, DType::F64, &[1], 1.0)?;
                let sums = SquareSums { weights: None, update, numel: n };
                adafactor(&config, step, w, g, (&factors, &sums), None, copy)
            }
        }
    }

    #[test]
    fn weights_are_rounded_as_in_a_pass_of_their_own() {
        let place = place();
        let n: usize = place.dims().iter().product();
        let (grads, key) = (values(n, 1), RandomKey::new(5, 0, "weight"));
        let numbers = StepParams { update: 7, lr: 0.01, grad_scale: 0.37 };
        for threads in [1, 2, 3] {
            let device = &Device::cpu(threads).unwrap();
            let step = DeviceStepParams::new(device, &numbers).unwrap();
            for (rule, dtype) in RULES.into_iter().flat_map(|r| [(r, DType::BF16), (r, DType::F16)])
            {
                let ones = |dtype| Tensor::full(device, dtype, &[n], 1.0).unwrap();
                for gradients in [dtype, DType::F32] {
                    let g = tensor(device, gradients, &[n], &grads);
                    let mut want_w = ones(DType::F32);
                    update(rule, &step, &mut want_w, &g, None).unwrap();
                    let random = Stochastic { key: &key, place: &place, step: Some(&step) };
                    for stochastic in [None, Some(random)] {
                        let (mut want, mut got, mut w) =
                            (ones(dtype), ones(dtype), ones(DType::F32));
                        round(&mut want, &want_w, stochastic).unwrap();
                        let copy = Rounded { target: &mut got, stochastic };
                        update(rule, &step, &mut w, &g, Some(copy)).unwrap();
                        let same = bits(&w) == bits(&want_w) && bits(&got) == bits(&want);
                        assert!(same, "{rule}, {dtype}, {gradients}, {threads}: {stochastic:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_skipped_step_rounds_nothing_and_errors_name_the_lengths() {
        let (device, place) = (&Device::cpu(1).unwrap(), place());
        let n: usize = place.dims().iter().product();
        let numbers = StepParams { update: 1, lr: 0.1, grad_scale: 1.0 };
        let mut step = DeviceStepParams::new(device, &numbers).unwrap();
        let full = |dtype, n, x| Tensor::full(device, dtype, &[n], x).unwrap();
        let (mut w, g) = (full(DType::F32, n, 1.0), full(DType::F32, n, 1.0));
        let wrong = ShardSpec::unsharded(&[3]);
        let key = RandomKey::new(5, 0, "weight");
        let placed = Some(Stochastic { key: &key, place: &wrong, step: None });
        for rule in RULES {
            let mut error = |mut target: Tensor, stochastic| {
                let copy = Rounded { target: &mut target, stochastic };
                message(update(rule, &step, &mut w, &g, Some(copy)))
            };
            let name = rule.trim_start_matches("plain ");
            let want = format!("{name}: {n} weights, copies of 1");
            assert_eq!(error(full(DType::BF16, 1, 1.0), None), want);
            let want = format!("{name}: {n} weights, a place of 3");
            assert_eq!(error(full(DType::BF16, n, 1.0), placed), want);
            let want = format!("{name}: f64 goes with f64, got f32");
            assert_eq!(error(full(DType::F64, n, 1.0), None), want);
        }
        assert_eq!(w.to_f64().unwrap(), vec![1.0; n]);
        step.set_found_inf(1.0, true).unwrap();
        for rule in RULES {
            let mut target = full(DType::BF16, n, 7.0);
            update(rule, &step, &mut w, &g, Some(Rounded::nearest(&mut target))).unwrap();
            assert_eq!(target.to_f64().unwrap(), vec![7.0; n], "{rule}");
        }
    }
}
