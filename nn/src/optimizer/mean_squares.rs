//! The second moments of Adafactor: mean squares per row and per column for a matrix, per element for a vector.
//! Shazeer and Stern, arXiv 1804.04235, algorithms 4 and 5.
//!
//! Queries, keys and values are three independent tensors here, although they are stored as one parameter.

use ferrotron_tensor::ops::adafactor::{
    MatrixBatch, NormalizeBy, RowColFactors, SecondMomentDecay, matrix_factors,
    update_mean_squares, update_means, vector_factors,
};
use ferrotron_tensor::ops::step::DeviceStepParams;
use ferrotron_tensor::{Error, FlatBuffer, Result, ShardSpec, Tensor};
use std::collections::HashMap;
use std::ops::Range;

use super::moment::{Moment, ParamShard, Store};
use crate::{Axis, Param, ParamAndGradBucket};

/// The local shard of a tensor in the sense of Adafactor: a parameter, or one block of a packed parameter.
#[derive(Debug, Clone)]
pub(super) struct FactoredBlock {
    /// The shard and its parameter.
    pub piece: ParamShard,
    /// The block's index within the parameter, and the number of its blocks.
    number: (usize, usize),
    /// The global dims of the block.
    whole: Vec<usize>,
}

impl FactoredBlock {
    /// The blocks of the parameters that this rank updates, in the order of the flat buffers.
    ///
    /// Errors if this rank updates only a part of its shard of a parameter, or if a parameter is sharded along both
    /// of the dims that are reduced.
    pub fn all(group: &ParamAndGradBucket) -> Result<Vec<FactoredBlock>> {
        let mut all = Vec::new();
        let params: HashMap<_, _> =
            group.params.iter().map(|param| (param.name(), param)).collect();
        for (name, place) in group.pieces() {
            let param = params[&name[..]]; // a group's pieces are of its parameters
            if *param.shard_spec() != place {
                let message = format!(
                    "has to see the whole of '{name}', of which this rank's shard ends within: shard by parameters"
                );
                return Err(Error::config("adafactor", message));
            }
            all.extend(FactoredBlock::from_param(param, group));
        }
        match all.iter().find(|block| block.spans_ranks() == (true, true)) {
            None => Ok(all),
            Some(FactoredBlock { piece, .. }) => {
                let message = format!("'{}' is cut into rows and into columns", piece.param);
                Err(Error::config("adafactor", message))
            }
        }
    }

    /// The blocks of one parameter.
    fn from_param(param: &Param, group: &ParamAndGradBucket) -> Vec<FactoredBlock> {
        let (place, replicated) = (param.shard_spec(), group.replicated);
        let piece = |place| ParamShard { param: param.name().to_string(), place, replicated };
        let whole = place.global_dims().to_vec();
        if param.blocks().is_empty() {
            return vec![FactoredBlock { piece: piece(place.clone()), number: (0, 1), whole }];
        }
        let mut start = 0;
        let block = |(number, &len): (usize, &usize)| {
            let place = place.intersect_dim(0, start..start + len);
            start += len;
            let whole = [&[len], &whole[1..]].concat();
            FactoredBlock { piece: piece(place), number: (number, param.blocks().len()), whole }
        };
        param.blocks().iter().enumerate().map(block).collect()
    }

    /// The dims of the local shard.
    pub fn dims(&self) -> &[usize] {
        self.piece.place.dims()
    }

    /// The local matrices of the block.
    pub fn shape(&self) -> MatrixBatch {
        MatrixBatch::from_dims(self.dims())
    }

    /// Returns whether the block has fewer than two dims.
    pub fn is_vector(&self) -> bool {
        self.whole.len() < 2
    }

    /// Global numbers of rows and columns, if the block is not a vector.
    pub fn sides(&self) -> (usize, usize) {
        let n = self.whole.len();
        (self.whole[n - 2], self.whole[n - 1])
    }

