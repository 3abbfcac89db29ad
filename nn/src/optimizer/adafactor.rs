//! The sums that a step of Adafactor needs before the update: Shazeer and Stern, arXiv 1804.04235, algorithms 4 to 6.
//!
//! If tensors are sharded over ranks, a step has two all-reduces: of sums of squared gradients and weights, and of
//! sums of squared updates.

use ferrotron_tensor::ops::adafactor::{
    SecondMomentDecay, SquareSums, square_sums, update_sq_norm,
};
use ferrotron_tensor::ops::concat::concat;
use ferrotron_tensor::ops::sq_norm::add_sq_norm;
use ferrotron_tensor::ops::step::DeviceStepParams;
use ferrotron_tensor::{DType, Device, Result, Tensor};
use std::ops::Range;

use super::config::{AdafactorConfig, StepSize};
use super::group_state::GroupState;
use super::mean_squares::FactoredBlock;
use crate::{AxisSet, ParamAndGradBucket};

/// A kind of sum that is reduced over the ranks that hold shards of the same parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShardedSum {
    /// Sums of squared gradients by row and column, and of squared weights.
    Squares,
    /// Sums of squared updates.
    Updates,
}

/// All-reduces sums over the ranks that hold the other shards of the same parameters: see
/// [`Optimizer::step_with`](super::Optimizer::step_with).
pub type ReduceSums<'a> = dyn FnMut(ShardedSum, Tensor) -> Result<Tensor> + 'a;

/// The sums of one block: local first, then global.
struct Sums {
    block: FactoredBlock,
    rows: Tensor,
    columns: Tensor,
    total: SquareSums,
}

impl Sums {
    /// Zeros for each block of a group.
    fn zeros(config: &AdafactorConfig, device: &Device, state: &GroupState) -> Result<Vec<Sums>> {
        let zeros = |n| Tensor::zeros(device, DType::F64, &[n]);
        let of = |block: &FactoredBlock| {
            let (shape, matrix) = (block.shape(), usize::from(!block.is_vector()));
            let relative = config.step_size == StepSize::Relative;
            let weights = relative.then(|| zeros(1)).transpose()?;
            Ok(Sums {
                block: block.clone(),
                rows: zeros(matrix * shape.count * shape.rows)?,
                columns: zeros(matrix * shape.count * shape.columns)?,
                total: SquareSums { weights, update: zeros(1)?, numel: block.numel() },
            })
        };
        state.mean_squares.iter().flat_map(|means| &means.blocks).map(of).collect()
    }

    /// The sums that span ranks, and therefore need a reduction.
    fn parts(&mut self, what: ShardedSum) -> Vec<&mut Tensor> {
        if !self.block.is_part() {
            return Vec::new();
        }
        if what == ShardedSum::Updates {
            return vec![&mut self.total.update];
        }
        let (rows_go_on, columns_go_on) = self.block.spans_ranks();
        let rows = rows_go_on.then_some(&mut self.rows);
        let columns = columns_go_on.then_some(&mut self.columns);
        self.total.weights.iter_mut().chain(rows).chain(columns).collect()
    }
}

/// The groups of a step, each with the names of its parameters without a gradient.
#[derive(Clone, Copy)]
pub(super) struct Groups<'a> {
    pub groups: &'a [ParamAndGradBucket],
    pub unused: &'a [Vec<String>],
}

/// Updates the mean squares of all groups. Returns the sums that the step needs, per block of each group.
pub(super) fn prepare(
    config: &AdafactorConfig,
    (step, device): (&DeviceStepParams, &Device),
    Groups { groups, unused }: Groups,
    states: &mut [GroupState],
    sum: &mut ReduceSums,
) -> Result<Vec<Vec<SquareSums>>> {
    let zeros = |state: &GroupState| Sums::zeros(config, device, state);
    let mut all: Vec<Vec<Sums>> = states.iter().map(zeros).collect::<Result<_>>()?;
    for ((group, state), sums) in groups.iter().zip(&*states).zip(&mut all) {
        add_squares(group, state, sums)?;
    }
    add_up(&mut all, ShardedSum::Squares, sum)?;

    let decay = SecondMomentDecay { rate: config.decay_rate, eps1: config.eps1 };
    for (((group, unused), state), sums) in
        groups.iter().zip(unused).zip(&mut *states).zip(&mut all)
    {
        let means = state.mean_squares.as_mut().expect("`new` made them");
        group.with_owned(|_, (gradients, range)| {
            for_blocks(sums, range, |index, sums, range| {
                if unused.contains(&sums.block.piece.param) {
                    return Ok(());
                }
                let grads = gradients.slice(range)?;
                means.update(index, (&sums.rows, &sums.columns), &grads, (&decay, step))?;
                sums.total.update = update_sq_norm(step, &grads, &means.factors(index)?)?;
                Ok(())
            })
        })?;
    }
    add_up(&mut all, ShardedSum::Updates, sum)?;
    let totals = |sums: Vec<Sums>| sums.into_iter().map(|sums| sums.total).collect();
    Ok(all.into_iter().map(totals).collect())
}

