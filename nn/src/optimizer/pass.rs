//! One step over the elements of a group: what is updated from which gradients, and how it comes back into 16 bits.

use ferrotron_tensor::ops::adafactor::{Adafactor, adafactor};
use ferrotron_tensor::ops::adamw::{AdamW, adamw};
use ferrotron_tensor::ops::round::{Stochastic, round, widen};
use ferrotron_tensor::ops::sgd::{Sgd, sgd};
use ferrotron_tensor::{Device, Element, Flat, RandomKey, Result, Scalar, Tensor};
use std::ops::Range;

use super::mean_squares::BlockFactors;
use super::{Moment, OptimizerConfig, Piece, Rounding, State, StepConfig};
use crate::Decay;

/// Most elements that are updated at once: 16 MiB of each moment. The next are fetched meanwhile.
pub(super) const RUN: usize = 1 << 22;

/// One step over a group.
pub(super) struct Pass<'a> {
    pub device: &'a Device,
    pub config: OptimizerConfig,
    pub rounding: Rounding,
    pub step: StepConfig,
    /// Number of the step, from 1.
    pub count: u64,
    pub decay: Decay,
    /// Of Adafactor, for each piece.
    pub adafactor: &'a [Adafactor],
}

/// The gradients of some elements: those of a flat in a range.
type Gradients<'a> = (&'a Flat, Range<usize>);

/// What Adafactor makes of one piece.
type Factored<'a, A> = (&'a Adafactor, BlockFactors<A>);

impl Pass<'_> {
    /// Updates the weights that this rank owns, and their state.
    pub fn group<T: Element>(
        &self,
        state: &mut State,
        weights: &mut [T],
        gradients: Gradients,
    ) -> Result<()> {
        let rounds = T::DTYPE != T::Acc::DTYPE && self.rounding != Rounding::Nearest;
        let in_place = state.master.is_none() && !rounds;
        let whole_pieces = rounds || state.mean_squares.is_some();
        let runs = if whole_pieces { pieces(state) } else { runs(weights.len()) };
        for (index, range) in runs.iter().enumerate() {
            if let Some(next) = runs.get(index + 1) {
                state.prefetch(next);
            }
            let State { pieces, moments, mean_squares, master } = &mut *state;
            let first = gradients.1.start;
            let gradients = (gradients.0, first + range.start..first + range.end);
            let weights = &mut weights[range.clone()];
            let moments = moments.iter_mut().map(|moment| part(moment, range));
            let mut moments = moments.collect::<Result<Vec<&mut [T::Acc]>>>()?;
            let factored = match mean_squares {
                Some(means) => Some((&self.adafactor[index], means.factors(index)?)),
                None => None,
            };
            if in_place {
                self.update::<T, T>(weights, gradients, &mut moments, factored)?;
                continue;
            }
            let mut copy = None;
            let exact = match master {
                Some(master) => part(master, range)?,
                None => {
                    let empty = Tensor::empty(self.device, T::Acc::DTYPE, &[range.len()])?;
                    let copy = copy.insert(empty).as_mut_slice()?;
                    widen(self.device, copy, weights)?;
                    copy
                }
            };
            self.update::<T::Acc, T>(exact, gradients, &mut moments, factored)?;
            self.round(pieces.get(index).filter(|_| whole_pieces), weights, exact)?;
        }
        Ok(())
    }

    /// Updates `weights`, which are those of the parameters, of type `T`, or copies of them in another type. The
    /// gradients have that of the weights or that in which these are added up.
    fn update<W, T>(
        &self,
        weights: &mut [W],
        (gradients, range): Gradients,
        moments: &mut [&mut [W::Acc]],
        factored: Option<Factored<W::Acc>>,
    ) -> Result<()>
    where
        W: Element,
        T: Element<Acc = W::Acc>,
    {
        if gradients.dtype() == T::DTYPE {
            self.rule(weights, &gradients.whole::<T>()?[range], moments, factored)
        } else {
            self.rule(weights, &gradients.whole::<W::Acc>()?[range], moments, factored)
        }
    }

    /// The optimizer's own.
    fn rule<W, G>(
        &self,
        weights: &mut [W],
        gradients: &[G],
        moments: &mut [&mut [W::Acc]],
        factored: Option<Factored<W::Acc>>,
    ) -> Result<()>
    where
        W: Element,
        G: Element<Acc = W::Acc>,
    {
        let StepConfig { lr, grad_scale } = self.step;
        let decay = |weight_decay| if self.decay == Decay::Yes { weight_decay } else { 0.0 };
        match (self.config, moments, factored) {
            (OptimizerConfig::AdamW { beta1, beta2, eps, weight_decay }, [m, v], None) => {
                let (weight_decay, step) = (decay(weight_decay), self.count);
                let config = AdamW { lr, beta1, beta2, eps, weight_decay, step, grad_scale };
                adamw(self.device, &config, weights, gradients, m, v)
            }
            (OptimizerConfig::Sgd { momentum, weight_decay }, [m], None) => {
                let weight_decay = decay(weight_decay);
                let config = Sgd { lr, momentum, weight_decay, grad_scale };
                sgd(self.device, &config, weights, gradients, m)
            }
            (OptimizerConfig::Adafactor(_), means, Some((config, factors))) => {
                let mean = means.first_mut().map_or(&mut [][..], |mean| mean);
                let shape = &factors.shape;
                adafactor(self.device, config, shape, weights, gradients, factors.lend(), mean)
            }
            _ => unreachable!("`new` made as many moments as the optimizer has"),
        }
    }

    /// The weights of a piece, or of others that are rounded to nearest, from the numbers that were updated.
    fn round<T: Element>(
        &self,
        piece: Option<&Piece>,
        weights: &mut [T],
        exact: &[T::Acc],
    ) -> Result<()> {
        let key = match (self.rounding, piece) {
            (Rounding::Stochastic { seed }, Some(Piece { param, place, .. })) => {
                Some((RandomKey::new(seed, self.count, param), place))
            }
            _ => None,
        };
        let stochastic = key.as_ref().map(|(key, place)| Stochastic { key, place });
        round(self.device, weights, exact, stochastic)
    }
}

/// The elements of each piece.
fn pieces(state: &State) -> Vec<Range<usize>> {
    let mut end = 0;
    let next = |piece: &Piece| {
        let start = end;
        end += piece.numel();
        start..end
    };
    state.pieces.iter().map(next).collect()
}

/// Elements that need nothing of each other, some at a time.
fn runs(numel: usize) -> Vec<Range<usize>> {
    (0..numel).step_by(RUN).map(|start| start..numel.min(start + RUN)).collect()
}

fn part<'a, A: Scalar>(moment: &'a mut Moment, range: &Range<usize>) -> Result<&'a mut [A]> {
    Ok(&mut moment.flat.whole_mut::<A>()?[range.clone()])
}
