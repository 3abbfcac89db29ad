//! Optimizer state in a flat buffer, and the shards of parameters that it belongs to.

use ferrotron_tensor::{Category, DType, Device, FlatBuffer, MemoryKind, Result, ShardSpec};

use crate::AxisSet;

/// A shard of a parameter, or of state derived from one.
#[derive(Debug, Clone)]
pub(super) struct ParamShard {
    pub param: String,
    pub place: ShardSpec,
    /// The axes, of those that divide buckets, along which all ranks hold the same values.
    pub replicated: AxisSet,
}

impl ParamShard {
    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.place.dims().iter().product()
    }
}

/// Optimizer state for the parameters of a group, with its name in checkpoints.
pub(super) struct Moment {
    pub name: &'static str,
    /// The shard that each range of the flat buffer holds.
    pub pieces: Vec<ParamShard>,
    pub flat: FlatBuffer,
}

/// Placement and dtype of moments.
pub(super) struct Store {
    pub kind: MemoryKind,
    pub device: Device,
    pub dtype: DType,
}

impl Moment {
    /// A moment of zeros.
    pub fn new(name: &'static str, pieces: Vec<ParamShard>, store: &Store) -> Result<Self> {
        let Store { kind, device, dtype } = store;
        let dims = |piece: &ParamShard| (piece.param.clone(), piece.place.dims().to_vec());
        let parts: Vec<_> = pieces.iter().map(dims).collect();
        let flat = FlatBuffer::new_in(*kind, device, *dtype, Category::Optimizer, &parts)?;
        Ok(Moment { name, pieces, flat })
    }
}
