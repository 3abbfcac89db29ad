//! What Adafactor keeps of the gradients: of a matrix the mean squares of its rows and of its columns, of a vector
//! those of its elements. Shazeer and Stern, arXiv 1804.04235, algorithms 4 and 5.
//!
//! With t the step, g the gradient, means over the last two dims of the *whole* tensor:
//!   beta2 = 1 - t^-decay_rate
//!   R = beta2 R + (1 - beta2) mean_j(g^2 + eps1), C the same over i; a vector keeps V, of each element
//!   what multiplies g: 1 / sqrt(R C / mean(R)), or 1 / sqrt(V)
//!
//! The mean of R is that of C: it is taken of the one that is here whole.
//!
//! A tensor is what the model calls one. Queries, keys and values are three, though they are stored as one
//! parameter, so that nothing that becomes of one of them depends on the others.

use ferrotron_tensor::ops::adafactor::{Factors, Matrices};
use ferrotron_tensor::{Element, Error, Flat, Place, Real, Result, Scalar};

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
        for (name, place) in group.pieces() {
            let param = group.params.iter().find(|param| param.name() == name);
            let param = param.expect("the pieces of a group are those of its parameters");
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

    /// Whether other ranks have other coordinates of a dim.
    pub fn is_cut(&self, dim: usize) -> bool {
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

/// What a step takes into the means.
pub(super) struct New {
    pub beta2: f64,
    pub eps1: f64,
    pub grad_scale: f64,
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
    pub fn factors<A: Element<Acc = A> + Real>(&self, index: usize) -> Result<BlockFactors<A>> {
        let (block, range) = (&self.blocks[index], self.ranges[index]);
        let shape = block.shape();
        let [rows, columns, full] = &self.moments;
        let inverse_root = |x: &A| A::of(1.0 / x.f64().sqrt());
        if block.is_vector() {
            let columns = span::<A>(&full.flat, range)?.iter().map(inverse_root).collect();
            return Ok(BlockFactors { shape, rows: vec![A::ONE], columns });
        }
        let (rows, columns) = (span::<A>(&rows.flat, range)?, span::<A>(&columns.flat, range)?);
        let mean = |values: &[A]| values.iter().map(|x| x.f64()).sum::<f64>() / values.len() as f64;
        let (_, columns_go_on) = block.goes_on();
        let mut scaled = Vec::with_capacity(rows.len());
        for matrix in 0..shape.count {
            let rows = &rows[matrix * shape.rows..][..shape.rows];
            let mean = match columns_go_on {
                false => mean(rows),
                true => mean(&columns[matrix * shape.columns..][..shape.columns]),
            };
            scaled.extend(rows.iter().map(|row| A::of((mean / row.f64()).sqrt())));
        }
        let columns = columns.iter().map(inverse_root).collect();
        Ok(BlockFactors { shape, rows: scaled, columns })
    }

    /// Takes the squares of a step into the means of a block: the sums over its whole rows and columns, or the
    /// gradients of a vector.
    pub fn update<G: Element>(
        &mut self,
        index: usize,
        (row_sums, column_sums): (&[f64], &[f64]),
        grads: &[G],
        new: &New,
    ) -> Result<()> {
        let (block, range) = (&self.blocks[index], self.ranges[index]);
        let [rows, columns, full] = &mut self.moments;
        let mix = |mean: &mut G::Acc, square: f64| {
            let share = 1.0 - new.beta2;
            *mean = G::Acc::of(new.beta2 * mean.f64() + share * (square + new.eps1));
        };
        let scale = new.grad_scale * new.grad_scale;
        if block.is_vector() {
            let means = span_mut::<G::Acc>(&mut full.flat, range)?;
            for (mean, g) in means.iter_mut().zip(grads) {
                let g = g.acc().f64();
                mix(mean, scale * g * g);
            }
            return Ok(());
        }
        let (height, width) = block.sides();
        for (flat, sums, count) in
            [(&mut rows.flat, row_sums, width), (&mut columns.flat, column_sums, height)]
        {
            let means = span_mut::<G::Acc>(flat, range)?.iter_mut();
            means.zip(sums).for_each(|(mean, sum)| mix(mean, scale * sum / count as f64));
        }
        Ok(())
    }
}

/// What multiplies the gradient of one block.
pub(super) struct BlockFactors<A> {
    pub shape: Matrices,
    rows: Vec<A>,
    columns: Vec<A>,
}

impl<A> BlockFactors<A> {
    pub fn lend(&self) -> Factors<'_, A> {
        Factors { rows: &self.rows, columns: &self.columns }
    }
}

fn span<A: Scalar>(flat: &Flat, range: usize) -> Result<&[A]> {
    let (start, len) = flat.span(range);
    Ok(&flat.whole::<A>()?[start..start + len])
}

fn span_mut<A: Scalar>(flat: &mut Flat, range: usize) -> Result<&mut [A]> {
    let (start, len) = flat.span(range);
    Ok(&mut flat.whole_mut::<A>()?[start..start + len])
}
