//! What Adafactor keeps of the gradients: of a matrix the mean squares of its rows and of its columns, of a vector
//! those of its elements. Shazeer and Stern, arXiv 1804.04235, algorithms 4 and 5.
//!
//! A tensor is what the model calls one. Queries, keys and values are three, though they are stored as one
//! parameter, so that nothing that becomes of one of them depends on the others.

use ferrotron_tensor::ops::adafactor::{
    Decay, Factors, Matrices, MeanOf, matrix_factors, update_mean_squares, update_means,
    vector_factors,
};
use ferrotron_tensor::ops::step::Step;
use ferrotron_tensor::{Error, Flat, Place, Result, Tensor};
use std::collections::HashMap;
use std::ops::Range;

use super::{Moment, Piece, Store};
use crate::{Axis, Param, ParamGroup};

/// A tensor as the rule sees it, as far as it is here: a parameter, or a block of one in which several are packed.
#[derive(Debug, Clone)]
pub(super) struct Block {
    /// Which part of which parameter.
    pub piece: Piece,
    /// Its number among the blocks of the parameter, and how many they are.
    number: (usize, usize),
    /// The dims of the whole block.
    whole: Vec<usize>,
}

impl Block {
    /// The blocks of the parameters that this rank updates, in the order of the flats.
    ///
    /// Errors if it does not update all that it has of a parameter, or one is cut in both of the dims that are
    /// summed over.
    pub fn all(group: &ParamGroup) -> Result<Vec<Block>> {
        let mut all = Vec::new();
        let params: HashMap<_, _> =
            group.params.iter().map(|param| (param.name(), param)).collect();
        for (name, place) in group.pieces() {
            let param = params[&name[..]]; // the pieces of a group are those of its parameters
            if *param.place() != place {
                let message = format!(
                    "has to see the whole of '{name}', of which this rank's shard ends within: shard by parameters"
                );
                return Err(Error::config("adafactor", message));
            }
            all.extend(Block::of(param, group));
        }
        match all.iter().find(|block| block.goes_on() == (true, true)) {
            None => Ok(all),
            Some(Block { piece, .. }) => {
                let message = format!("'{}' is cut into rows and into columns", piece.param);
                Err(Error::config("adafactor", message))
            }
        }
    }

    /// Those of one parameter.
    fn of(param: &Param, group: &ParamGroup) -> Vec<Block> {
        let (place, replicated) = (param.place(), group.replicated);
        let piece = |place| Piece { param: param.name().to_string(), place, replicated };
        let whole = place.global_dims().to_vec();
        if param.blocks().is_empty() {
            return vec![Block { piece: piece(place.clone()), number: (0, 1), whole }];
        }
        let mut start = 0;
        let block = |(number, &len): (usize, &usize)| {
            let place = place.within(0, start..start + len);
            start += len;
            let whole = [&[len], &whole[1..]].concat();
            Block { piece: piece(place), number: (number, param.blocks().len()), whole }
        };
        param.blocks().iter().enumerate().map(block).collect()
    }

    /// The dims of the part that is here.
    pub fn dims(&self) -> &[usize] {
        self.piece.place.dims()
    }

    /// The matrices that it consists of.
    pub fn shape(&self) -> Matrices {
        Matrices::of(self.dims())
    }

    /// Whether it has no rows and columns.
    pub fn is_vector(&self) -> bool {
        self.whole.len() < 2
    }

    /// Rows and columns of the whole, if it is no vector.
    pub fn sides(&self) -> (usize, usize) {
        let n = self.whole.len();
        (self.whole[n - 2], self.whole[n - 1])
    }

    /// Number of elements of the whole.
    pub fn numel(&self) -> usize {
        self.whole.iter().product()
    }

    /// Whether other ranks have other parts of it.
    pub fn is_part(&self) -> bool {
        (0..self.dims().len()).any(|dim| self.is_cut(dim))
    }

