//! Tensors as rules see them that update one at a time: a parameter, or one block of a packed parameter.
//!
//! Queries, keys and values are three tensors here, although they are stored as one parameter, and so are gate and up.

use ferrotron_tensor::ops::adafactor::MatrixBatch;
use ferrotron_tensor::{Error, Result, ShardSpec};

use super::moment::ParamShard;
use super::state::StateShape;
use crate::Axis;

/// The local shard of one tensor.
#[derive(Debug, Clone)]
pub struct Block {
    /// The shard and its parameter.
    pub(super) piece: ParamShard,
    /// The block's index within the parameter, and the number of its blocks.
    pub(super) number: (usize, usize),
    /// The global dims of the block.
    pub(super) whole: Vec<usize>,
}

impl Block {
    /// The name of the parameter.
    pub fn name(&self) -> &str {
        &self.piece.param
    }

    /// The dims of the whole tensor.
    pub fn global_dims(&self) -> &[usize] {
        &self.whole
    }

    /// The dims of the local shard.
    pub fn dims(&self) -> &[usize] {
        self.piece.place.dims()
    }

    /// The local matrices of the block.
    pub(super) fn shape(&self) -> MatrixBatch {
        MatrixBatch::from_dims(self.dims())
    }

    /// Returns whether the block has fewer than two dims.
    pub(super) fn is_vector(&self) -> bool {
        self.whole.len() < 2
    }

    /// Global numbers of rows and columns, if the block is not a vector.
    pub(super) fn sides(&self) -> (usize, usize) {
        let n = self.whole.len();
        (self.whole[n - 2], self.whole[n - 1])
    }

    /// Global number of elements.
    pub fn numel(&self) -> usize {
        self.whole.iter().product()
    }

    /// Returns whether the block is sharded over ranks.
    pub fn is_part(&self) -> bool {
        self.cut_dim().is_some()
    }

    /// The dim that is sharded over ranks, if there is one.
    pub(super) fn cut_dim(&self) -> Option<usize> {
        (0..self.dims().len()).find(|&dim| self.is_cut(dim))
    }

    /// Returns whether a dim is sharded over ranks.
    fn is_cut(&self, dim: usize) -> bool {
        self.dims()[dim] < self.whole[dim]
    }

    /// Whether rows span ranks, and whether columns do.
    pub(super) fn spans_ranks(&self) -> (bool, bool) {
        match self.whole.len() {
            0 | 1 => (false, false),
            n => (self.is_cut(n - 1), self.is_cut(n - 2)),
        }
    }

    /// The local shard of a state.
    pub(super) fn state(&self, shape: StateShape) -> Result<ParamShard> {
        match shape {
            StateShape::PerElement => Ok(self.piece.clone()),
            _ if self.is_vector() => {
                let message =
                    format!("'{}' of {:?} has no rows and columns", self.name(), self.whole);
                Err(Error::config("optimizer", message))
            }
            StateShape::PerRow => Ok(self.rows()),
            StateShape::PerColumn => self.columns(),
        }
    }

    /// The shard of the means over rows.
    fn rows(&self) -> ParamShard {
        self.summed_over(self.whole.len() - 1)
    }

    /// The shard of the means over columns. Those of a parameter's blocks are concatenated.
    fn columns(&self) -> Result<ParamShard> {
        let columns = self.summed_over(self.whole.len() - 2);
        let (number, count) = self.number;
        if self.whole.len() > 2 || count == 1 {
            return Ok(columns);
        }
        let (width, pieces) = (columns.place.global_dims()[0], columns.place.pieces(0));
        let place = ShardSpec::new(&[count, width], &[&[(number, 1)], pieces])?;
        Ok(ParamShard { place, ..columns })
    }

    /// The shard that remains after a reduction over `dim`. It is replicated if only that dim was sharded.
    fn summed_over(&self, dim: usize) -> ParamShard {
        let ParamShard { param, place, replicated } = &self.piece;
        let cut = (0..self.whole.len()).any(|other| other != dim && self.is_cut(other));
        let replicated = if cut { *replicated } else { replicated.with(Axis::Tensor) };
        ParamShard { param: param.clone(), place: place.drop_dim(dim), replicated }
    }
}
