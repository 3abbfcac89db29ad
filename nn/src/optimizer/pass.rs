//! One optimizer step over the elements of a group: update, then rounding to 16 bits.

use ferrotron_tensor::ops::ema::ema;
use ferrotron_tensor::ops::round::{Stochastic, widen};
use ferrotron_tensor::ops::rounded::Rounded;
use ferrotron_tensor::{Device, FlatBuffer, MemoryKind, RandomKey, Result, Tensor};
use std::ops::Range;

use super::block::Block;
use super::group_state::{GroupState, Parts};
use super::moment::ParamShard;
use super::rule::{UpdateRule, UpdateStep};
use super::update_config::Rounding;

/// Maximum number of elements updated at once: 16 MiB of each moment. The next chunk is prefetched meanwhile.
pub(super) const RUN: usize = 1 << 22;

/// Number of chunks of offloaded state. A GPU holds three of them, less than a twentieth of a large state.
const RUNS: usize = 64;
/// Minimum chunk size for copies between GPU and host.
const LEAST: usize = 1 << 14;

/// One optimizer step over a group.
pub(super) struct Pass<'a> {
    pub device: &'a Device,
    pub rounding: Rounding,
    pub states: MemoryKind,
    pub ema_decay: Option<f64>,
    pub step: UpdateStep<'a>,
    /// Number of the step, from 1.
    pub count: u64,
    /// The names of the parameters that the step leaves alone, with their state.
    pub unused: &'a [String],
    /// The numbers that the rule prepared, per block.
    pub prepared: &'a [Vec<Tensor>],
}

/// A range of elements: gradients and states.
struct Elements<'a, 'k> {
    gradients: Tensor,
    states: &'a mut [&'k mut Tensor],
    step: UpdateStep<'a>,
    rule: &'a dyn UpdateRule,
}

