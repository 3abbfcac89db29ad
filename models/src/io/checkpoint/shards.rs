//! The shards of tensors that a rank puts into a checkpoint.

use ferrotron_nn::{AxisSet, Optimizer, Param};
use ferrotron_tensor::{Result, ShardSpec, Tensor};

use super::moment_name;

/// A tensor, and the shard `place` that this rank holds.
pub struct LocalShard {
    /// The global name.
    pub name: String,
    /// Its part of the global tensor.
    pub place: ShardSpec,
    /// Its value.
    pub tensor: Tensor,
}

/// The state of an optimizer.
pub struct Moments {
    /// Its tensors, under the names that they have in a checkpoint.
    pub shards: Vec<LocalShard>,
    /// Steps taken.
    pub steps: u64,
}

impl LocalShard {
    /// The values of parameters.
    ///
    /// Errors if one has the name of a moment.
    pub fn params(params: &[Param]) -> Result<Vec<LocalShard>> {
        let held = |param: &Param| {
            let (name, place) = (param.name().to_string(), param.shard_spec().clone());
            Ok(LocalShard { name, place, tensor: param.leaf().value()? })
        };
        params.iter().map(held).collect()
    }
}

impl Moments {
    /// The state of `optimizer` that this rank writes. `written` decides, from the axes along which all ranks have the
    /// same, and the shard.
    pub fn from_optimizer(
        optimizer: &Optimizer,
        written: impl FnMut(AxisSet, &ShardSpec) -> bool,
    ) -> Result<Moments> {
        let mut held = Vec::new();
        optimizer.visit_where(written, |name, moment, place, tensor| {
            held.push(LocalShard { name: moment_name(moment, name), place: place.clone(), tensor });
            Ok(())
        })?;
        Ok(Moments { shards: held, steps: optimizer.steps() })
    }
}
