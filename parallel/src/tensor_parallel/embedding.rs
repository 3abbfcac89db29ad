//! The token embedding with rows sharded over the ranks.

use ferrotron_autograd::Var;
use ferrotron_nn::{Axis, Init, Module, Param, Scope, WeightDecay};
use ferrotron_tensor::{At, Error, Result, Tensor};

use super::mappings::{reduce_from_tp, reduce_scatter_to_sp};
use super::sharding::SEQUENCE;
use super::{SequenceParallel, TensorParallel};

/// A trainable table (V, C) with sharded rows. Each rank looks up the ids in its shard, gives zeros for the others,
/// and the ranks' results are summed (Shoeybi et al., section 3). V need not be a multiple of the number of ranks.
///
/// ```
/// use ferrotron_nn::{Init, Scope};
/// use ferrotron_parallel::tensor_parallel::{TensorParallel, VocabParallelEmbedding};
/// use ferrotron_tensor::{DType, Device, Tensor};
/// let device = Device::cpu(1)?;
/// let scope = Scope::new(&device, DType::F32, 0).child("wte");
/// let tp = TensorParallel::single();
/// let wte = VocabParallelEmbedding::new(&scope, &tp, 13, 8, Init::Normal { std: 0.02 })?;
/// let ids = Tensor::from_slice(&device, &[0_u32, 12, 7, 7, 1, 5], &[2, 3])?;
/// assert_eq!(wte.forward(&ids)?.dims(), [2, 3, 8]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, Module)]
pub struct VocabParallelEmbedding {
    #[module(skip)]
    tp: TensorParallel,
    path: String,
    weight: Param,
}

impl VocabParallelEmbedding {
    /// A table of `count` rows of `width`. Errors if either is 0.
    pub fn new(
        scope: &Scope,
        tp: &TensorParallel,
        count: usize,
        width: usize,
        init: Init,
    ) -> Result<VocabParallelEmbedding> {
        if count == 0 || width == 0 {
            let message = format!("sizes must be positive, got {count} rows of {width}");
            return Err(Error::config("embedding", message).at(scope.path()));
        }
        let place = tp.shard(&[count, width], 0, &[count])?;
        let cut = scope.clone().sharded_along(Axis::Tensor);
        Ok(VocabParallelEmbedding {
            tp: tp.clone(),
            path: scope.path().to_string(),
            weight: cut.param_at("weight", place, init, WeightDecay::On).as_embedding(),
        })
    }

    /// ids (B, T) of all positions -> (B, T, C), or (B, T/tp, C) with sequence parallelism.
    ///
    /// Errors on every rank if an id is not below V.
    pub fn forward(&self, ids: &Tensor) -> Result<Var> {
        self.look_up(ids).at(&self.path)
    }

    fn look_up(&self, ids: &Tensor) -> Result<Var> {
        let group = self.tp.group();
        let rows = self.weight.var()?.embedding_shard(ids, self.tp.vocab_shard(&self.weight))?;
        let rows = rows.cast(self.weight.compute_dtype())?;
        match self.tp.sequence() {
            SequenceParallel::On => reduce_scatter_to_sp(&rows, SEQUENCE, group),
            SequenceParallel::Off => reduce_from_tp(&rows, group),
        }
    }

    /// The local rows of the table, (V/tp, C).
    pub fn weight(&self) -> &Param {
        &self.weight
    }
}
