//! One optimizer step over the elements of a group: update, then rounding to 16 bits.

use ferrotron_tensor::ops::adafactor::{Adafactor, RowColFactors, SquareSums, adafactor};
use ferrotron_tensor::ops::adamw::{AdamW, adamw};
use ferrotron_tensor::ops::round::{Stochastic, round, widen};
use ferrotron_tensor::ops::sgd::{Sgd, sgd};
use ferrotron_tensor::ops::step::DeviceStepParams;
use ferrotron_tensor::{Device, FlatBuffer, MemoryKind, RandomKey, Result, Tensor};
use std::ops::Range;

use super::config::OptimizerConfig;
use super::group_state::GroupState;
use super::moment::ParamShard;
use super::update_config::Rounding;
use crate::WeightDecay;

/// Maximum number of elements updated at once: 16 MiB of each moment. The next chunk is prefetched meanwhile.
pub(super) const RUN: usize = 1 << 22;

/// Number of chunks of offloaded state. A GPU holds three of them, less than a twentieth of a large state.
const RUNS: usize = 64;
/// Minimum chunk size for copies between GPU and host.
const LEAST: usize = 1 << 14;

/// One optimizer step over a group.
pub(super) struct Pass<'a> {
    pub device: &'a Device,
    pub config: OptimizerConfig,
    pub rounding: Rounding,
    pub states: MemoryKind,
    pub step: &'a DeviceStepParams,
    /// Number of the step, from 1.
    pub count: u64,
    pub decay: WeightDecay,
    /// The names of the parameters that the step leaves alone, with their state.
    pub unused: &'a [String],
    /// Adafactor's sums, per piece.
    pub adafactor: &'a [SquareSums],
}

/// Adafactor's sums and factors of one piece.
type Factored<'a> = (&'a SquareSums, RowColFactors);

/// A range of elements: gradients, moments and factors.
struct Elements<'a, 'k> {
    gradients: Tensor,
    moments: &'a mut [&'k mut Tensor],
    factored: Option<Factored<'a>>,
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
        let in_place = state.master.is_none() && !rounds;
        let whole_pieces = rounds || state.mean_squares.is_some();
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
        let GroupState { pieces, moments, mean_squares, master } = state;
        let n_moments = moments.len();
        let kept = moments.iter_mut().chain(master).map(|moment| &mut moment.flat);
        FlatBuffer::for_each_chunk_mut(&mut kept.collect::<Vec<_>>(), &ranges, |run, kept| {
            let (index, range) = (runs[run].0, &runs[run].1);
            let factored = match mean_squares {
                Some(means) => Some((&self.adafactor[index], means.factors(index)?)),
                None => None,
            };
            let gradients = gradients.slice(behind(range, owned_gradients.start))?;
            let (moments, master) = kept.split_at_mut(n_moments);
            let elements = Elements { gradients, moments, factored };
            let piece = pieces.get(index).filter(|_| whole_pieces);
            weights.with_slice_mut(behind(range, owned.start), |weights| match master {
                _ if in_place => self.rule(weights, elements, None),
                [master, ..] => self.exact(master, weights, elements, piece),
                [] => {
                    let dims = [range.len()];
                    let mut exact = Tensor::empty(self.device, dtype.accumulator(), &dims)?;
                    widen(&mut exact, weights)?;
                    self.exact(&mut exact, weights, elements, piece)
                }
            })
        })
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
                self.rule(exact, elements, None)?;
                let key = RandomKey::new(seed, self.count, param);
                round(weights, exact, Some(Stochastic { key: &key, place, step: Some(self.step) }))
            }
            _ => self.rule(exact, elements, Some(weights)),
        }
    }

    /// The optimizer's update rule, in one pass over `weights`, which are the parameters or copies of them. Gradients
    /// are in the parameters' dtype or its accumulator dtype. `rounded` receives the weights rounded to nearest.
    fn rule(
        &self,
        weights: &mut Tensor,
        elements: Elements,
        rounded: Option<&mut Tensor>,
    ) -> Result<()> {
        let decay = |weight_decay| if self.decay == WeightDecay::On { weight_decay } else { 0.0 };
        let Elements { gradients, moments, factored } = elements;
        match (self.config, moments, factored) {
            (OptimizerConfig::AdamW { beta1, beta2, eps, weight_decay }, [m, v], None) => {
                let config = AdamW { beta1, beta2, eps, weight_decay: decay(weight_decay) };
                adamw(&config, self.step, weights, &gradients, m, v, rounded)
            }
            (OptimizerConfig::Sgd { momentum, weight_decay }, [m], None) => {
                let config = Sgd { momentum, weight_decay: decay(weight_decay) };
                sgd(&config, self.step, weights, &gradients, m)?;
                rounded.map_or(Ok(()), |rounded| round(rounded, weights, None))
            }
            (OptimizerConfig::Adafactor(config), means, Some((sums, factors))) => {
                let config = Adafactor {
                    eps2: config.eps2,
                    clip_threshold: config.clip_threshold,
                    beta1: config.beta1,
                    weight_decay: decay(config.weight_decay),
                };
                let mean = means.first_mut().map(|mean| &mut **mean);
                adafactor(&config, self.step, weights, &gradients, &factors, sums, mean)?;
                rounded.map_or(Ok(()), |rounded| round(rounded, weights, None))
            }
            _ => unreachable!("`new` made as many moments as the optimizer has"),
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