/// The number of elements in each call of `sum` in a step.
pub(super) fn part_sums(config: &AdafactorConfig, states: &[GroupState]) -> Vec<usize> {
    let means = states.iter().filter_map(|state| state.mean_squares.as_ref());
    let mut blocks: Vec<&FactoredBlock> = means.flat_map(|means| &means.blocks).collect();
    blocks.sort_by(|a, b| a.piece.param.cmp(&b.piece.param));
    let relative = usize::from(config.step_size == StepSize::Relative);
    let numbers = |block: &FactoredBlock, what| {
        let (shape, (rows_go_on, columns_go_on)) = (block.shape(), block.spans_ranks());
        match what {
            _ if !block.is_part() => 0,
            ShardedSum::Updates => 1,
            ShardedSum::Squares => {
                relative
                    + usize::from(rows_go_on) * shape.count * shape.rows
                    + usize::from(columns_go_on) * shape.count * shape.columns
            }
        }
    };
    let mut lengths = Vec::new();
    for what in [ShardedSum::Squares, ShardedSum::Updates] {
        for kind in kinds(blocks.iter().copied()) {
            let alike = blocks.iter().filter(|block| block.piece.replicated == kind);
            lengths.push(alike.map(|block| numbers(block, what)).sum());
        }
    }
    lengths.retain(|&length| length > 0);
    lengths
}

/// The distinct sets of axes along which blocks are replicated.
fn kinds<'a>(blocks: impl Iterator<Item = &'a FactoredBlock>) -> Vec<AxisSet> {
    let mut kinds = Vec::new();
    for block in blocks {
        if !kinds.contains(&block.piece.replicated) {
            kinds.push(block.piece.replicated);
        }
    }
    kinds
}

/// Adds the squares of this rank's shards to the sums of a group's blocks.
fn add_squares(group: &ParamAndGradBucket, state: &GroupState, all: &mut [Sums]) -> Result<()> {
    group.with_owned(|(weights, weight_range), (gradients, range)| {
        let first = range.start;
        // Master weights if there are any.
        let (weights, weight_start) = match &state.master {
            Some(master) => (&master.flat, 0),
            None => (&*weights, weight_range.start),
        };
        for_blocks(all, range, |_, sums, range| {
            if let Some(sum) = &mut sums.total.weights {
                let start = weight_start + range.start - first;
                add_sq_norm(sum, &weights.slice(start..start + range.len())?)?;
            }
            if sums.block.is_vector() {
                return Ok(());
            }
            let grads = gradients.slice(range)?;
            square_sums(&sums.block.shape(), &grads, &mut sums.rows, &mut sums.columns)
        })
    })
}

/// Calls `f` with every block's index, sums and elements within `owned`.
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

/// Reduces the sums `what`, in one call per set of replicated axes. The order of additions depends on the position in
/// the message. Two stages that hold the same parameter get the same bits only from messages of the same layout. The
/// sums are sorted by name, since groups may differ between ranks.
fn add_up(all: &mut [Vec<Sums>], what: ShardedSum, sum: &mut ReduceSums) -> Result<()> {
    let mut sums: Vec<&mut Sums> = all.iter_mut().flatten().collect();
    sums.sort_by(|a, b| a.block.piece.param.cmp(&b.block.piece.param));
    for kind in kinds(sums.iter().map(|sums| &sums.block)) {
        let alike = sums.iter_mut().filter(|sums| sums.block.piece.replicated == kind);
        let mut parts: Vec<&mut Tensor> = alike.flat_map(|sums| sums.parts(what)).collect();
        let own: Vec<&Tensor> = parts.iter().map(|part| &**part).collect();
        if own.iter().all(|part| part.numel() == 0) {
            continue;
        }
        let sums = sum(what, concat(&own, 0)?)?;
        let mut start = 0;
        for part in &mut parts {
            **part = sums.narrow(0, start, part.numel())?.copy()?;
            start += part.numel();
        }
    }
    Ok(())
}
