//! Communication for optimizers that need whole parameters: gradients are reduced to each parameter's owner, and
//! owners broadcast the updated weights.
//!
//! Unlike shards of a flat buffer, parameters have arbitrary sizes: each is a separate call, which is waited for
//! before the next one.

use ferrotron_autograd::SharedFlatBuffer;
use ferrotron_nn::ParamAndGradBucket;
use ferrotron_tensor::{Result, Tensor};

use crate::collective::{Group, Reduction};

/// Reduces each gradient of a group to its owner; on other ranks its contents are then undefined.
pub(super) fn reduce(ranks: &Group, group: &ParamAndGradBucket) -> Result<()> {
    exchange(ranks, group, &group.gradients, |tensor, owner| {
        ranks.reduce(tensor, owner, Reduction::Sum)?.wait()
    })
}

/// Broadcasts the weights from their owners to every rank.
pub(super) fn gather(ranks: &Group, group: &ParamAndGradBucket) -> Result<()> {
    exchange(ranks, group, &group.weights, |tensor, owner| ranks.broadcast(tensor, owner)?.wait())
}

/// Replaces each range of a group's flat buffer by the result of `f` for the range and its owner.
fn exchange(
    ranks: &Group,
    group: &ParamAndGradBucket,
    flat: &SharedFlatBuffer,
    f: impl Fn(Tensor, usize) -> Result<Tensor>,
) -> Result<()> {
    if ranks.size() == 1 {
        return Ok(());
    }
    let mut flat = flat.lock()?;
    for (range, (param, &owner)) in group.params.iter().zip(&group.owners).enumerate() {
        if param.leaf().numel() == 0 {
            continue;
        }
        let nothing = Tensor::empty(param.leaf().device(), flat.dtype(), &[0])?;
        flat.with_mut(range, |tensor| {
            // The only handle, so that the call works in place.
            *tensor = f(std::mem::replace(tensor, nothing), owner)?;
            Ok(())
        })?;
    }
    Ok(())
}
