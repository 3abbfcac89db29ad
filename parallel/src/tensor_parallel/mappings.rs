//! Differentiable collectives: Megatron-LM's conjugate pairs.
//!
//! A mapping is defined by the state of its operand, and its backward is the forward of its conjugate:
//!
//! | mapping | operand | forward | backward |
//! |---|---|---|---|
//! | [`copy_to_tp`] | replicated | identity | all-reduce |
//! | [`reduce_from_tp`] | partial sum | all-reduce | identity |
//! | [`scatter_to_tp`] | replicated | this rank's shard of a dim | all-gather |
//! | [`gather_from_tp`] | shard of a dim | all-gather | this rank's shard |
//! | [`gather_from_sp`] | shard of a dim | all-gather | reduce-scatter |
//! | [`reduce_scatter_to_sp`] | partial sum | reduce-scatter | all-gather |
//! | [`all_to_all`] | shard of one dim | shard of another dim | the inverse |
//!
//! They are named after the tensor axis (tp) and the sequence that it shards (sp), and take any group. [`gather_from_sp`]
//! along the data axis, for example, gives each rank the features of all samples, for a contrastive loss of its own ones.
//!
//! There is no plain differentiable all-reduce: its gradient depends on the state of its operand.

use ferrotron_autograd::{Backward, Cotangents, InputGrads, Var, forward_span};
use ferrotron_tensor::ops::concat::concat;
use ferrotron_tensor::{Error, Result, Tensor};

use crate::collective::{Group, Reduction, Work};

struct Conjugate<F> {
    name: &'static str,
    backward: F,
}

impl<F: FnOnce(Tensor) -> Result<Tensor> + Send + 'static> Backward for Conjugate<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        dx.accumulate(0, (self.backward)(dy.single()?)?)
    }
}

/// Records `forward` of x with `backward` as its gradient; both are the identity in a group of one. They need the results of
/// their calls at once.
fn map(
    name: &'static str,
    x: &Var,
    group: &Group,
    forward: impl FnOnce(&Tensor, &Group) -> Result<Tensor>,
    backward: impl FnOnce(Tensor, &Group) -> Result<Tensor> + Send + 'static,
) -> Result<Var> {
    if group.size() == 1 {
        return Ok(x.clone());
    }
    let _span = forward_span(name);
    let group = group.blocking();
    let value = forward(x.value(), &group)?;
    Var::record(&[x], value, || Conjugate { name, backward: move |dy| backward(dy, &group) })
}

/// The identity on a replicated value whose gradients are partial sums.
pub fn copy_to_tp(x: &Var, group: &Group) -> Result<Var> {
    let backward = |dy, group: &Group| group.all_reduce(dy, Reduction::Sum)?.wait();
    map("copy_to_tp", x, group, |x, _| Ok(x.clone()), backward)
}

/// The all-reduce of partial sums; the result and its gradient are replicated.
pub fn reduce_from_tp(x: &Var, group: &Group) -> Result<Var> {
    let forward = |x: &Tensor, group: &Group| group.all_reduce(x.clone(), Reduction::Sum)?.wait();
    map("reduce_from_tp", x, group, forward, |dy, _| Ok(dy))
}

/// This rank's shard of dim `dim` of a replicated value.
pub fn scatter_to_tp(x: &Var, dim: usize, group: &Group) -> Result<Var> {
    let len = x.value().dim(dim as isize)?;
    map(
        "scatter_to_tp",
        x,
        group,
        |x, group| local_slice(x, dim, group),
        move |dy, group| all_gather_dim(&dy, dim, len, group)?.wait(),
    )
}

/// All-gathers dim `dim`, `len` long, from shards. Subsequent computation is equal on every rank.
pub fn gather_from_tp(x: &Var, dim: usize, len: usize, group: &Group) -> Result<Var> {
    let forward = |x: &Tensor, group: &Group| all_gather_dim(x, dim, len, group)?.wait();
    map("gather_from_tp", x, group, forward, move |dy, group| local_slice(&dy, dim, group))
}