    /// Whether other ranks have other coordinates of a dim.
    fn is_cut(&self, dim: usize) -> bool {
        self.dims()[dim] < self.whole[dim]
    }

    /// Whether rows go on on other ranks, and whether columns do.
    pub fn goes_on(&self) -> (bool, bool) {
        match self.whole.len() {
            0 | 1 => (false, false),
            n => (self.is_cut(n - 1), self.is_cut(n - 2)),
        }
    }

    /// What is kept of its rows.
    fn rows(&self) -> Piece {
        self.summed_over(self.whole.len() - 1)
    }

    /// What is kept of its columns: one behind another for the blocks of a parameter.
    fn columns(&self) -> Result<Piece> {
        let columns = self.summed_over(self.whole.len() - 2);
        let (number, count) = self.number;
        if self.whole.len() > 2 || count == 1 {
            return Ok(columns);
        }
        let (width, pieces) = (columns.place.global_dims()[0], columns.place.pieces(0));
        let place = Place::new(&[count, width], &[&[(number, 1)], pieces])?;
        Ok(Piece { place, ..columns })
    }

    /// What is left when `dim` is summed over: the same on all ranks, if only that was cut.
    fn summed_over(&self, dim: usize) -> Piece {
        let Piece { param, place, replicated } = &self.piece;
        let cut = (0..self.whole.len()).any(|other| other != dim && self.is_cut(other));
        let replicated = if cut { *replicated } else { replicated.with(Axis::Tensor) };
        Piece { param: param.clone(), place: place.without(dim), replicated }
    }
}

/// The mean squares of a group's parameters.
pub(super) struct MeanSquares {
    pub blocks: Vec<Block>,
    /// Of the rows of matrices, of their columns, and of every element of vectors.
    pub moments: [Moment; 3],
    /// For each block its range in the first two or in the last.
    ranges: Vec<usize>,
}

impl MeanSquares {
    /// Zeros.
    pub fn new(blocks: Vec<Block>, store: &Store) -> Result<Self> {
        let mut parts: [Vec<Piece>; 3] = Default::default();
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

    /// What multiplies the gradient of a block.
    pub fn factors(&self, index: usize) -> Result<Factors> {
        let (block, range) = (&self.blocks[index], self.ranges[index]);
        let [rows, columns, full] = self.moments.each_ref().map(|moment| &moment.flat);
        if block.is_vector() {
            return vector_factors(&full.elements(span(full, range))?);
        }
        let rows = rows.elements(span(rows, range))?;
        let columns = columns.elements(span(columns, range))?;
        let mean_of = match block.goes_on() {
            (_, false) => MeanOf::Rows,
            (_, true) => MeanOf::Columns,
        };
        matrix_factors(&block.shape(), &rows, &columns, mean_of)
    }

    /// Takes the squares of a step into the means of a block: the sums over its whole rows and columns, or the
    /// gradients of a vector.
    pub fn update(
        &mut self,
        index: usize,
        (row_sums, column_sums): (&Tensor, &Tensor),
        grads: &Tensor,
        (decay, step): (&Decay, &Step),
    ) -> Result<()> {
        let (block, range) = (&self.blocks[index], self.ranges[index]);
        let [rows, columns, full] = self.moments.each_mut().map(|moment| &mut moment.flat);
        if block.is_vector() {
            return full.update_elements(span(full, range), |means| {
                update_mean_squares(decay, step, means, grads)
            });
        }
        let (height, width) = block.sides();
        for (flat, sums, count) in [(rows, row_sums, width), (columns, column_sums, height)] {
            flat.update_elements(span(flat, range), |means| {
                update_means(decay, step, means, sums, count)
            })?;
        }
        Ok(())
    }
}

/// The elements of a range.
fn span(flat: &Flat, range: usize) -> Range<usize> {
    let (start, len) = flat.span(range);
    start..start + len
}
