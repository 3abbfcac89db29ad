//! Communication that gradients flow through: Megatron-LM's conjugate pairs.
//!
//! Each is named for what it asserts about its operand, and its backward is the forward of its partner:
//!
//! | mapping | operand | forward | backward |
//! |---|---|---|---|
//! | [`copy_to_tp`] | the same on every rank | identity | all-reduce |
//! | [`reduce_from_tp`] | a part of a sum | all-reduce | identity |
//! | [`scatter_to_tp`] | the same on every rank | this rank's part of a dim | all-gather |
//! | [`gather_from_tp`] | a part of a dim | all-gather | this rank's part |
//! | [`gather_from_sp`] | a part of a dim | all-gather | reduce-scatter |
//! | [`reduce_scatter_to_sp`] | a part of a sum | reduce-scatter | all-gather |
//! | [`all_to_all`] | a part of one dim | a part of another dim | the way back |
//!
//! There is no differentiable all-reduce: its gradient depends on what its operand is.

use ferrotron_autograd::{Backward, Cotangents, Grads, Var};
use ferrotron_tensor::{Result, Tensor};

use crate::collective::{Group, Reduction, Work};

struct Conjugate<F> {
    name: &'static str,
    backward: F,
}

impl<F: FnOnce(Tensor) -> Result<Tensor> + Send + 'static> Backward for Conjugate<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut Grads) -> Result<()> {
        dx.give(0, (self.backward)(dy.single()?)?)
    }
}

fn map(
    name: &'static str,
    x: &Var,
    value: Tensor,
    backward: impl FnOnce(Tensor) -> Result<Tensor> + Send + 'static,
) -> Result<Var> {
    Var::record(&[x], value, || Conjugate { name, backward })
}

/// The identity on what is the same on every rank; each rank's gradient is a part of the sum.
pub fn copy_to_tp(x: &Var, group: &Group) -> Result<Var> {
    let group = group.clone();
    map("copy_to_tp", x, x.value().clone(), move |dy| group.all_reduce(dy, Reduction::Sum)?.wait())
}

/// The sum of parts, the same on every rank; so is its gradient.
pub fn reduce_from_tp(x: &Var, group: &Group) -> Result<Var> {
    let sum = group.all_reduce(x.value().clone(), Reduction::Sum)?.wait()?;
    map("reduce_from_tp", x, sum, Ok)
}

/// This rank's part of dim `dim` of what is the same on every rank.
pub fn scatter_to_tp(x: &Var, dim: usize, group: &Group) -> Result<Var> {
    let (part, len, group) = (part(x.value(), dim, group)?, x.dims()[dim], group.clone());
    map("scatter_to_tp", x, part, move |dy| all_gather_dim(&dy, dim, len, &group)?.wait())
}

/// All of dim `dim`, `len` long, of which every rank has its part. What follows is the same on every rank.
pub fn gather_from_tp(x: &Var, dim: usize, len: usize, group: &Group) -> Result<Var> {
    let whole = all_gather_dim(x.value(), dim, len, group)?.wait()?;
    let group = group.clone();
    map("gather_from_tp", x, whole, move |dy| part(&dy, dim, &group))
}

/// All of dim `dim`, `len` long, of which every rank has its part. What follows differs from rank to rank.
pub fn gather_from_sp(x: &Var, dim: usize, len: usize, group: &Group) -> Result<Var> {
    let whole = all_gather_dim(x.value(), dim, len, group)?.wait()?;
    let group = group.clone();
    map("gather_from_sp", x, whole, move |dy| reduce_scatter_dim(&dy, dim, &group)?.wait())
}

/// This rank's part of dim `dim` of the sum of parts.
pub fn reduce_scatter_to_sp(x: &Var, dim: usize, group: &Group) -> Result<Var> {
    let part = reduce_scatter_dim(x.value(), dim, group)?.wait()?;
    let (len, group) = (x.dims()[dim], group.clone());
    map("reduce_scatter_to_sp", x, part, move |dy| all_gather_dim(&dy, dim, len, &group)?.wait())
}

/// From this rank's part of dim `to`, `len` long in all, to its part of dim `from`: every rank gives every
/// other its share. Cutting `from` and joining `to` must be even.
pub fn all_to_all(x: &Var, from: usize, to: usize, len: usize, group: &Group) -> Result<Var> {
    let cut = x.dims()[from];
    let value = all_to_all_dim(x.value(), from, to, len, group)?;
    let group = group.clone();
    map("all_to_all", x, value, move |dy| all_to_all_dim(&dy, to, from, cut, &group))
}

/// This rank's part of dim `dim`.
pub(crate) fn part(x: &Tensor, dim: usize, group: &Group) -> Result<Tensor> {
    let own = group.part(x.dims()[dim]);
    x.narrow(dim as isize, own.start, own.len())
}

/// All of dim `dim`, `len` long, of which every rank has its part.
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

/// This rank's part of dim `dim` of the sum over all ranks.
pub(crate) fn reduce_scatter_dim(x: &Tensor, dim: usize, group: &Group) -> Result<Work<Tensor>> {
    if group.size() == 1 {
        return Ok(Work::ready(x.clone()));
    }
    let dim = dim as isize;
    let work = group.reduce_scatter(x.transpose(0, dim)?, Reduction::Sum)?;
    Ok(work.map(move |part| part.transpose(0, dim)))
}

fn all_to_all_dim(x: &Tensor, from: usize, to: usize, len: usize, group: &Group) -> Result<Tensor> {
    if group.size() == 1 {
        return Ok(x.clone());
    }
    let mut dims = x.dims().to_vec();
    dims.swap(0, from);
    let (own, ranks) = (group.part(dims[0]).len(), group.size());
    // (ranks x own part of `from`, ..), one block from each rank with its part of `to`.
    let received = group.all_to_all(x.transpose(0, from as isize)?)?.wait()?;
    let blocks: Vec<Tensor> = (0..ranks)
        .map(|rank| received.narrow(0, rank * own, own)?.transpose(0, from as isize))
        .collect::<Result<_>>()?;
    let whole =
        ferrotron_tensor::ops::concat::concat(&blocks.iter().collect::<Vec<_>>(), to as isize)?;
    debug_assert_eq!(whole.dims()[to], len);
    Ok(whole)
}