    /// Global number of elements.
    pub fn numel(&self) -> usize {
        self.whole.iter().product()
    }

    /// Returns whether the block is sharded over ranks.
    pub fn is_part(&self) -> bool {
        (0..self.dims().len()).any(|dim| self.is_cut(dim))
    }

    /// Returns whether a dim is sharded over ranks.
    fn is_cut(&self, dim: usize) -> bool {
        self.dims()[dim] < self.whole[dim]
    }

    /// Whether rows span ranks, and whether columns do.
    pub fn spans_ranks(&self) -> (bool, bool) {
        match self.whole.len() {
            0 | 1 => (false, false),
            n => (self.is_cut(n - 1), self.is_cut(n - 2)),
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

/// The mean squares of a group's parameters.
pub(super) struct MeanSquares {
    pub blocks: Vec<FactoredBlock>,
    /// Means over rows of matrices, over columns, and of every element of vectors.
    pub moments: [Moment; 3],
    /// For each block its range in the first two moments or in the last.
    ranges: Vec<usize>,
}

impl MeanSquares {
    /// Mean squares of zero.
    pub fn new(blocks: Vec<FactoredBlock>, store: &Store) -> Result<Self> {
        let mut parts: [Vec<ParamShard>; 3] = Default::default();
        let mut ranges = Vec::new();
        for block in &blocks {
            if block.is_vector() {
                ranges.push(parts[2].len());
                parts[2].push(block.piece.clone());
            } else {
                ranges.push(parts[0].len());
                parts[0].push(block.rows());
                parts[1].push(block.columns()?);
            }
        }
        let [rows, columns, full] = parts;
        let moment = |name, pieces| Moment::new(name, pieces, store);
        let moments = [
            moment("exp_avg_sq_row", rows)?,
            moment("exp_avg_sq_col", columns)?,
            moment("exp_avg_sq", full)?,
        ];
        Ok(MeanSquares { blocks, moments, ranges })
    }

    /// The factors that multiply the gradient of a block.
    pub fn factors(&self, index: usize) -> Result<RowColFactors> {
        let (block, range) = (&self.blocks[index], self.ranges[index]);
        let [rows, columns, full] = self.moments.each_ref().map(|moment| &moment.flat);
        if block.is_vector() {
            return vector_factors(&full.slice(span(full, range)?)?);
        }
        let rows = rows.slice(span(rows, range)?)?;
        let columns = columns.slice(span(columns, range)?)?;
        let mean_of = match block.spans_ranks() {
            (_, false) => NormalizeBy::Rows,
            (_, true) => NormalizeBy::Columns,
        };
        matrix_factors(&block.shape(), &rows, &columns, mean_of)
    }

    /// Updates the means of a block with the squares of a step: sums over global rows and columns, or the gradients
    /// of a vector.
    pub fn update(
        &mut self,
        index: usize,
        (row_sums, column_sums): (&Tensor, &Tensor),
        grads: &Tensor,
        (decay, step): (&SecondMomentDecay, &DeviceStepParams),
    ) -> Result<()> {
        let (block, range) = (&self.blocks[index], self.ranges[index]);
        let [rows, columns, full] = self.moments.each_mut().map(|moment| &mut moment.flat);
        if block.is_vector() {
            return full.with_slice_mut(span(full, range)?, |means| {
                update_mean_squares(decay, step, means, grads)
            });
        }
        let (height, width) = block.sides();
        for (flat, sums, count) in [(rows, row_sums, width), (columns, column_sums, height)] {
            flat.with_slice_mut(span(flat, range)?, |means| {
                update_means(decay, step, means, sums, count)
            })?;
        }
        Ok(())
    }
}

/// The elements of a range of the flat buffer.
fn span(flat: &FlatBuffer, range: usize) -> Result<Range<usize>> {
    let (start, len) = flat.range(range)?;
    Ok(start..start + len)
}
