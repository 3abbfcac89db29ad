//! What an optimizer needs that sees parameters whole: gradients are summed on a parameter's owner and its weights
//! go out from there.
//!
//! Unlike the shares of a flat, parameters are of any size: each is a call of its own, which is waited for before
//! the next is made.

use ferrotron_autograd::{SharedFlat, lock};
use ferrotron_nn::ParamGroup;
use ferrotron_tensor::{Result, Tensor};

use crate::collective::{Group, Reduction};

/// Sums each gradient of a group on the rank that owns it; the others' are worth nothing then.
pub(super) fn reduce(ranks: &Group, group: &ParamGroup) -> Result<()> {
    exchange(ranks, group, &group.gradients, |tensor, owner| {
        ranks.reduce(tensor, owner, Reduction::Sum)?.wait()
    })
}

/// Gives every rank the weights that their owners have.
pub(super) fn gather(ranks: &Group, group: &ParamGroup) -> Result<()> {
    exchange(ranks, group, &group.weights, |tensor, owner| ranks.broadcast(tensor, owner)?.wait())
}

/// Calls `f` with each range of a group's flat and its owner, for what is to be in its place.
fn exchange(
    ranks: &Group,
    group: &ParamGroup,
    flat: &SharedFlat,
    f: impl Fn(Tensor, usize) -> Result<Tensor>,
) -> Result<()> {
    if ranks.size() == 1 {
        return Ok(());
    }
    let mut flat = lock(flat);
    for (range, (param, &owner)) in group.params.iter().zip(&group.owners).enumerate() {
        if param.leaf().numel() == 0 {
            continue;
        }
        let nothing = Tensor::empty(param.leaf().device(), flat.dtype(), &[0])?;
        flat.update(range, |tensor| {
            // The only handle, so that the call works in place.
            *tensor = f(std::mem::replace(tensor, nothing), owner)?;
            Ok(())
        })?;
    }
    Ok(())
}
