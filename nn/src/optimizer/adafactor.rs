//! The numbers of a step of Adafactor, before weights are updated: Shazeer and Stern, arXiv 1804.04235, algorithms
//! 4 to 6.
//!
//! With u the gradient times what the [mean squares](super::mean_squares) make of it, and means over a whole tensor:
//!   step = alpha / max(1, RMS(u) / clip_threshold), alpha = lr or, relative, lr * max(eps2, RMS(w))
//!
//! Where ranks hold parts of a tensor, their sums are added up twice in a step: those of squares, and those of the
//! updates' squares.

use ferrotron_tensor::ops::adafactor::{Adafactor, square_sums, update_sq_norm};
use ferrotron_tensor::ops::sq_norm::sq_norm;
use ferrotron_tensor::{Element, Result, dispatch_float};
use std::ops::Range;

use super::mean_squares::{Block, New};
use super::{AdafactorConfig, State, StepConfig, StepSize};
use crate::{AxisSet, Decay, ParamGroup};

/// What is added up over the ranks that hold parts of the same parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartSum {
    /// The squares of gradients by row and column, and of the weights.
    Squares,
    /// The squares of updates.
    Updates,
}

/// Adds up numbers, in place, over the ranks that hold the other parts of the same parameters: see
/// [`Optimizer::step_with`](super::Optimizer::step_with).
pub type SumParts<'a> = dyn FnMut(PartSum, &mut [f64]) -> Result<()> + 'a;

/// The sums of one block: of this rank's part, then of the whole.
struct Sums {
    block: Block,
    rows: Vec<f64>,
    columns: Vec<f64>,
    /// Of the squares of the weights, where steps are relative, and of the update.
    weights: Option<f64>,
    update: f64,
}

impl Sums {
    /// For each block of a group.
    fn zeros(config: &AdafactorConfig, state: &State) -> Vec<Sums> {
        let of = |block: &Block| {
            let (shape, matrix) = (block.shape(), usize::from(!block.is_vector()));
            Sums {
                block: block.clone(),
                rows: vec![0.0; matrix * shape.count * shape.rows],
                columns: vec![0.0; matrix * shape.count * shape.columns],
                weights: (config.step_size == StepSize::Relative).then_some(0.0),
                update: 0.0,
            }
        };
        state.mean_squares.iter().flat_map(|means| &means.blocks).map(of).collect()
    }

    /// Those that go on in other ranks' parts.
    fn parts(&mut self, what: PartSum) -> Vec<&mut [f64]> {
        if !(0..self.block.dims().len()).any(|dim| self.block.is_cut(dim)) {
            return Vec::new();
        }
        if what == PartSum::Updates {
            return vec![std::slice::from_mut(&mut self.update)];
        }
        let (rows_go_on, columns_go_on) = self.block.goes_on();
        let rows = rows_go_on.then_some(self.rows.as_mut_slice());
        let columns = columns_go_on.then_some(self.columns.as_mut_slice());
        self.weights
            .as_mut()
            .map(std::slice::from_mut)
            .into_iter()
            .chain(rows)
            .chain(columns)
            .collect()
    }
}

/// Updates the mean squares of all groups; for each block of each group, the numbers of its step.
pub(super) fn prepare(
    config: &AdafactorConfig,
    (step, count): (&StepConfig, u64),
    groups: &[ParamGroup],
    states: &mut [State],
    sum: &mut SumParts,
) -> Result<Vec<Vec<Adafactor>>> {
    let mut all: Vec<Vec<Sums>> = states.iter().map(|state| Sums::zeros(config, state)).collect();
    for ((group, state), sums) in groups.iter().zip(&*states).zip(&mut all) {
        add_squares(group, state, sums)?;
    }
    add_up(&mut all, PartSum::Squares, sum)?;

    let beta2 = 1.0 - (count as f64).powf(-config.decay_rate);
    let new = New { beta2, eps1: config.eps1, grad_scale: step.grad_scale };
    for ((group, state), sums) in groups.iter().zip(&mut *states).zip(&mut all) {
        let means = state.mean_squares.as_mut().expect("`new` made them");
        group.with_owned(|_, (gradients, range)| {
            let device = gradients.device();
            for_blocks(sums, range, |index, sums, range| {
                dispatch_float!("adafactor", gradients.dtype(), G => {
                    let grads = &gradients.whole::<G>()?[range];
                    means.update(index, (&sums.rows, &sums.columns), grads, &new)?;
                    let factors = means.factors::<<G as Element>::Acc>(index)?;
                    let (shape, scale) = (&factors.shape, new.grad_scale);
                    sums.update = update_sq_norm(device, shape, grads, scale, factors.lend())?;
                    Ok(())
                })
            })
        })?;
    }
    add_up(&mut all, PartSum::Updates, sum)?;

    let numbers = |sums: &Sums, decay| {
        let rms = |sum: f64| (sum / sums.block.numel().max(1) as f64).sqrt();
        let alpha = step.lr * sums.weights.map_or(1.0, |sum| rms(sum).max(config.eps2));
        let weight_decay = if decay == Decay::Yes { config.weight_decay } else { 0.0 };
        Adafactor {
            grad_scale: step.grad_scale,
            keep: 1.0 - alpha * weight_decay,
            step: alpha / (rms(sums.update) / config.clip_threshold).max(1.0),
            beta1: config.beta1,
        }
    };
    let of_group = |(group, sums): (&ParamGroup, &Vec<Sums>)| {
        sums.iter().map(|sums| numbers(sums, group.decay)).collect()
    };
    Ok(groups.iter().zip(&all).map(of_group).collect())
}

