//! Refuses parameters whose facts would train them wrongly on a mesh.

use ferrotron_nn::shard_exchange::{GatheredShard, gathered_shards};
use ferrotron_nn::{Axis, OptimizerConfig, Param};
use ferrotron_tensor::{Error, Result};

use crate::mesh::Mesh;
use crate::tensor_parallel::SequenceParallel;

/// Errors if `optimizer` gathers a matrix whose shards ranks along the tensor axis do not hold evenly: in the middle of a
/// step, other parameters would be updated already.
pub(super) fn check_gathers(param: &Param, mesh: &Mesh, optimizer: OptimizerConfig) -> Result<()> {
    let ranks = mesh.axis(Axis::Tensor);
    for GatheredShard { dim, len, local_len } in gathered_shards(param, optimizer) {
        let even = ranks.local_range(len).len();
        if local_len != even {
            let message = format!(
                "'{}': {} gathers its shards along dim {dim} of {len}, of which rank {} of {} along the tensor axis must \
                 hold {even}, not {local_len}: cut it by `TensorParallel::shard`, or give it another `optimizer` by \
                 `Scope::with_options`",
                param.name(),
                param.options().optimizer.unwrap_or(optimizer).rule().name(),
                ranks.rank(),
                ranks.size()
            );
            return Err(Error::config("data_parallel", message));
        }
    }
    Ok(())
}

/// Errors unless a parameter's gradients can be reduced. They must be partial along the batch axes, and along another
/// axis only if all its ranks hold the same elements. With sequence parallelism, a parameter that ranks along the
/// tensor axis replicate must say whether its gradients are partial there.
pub(super) fn check_facts(param: &Param, mesh: &Mesh) -> Result<()> {
    let (partial, replicated) = (param.grad_partial(), param.replicated());
    let name = param.name();
    let refuse = |message: String| Err(Error::config("data_parallel", message));
    let batch = [Axis::Context, Axis::Data]
        .into_iter()
        .all(|axis| partial.contains(axis) && replicated.contains(axis));
    if !batch || !partial.iter().all(|axis| replicated.contains(axis)) {
        return refuse(format!(
            "'{name}' is replicated along {replicated:?} with partial gradients along {partial:?}: gradients must be \
             parts along Context and Data, and along no axis that cuts the parameter"
        ));
    }
    let place = param.shard_spec();
    if place.dims() != place.global_dims() && replicated.contains(Axis::Tensor) {
        return refuse(format!(
            "'{name}' is a shard {:?} of {:?}, but is said to be replicated along Tensor: make it in \
             `scope.sharded_along(Axis::Tensor)`",
            place.dims(),
            place.global_dims()
        ));
    }
    let sequence_parallel =
        mesh.sequence() == SequenceParallel::On && mesh.layout().size(Axis::Tensor) > 1;
    let told = partial.contains(Axis::Tensor) || param.grad_whole().contains(Axis::Tensor);
    if sequence_parallel && replicated.contains(Axis::Tensor) && !told {
        return refuse(format!(
            "'{name}' is replicated along Tensor, and with sequence parallelism each rank there sees its positions \
             only: make it in `mesh.scope(..)` or `residual_scope`, so that its gradients are summed, or, if every \
             rank has its whole gradient, in `scope.with_whole_gradients(Axis::Tensor)`"
        ));
    }
    Ok(())
}