/// All-gathers dim `dim`, `len` long, from shards. Subsequent computation differs between ranks.
pub fn gather_from_sp(x: &Var, dim: usize, len: usize, group: &Group) -> Result<Var> {
    let forward = |x: &Tensor, group: &Group| all_gather_dim(x, dim, len, group)?.wait();
    let backward = move |dy: Tensor, group: &Group| reduce_scatter_dim(&dy, dim, group)?.wait();
    map("gather_from_sp", x, group, forward, backward)
}

/// This rank's shard of dim `dim` of the sum of partial sums.
pub fn reduce_scatter_to_sp(x: &Var, dim: usize, group: &Group) -> Result<Var> {
    let len = x.value().dim(dim as isize)?;
    let forward = |x: &Tensor, group: &Group| reduce_scatter_dim(x, dim, group)?.wait();
    let backward = move |dy: Tensor, group: &Group| all_gather_dim(&dy, dim, len, group)?.wait();
    map("reduce_scatter_to_sp", x, group, forward, backward)
}

/// Changes the sharding from dim `to` to dim `from`, by an all-to-all.
///
/// Errors unless `from` can be sharded evenly. The shards of `to` must have equal sizes.
pub fn all_to_all(x: &Var, from: usize, to: usize, group: &Group) -> Result<Var> {
    let forward = |x: &Tensor, group: &Group| all_to_all_dim(x, from, to, group);
    let backward = move |dy: Tensor, group: &Group| all_to_all_dim(&dy, to, from, group);
    map("all_to_all", x, group, forward, backward)
}

/// This rank's shard of dim `dim`.
pub(crate) fn local_slice(x: &Tensor, dim: usize, group: &Group) -> Result<Tensor> {
    let own = group.local_range(x.dim(dim as isize)?);
    x.narrow(dim as isize, own.start, own.len())
}

/// All-gathers dim `dim`, `len` long, from shards.
#[track_caller]
pub(crate) fn all_gather_dim(
    x: &Tensor,
    dim: usize,
    len: usize,
    group: &Group,
) -> Result<Work<Tensor>> {
    if group.size() == 1 {
        return Ok(Work::ready(x.clone()));
    }
    let dim = dim as isize;
    let work = group.all_gather(x.transpose(0, dim)?, len)?;
    Ok(work.map(move |whole| whole.transpose(0, dim)))
}

/// This rank's shard of dim `dim` of the sum over all ranks.
#[track_caller]
pub(crate) fn reduce_scatter_dim(x: &Tensor, dim: usize, group: &Group) -> Result<Work<Tensor>> {
    if group.size() == 1 {
        return Ok(Work::ready(x.clone()));
    }
    let dim = dim as isize;
    let work = group.reduce_scatter(x.transpose(0, dim)?, Reduction::Sum)?;
    Ok(work.map(move |part| part.transpose(0, dim)))
}

fn all_to_all_dim(x: &Tensor, from: usize, to: usize, group: &Group) -> Result<Tensor> {
    let (ranks, cut) = (group.size(), x.dim(from as isize)?);
    if !cut.is_multiple_of(ranks) {
        let message = format!("{ranks} ranks do not divide dim {from} of {:?}", x.dims());
        return Err(Error::shape("all_to_all", message));
    }
    // (ranks x local size of `from`, ..): one block from each rank, with its shard of `to`.
    let own = cut / ranks;
    let received = group.all_to_all(x.transpose(0, from as isize)?)?.wait()?;
    let blocks: Vec<Tensor> = (0..ranks)
        .map(|rank| received.narrow(0, rank * own, own)?.transpose(0, from as isize))
        .collect::<Result<_>>()?;
    concat(&blocks.iter().collect::<Vec<_>>(), to as isize)
}