/// How many numbers each call of `sum` gets in a step.
pub(super) fn part_sums(config: &AdafactorConfig, states: &[State]) -> Vec<usize> {
    let mut all: Vec<Vec<Sums>> = states.iter().map(|state| Sums::zeros(config, state)).collect();
    let mut lengths = Vec::new();
    for what in [PartSum::Squares, PartSum::Updates] {
        let mut count = |_, numbers: &mut [f64]| {
            lengths.push(numbers.len());
            Ok(())
        };
        add_up(&mut all, what, &mut count).expect("counting does not fail");
    }
    lengths
}

/// Adds the squares of this rank's parts to the sums of a group's blocks.
fn add_squares(group: &ParamGroup, state: &State, all: &mut [Sums]) -> Result<()> {
    group.with_owned(|(weights, weight_range), (gradients, range)| {
        let (device, first) = (gradients.device(), range.start);
        // The exact weights.
        let (weights, weight_start) = match &state.master {
            Some(master) => (&master.flat, 0),
            None => (&*weights, weight_range.start),
        };
        for_blocks(all, range, |_, sums, range| {
            if let Some(sum) = &mut sums.weights {
                let start = weight_start + range.start - first;
                *sum = dispatch_float!("adafactor", weights.dtype(), T => {
                    sq_norm(device, &weights.whole::<T>()?[start..start + range.len()])
                });
            }
            if sums.block.is_vector() {
                return Ok(());
            }
            dispatch_float!("adafactor", gradients.dtype(), G => {
                let grads = &gradients.whole::<G>()?[range];
                square_sums(device, &sums.block.shape(), grads, &mut sums.rows, &mut sums.columns)
            })
        })
    })
}

/// Calls `f` with every block's number, sums and elements within `owned`.
fn for_blocks(
    sums: &mut [Sums],
    owned: Range<usize>,
    mut f: impl FnMut(usize, &mut Sums, Range<usize>) -> Result<()>,
) -> Result<()> {
    let mut start = owned.start;
    for (index, sums) in sums.iter_mut().enumerate() {
        let end = start + sums.block.dims().iter().product::<usize>();
        f(index, sums, start..end)?;
        start = end;
    }
    Ok(())
}

/// Adds up `what`, in one call for all parameters of which the same is true along the axes. Two stages that hold the
/// same parameter then send the same message, and get the same bits: in which order numbers are added depends on
/// their place in it. Ordered by name, since groups may differ between the ranks.
fn add_up(all: &mut [Vec<Sums>], what: PartSum, sum: &mut SumParts) -> Result<()> {
    let mut sums: Vec<&mut Sums> = all.iter_mut().flatten().collect();
    sums.sort_by(|a, b| a.block.piece.param.cmp(&b.block.piece.param));
    let mut kinds: Vec<AxisSet> = Vec::new();
    for sums in &sums {
        if !kinds.contains(&sums.block.piece.replicated) {
            kinds.push(sums.block.piece.replicated);
        }
    }
    for kind in kinds {
        let alike = sums.iter_mut().filter(|sums| sums.block.piece.replicated == kind);
        let mut parts: Vec<&mut [f64]> = alike.flat_map(|sums| sums.parts(what)).collect();
        let mut message: Vec<f64> = parts.iter().flat_map(|part| part.iter().copied()).collect();
        if message.is_empty() {
            continue;
        }
        sum(what, &mut message)?;
        let mut rest = message.as_slice();
        for part in &mut parts {
            let (own, others) = rest.split_at(part.len());
            part.copy_from_slice(own);
            rest = others;
        }
    }
    Ok(())
}