impl Pass<'_> {
    /// Updates the weights that this rank owns, and their state.
    pub fn group(
        &self,
        state: &mut GroupState,
        (weights, owned): (&mut FlatBuffer, Range<usize>),
        (gradients, owned_gradients): (&FlatBuffer, Range<usize>),
    ) -> Result<()> {
        let dtype = weights.dtype();
        let rounds = dtype != dtype.accumulator() && self.rounding != Rounding::Nearest;
        // A rule that is no kernel gets its weights in the accumulator dtype.
        let widens = rounds || (dtype != dtype.accumulator() && !state.rule.is_fused());
        let in_place = state.master.is_none() && !widens;
        let whole_pieces = rounds || !state.blocks.is_empty();
        let pieces = self.used_pieces(state).into_iter();
        let runs: Vec<(usize, Range<usize>)> = match (whole_pieces, self.unused) {
            (true, _) => pieces.collect(),
            (false, []) => self.runs(0..owned.len()).map(|run| (0, run)).collect(),
            (false, _) => {
                pieces.flat_map(|(i, all)| self.runs(all).map(move |run| (i, run))).collect()
            }
        };
        let ranges: Vec<Range<usize>> = runs.iter().map(|(_, range)| range.clone()).collect();
        let behind = |range: &Range<usize>, start: usize| start + range.start..start + range.end;
        let Parts { rule, pieces, blocks, mut kept, has_master, mut reduced } = state.parts();
        let n_moments = reduced.aligned;
        FlatBuffer::for_each_chunk_mut(&mut kept, &ranges, |run, kept| {
            let (index, range) = (runs[run].0, &runs[run].1);
            let step = self.step_of(rule, index, blocks);
            let stored = gradients.slice(behind(range, owned_gradients.start))?;
            let gradients = self.gradients(rule, stored)?;
            let (moments, copies) = kept.split_at_mut(n_moments);
            let (master, average) = copies.split_at_mut(usize::from(has_master));
            reduced.with_states(index, moments, &mut |states| {
                let elements = Elements { gradients: gradients.clone(), states, step, rule };
                let piece = pieces.get(index).filter(|_| whole_pieces);
                weights.with_slice_mut(behind(range, owned.start), |weights| {
                    match &mut *master {
                        _ if in_place => elements.update(weights, None),
                        [master, ..] => self.exact(master, weights, elements, piece),
                        [] => {
                            let dims = [range.len()];
                            let mut exact = Tensor::empty(self.device, dtype.accumulator(), &dims)?;
                            widen(&mut exact, weights)?;
                            self.exact(&mut exact, weights, elements, piece)
                        }
                    }?;
                    match (self.ema_decay, &mut *average) {
                        (Some(decay), [average]) => {
                            let updated = master.first().map_or(&*weights, |master| &**master);
                            ema(decay, self.step.params, average, updated)
                        }
                        _ => Ok(()),
                    }
                })
            })
        })
    }

    /// The facts of the step for a piece.
    fn step_of<'s>(
        &'s self,
        rule: &dyn UpdateRule,
        index: usize,
        blocks: &'s [Block],
    ) -> UpdateStep<'s> {
        let prepared = self.prepared.get(index).map_or(&[][..], Vec::as_slice);
        UpdateStep { block: blocks.get(index), unit: rule.shard_unit(), prepared, ..self.step }
    }

    /// The gradients as the rule reads them: for a rule that is no kernel in the accumulator dtype, multiplied by the
    /// step's factor.
    fn gradients(&self, rule: &dyn UpdateRule, stored: Tensor) -> Result<Tensor> {
        match self.step.values.filter(|_| !rule.is_fused()) {
            None => Ok(stored),
            // Also by 1, so that memory does not depend on the norm.
            Some(numbers) => {
                let wide = stored.cast(stored.dtype().accumulator())?;
                wide.mul_scalar(numbers.grad_scale)
            }
        }
    }

    /// Updates copies of weights in the accumulator dtype, and rounds them into the weights.
    fn exact(
        &self,
        exact: &mut Tensor,
        weights: &mut Tensor,
        elements: Elements,
        piece: Option<&ParamShard>,
    ) -> Result<()> {
        match (self.rounding, piece) {
            (Rounding::Stochastic { seed }, Some(ParamShard { param, place, .. })) => {
                let key = RandomKey::new(seed, self.count, param);
                let step = Some(self.step.params);
                let stochastic = Some(Stochastic { key: &key, place, step });
                elements.update(exact, Some(Rounded { target: weights, stochastic }))
            }
            _ => elements.update(exact, Some(Rounded::nearest(weights))),
        }
    }

    /// Chunks of independent elements: more than one if that allows prefetching.
    fn runs(&self, all: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let numel = all.len();
        let run = match (self.device.is_gpu(), self.states) {
            (false, _) => RUN,
            (true, MemoryKind::Device) => numel.max(1),
            (true, MemoryKind::Host) => numel.div_ceil(RUNS).clamp(LEAST, RUN),
        };
        let end = all.end;
        all.step_by(run).map(move |start| start..end.min(start + run))
    }

    /// The pieces that the step updates, by index, with their elements.
    fn used_pieces(&self, state: &GroupState) -> Vec<(usize, Range<usize>)> {
        let mut end = 0;
        let next = |(index, piece): (usize, &ParamShard)| {
            let start = end;
            end += piece.numel();
            (!self.unused.contains(&piece.param)).then_some((index, start..end))
        };
        state.pieces.iter().enumerate().filter_map(next).collect()
    }
}

impl Elements<'_, '_> {
    /// The update rule, over `weights`, which are the parameters or copies of them. `rounded` receives them rounded.
    fn update(self, weights: &mut Tensor, rounded: Option<Rounded>) -> Result<()> {
        let Elements { gradients, states, step, rule } = self;
        match rounded {
            None => rule.update(weights, &gradients, states, &step),
            Some(rounded) => rule.update_and_round(weights, &gradients, states, rounded, &step),
        }
    }
}
