//! One step over the elements of a group: what is updated from which gradients, and how it comes back into 16 bits.

use ferrotron_tensor::ops::adafactor::{Adafactor, adafactor};
use ferrotron_tensor::ops::adamw::{AdamW, adamw};
use ferrotron_tensor::ops::round::{Stochastic, round, widen};
use ferrotron_tensor::ops::sgd::{Sgd, sgd};
use ferrotron_tensor::{Device, Element, Flat, RandomKey, Result, Scalar, Tensor};
use std::ops::Range;

use super::mean_squares::BlockFactors;
use super::{OptimizerConfig, Piece, Rounding, State, StepConfig};
use crate::Decay;

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
        let State { pieces, moments, mean_squares, master } = state;
        let moments = moments.iter_mut().map(|moment| moment.flat.whole_mut::<T::Acc>());
        let mut moments = moments.collect::<Result<Vec<_>>>()?;
        let mut master = master.as_mut().map(|m| m.flat.whole_mut::<T::Acc>()).transpose()?;
        let rounds = T::DTYPE != T::Acc::DTYPE && self.rounding != Rounding::Nearest;
        let in_place = master.is_none() && !rounds;
        if in_place && mean_squares.is_none() {
            return self.update::<T, T>(weights, gradients, &mut moments, None);
        }
        let mut start = 0;
        for (index, piece) in pieces.iter().enumerate() {
            let range = start..start + piece.numel();
            start = range.end;
            let first = gradients.1.start;
            let gradients = (gradients.0, first + range.start..first + range.end);
            let weights = &mut weights[range.clone()];
            let moments = moments.iter_mut().map(|moment| &mut moment[range.clone()]);
            let mut moments: Vec<&mut [T::Acc]> = moments.collect();
            let factored = match mean_squares {
                Some(means) => Some((&self.adafactor[index], means.factors(index)?)),
                None => None,
            };
            if in_place {
                self.update::<T, T>(weights, gradients, &mut moments, factored)?;
                continue;
            }
            let mut copy = None;
            let exact = match &mut master {
                Some(master) => &mut master[range],
                None => {
                    let empty = Tensor::empty(self.device, T::Acc::DTYPE, &[range.len()])?;
                    let copy = copy.insert(empty).as_mut_slice()?;
                    widen(self.device, copy, weights)?;
                    copy
                }
            };
            self.update::<T::Acc, T>(exact, gradients, &mut moments, factored)?;
            self.round(piece, weights, exact)?;
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

    /// The weights of a piece from the numbers that were updated.
    fn round<T: Element>(&self, piece: &Piece, weights: &mut [T], exact: &[T::Acc]) -> Result<()> {
        let Piece { param, place, .. } = piece;
        let key = match self.rounding {
            Rounding::Nearest => None,
            Rounding::Stochastic { seed } => Some(RandomKey::new(seed, self.count, param)),
        };
        let stochastic = key.as_ref().map(|key| Stochastic { key, place });
        round(self.device, weights, exact, stochastic)
    }
}
