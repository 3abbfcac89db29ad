//! Adafactor's mean squares, and what comes of them before weights are updated: Shazeer and Stern, arXiv
//! 1804.04235, algorithms 4 and 5.
//!
//! With t the step, g the gradient, means over the last two dims of the *global* parameter:
//!   beta2 = 1 - t^-decay_rate
//!   R = beta2 R + (1 - beta2) mean_j(g^2 + eps1), C the same over i; a vector keeps V, of each element
//!   u = g / sqrt(R C / mean(R)), or g / sqrt(V)
//!   step = alpha / max(1, RMS(u) / clip_threshold), alpha = lr or, relative, lr * max(eps2, RMS(w))
//!
//! Where ranks hold parts of a parameter, their sums are added up twice in a step: those of squares, and those
//! of the updates' squares. The mean of R is that of C: it is taken of the one that is here whole.

use ferrotron_tensor::ops::adafactor::{Adafactor, Factors, Matrices, square_sums, update_sq_norm};
use ferrotron_tensor::ops::sq_norm::sq_norm;
use ferrotron_tensor::{
    DType, Device, Element, Error, Flat, Place, Real, Result, Scalar, dispatch_float,
};
use std::ops::Range;

use super::{AdafactorConfig, Moment, Piece, RelativeStep, State, StepConfig};
use crate::{Axis, Decay, ParamGroup};

/// Adds up numbers, in place, over the ranks that hold the other parts of the same parameters: see
/// [`Optimizer::step_with`](super::Optimizer::step_with).
pub type SumParts<'a> = dyn FnMut(&mut [f64]) -> Result<()> + 'a;

/// The mean squares of a group's parameters.
pub(super) struct MeanSquares {
    /// Of the rows of matrices, of their columns, and of every element of vectors.
    moments: [Moment; 3],
    /// For each piece of the group its range in the first two or in the last.
    ranges: Vec<usize>,
}

impl MeanSquares {
    /// Zeros.
    ///
    /// Errors if a piece is not the whole of what this rank has of a parameter, or is cut in both of the dims
    /// that are summed over.
    pub fn new(
        group: &ParamGroup,
        pieces: &[Piece],
        device: &Device,
        dtype: DType,
    ) -> Result<Self> {
        let mut parts: [Vec<Piece>; 3] = Default::default();
        let mut ranges = Vec::new();
        for piece in pieces {
            let known = |param: &&crate::Param| param.name() == piece.param;
            if group.params.iter().find(known).is_some_and(|param| *param.place() != piece.place) {
                let message = format!(
                    "has to see the whole of '{}', of which this rank's shard ends within: shard by parameters",
                    piece.param
                );
                return Err(Error::config("adafactor", message));
            }
            let n = piece.place.dims().len();
            if n < 2 {
                ranges.push(parts[2].len());
                parts[2].push(piece.clone());
                continue;
            }
            let (row_cut, column_cut) = (is_cut(&piece.place, n - 2), is_cut(&piece.place, n - 1));
            if row_cut && column_cut {
                let message = format!("'{}' is cut into rows and into columns", piece.param);
                return Err(Error::config("adafactor", message));
            }
            ranges.push(parts[0].len());
            parts[0].push(summed_over(piece, n - 1));
            parts[1].push(summed_over(piece, n - 2));
        }
        let [rows, columns, full] = parts;
        let moment = |name, pieces| Moment::new(name, pieces, device, dtype);
        let moments = [
            moment("exp_avg_sq_row", rows)?,
            moment("exp_avg_sq_col", columns)?,
            moment("exp_avg_sq", full)?,
        ];
        Ok(MeanSquares { moments, ranges })
    }

    pub fn moments(&self) -> &[Moment] {
        &self.moments
    }

    pub fn moments_mut(&mut self) -> &mut [Moment] {
        &mut self.moments
    }

    /// What multiplies the gradient of a piece.
    pub fn factors<A: Element<Acc = A> + Scalar + Real>(
        &self,
        piece: usize,
        place: &Place,
    ) -> Result<PieceFactors<A>> {
        let shape = Matrices::of(place.dims());
        let range = self.ranges[piece];
        let [rows, columns, full] = &self.moments;
        let inverse_root = |x: &A| A::of(1.0 / x.f64().sqrt());
        let n = place.dims().len();
        if n < 2 {
            let v = span::<A>(&full.flat, range)?;
            let columns = v.iter().map(inverse_root).collect();
            return Ok(PieceFactors { shape, rows: vec![A::ONE], columns });
        }
        let (rows, columns) = (span::<A>(&rows.flat, range)?, span::<A>(&columns.flat, range)?);
        let mean = |values: &[A]| values.iter().map(|x| x.f64()).sum::<f64>() / values.len() as f64;
        let mut scaled = Vec::with_capacity(rows.len());
        for matrix in 0..shape.count {
            let rows = &rows[matrix * shape.rows..][..shape.rows];
            let mean = match is_cut(place, n - 2) {
                false => mean(rows),
                true => mean(&columns[matrix * shape.columns..][..shape.columns]),
            };
            scaled.extend(rows.iter().map(|row| A::of((mean / row.f64()).sqrt())));
        }
        Ok(PieceFactors {
            shape,
            rows: scaled,
            columns: columns.iter().map(inverse_root).collect(),
        })
    }

    /// Takes the squares of this step into the means.
    fn update<G: Element>(
        &mut self,
        piece: usize,
        sums: &Sums,
        grads: &[G],
        new: &New,
    ) -> Result<()> {
        let range = self.ranges[piece];
        let [rows, columns, full] = &mut self.moments;
        let mix = |mean: &mut G::Acc, square: f64| {
            let share = 1.0 - new.beta2;
            *mean = G::Acc::of(new.beta2 * mean.f64() + share * (square + new.eps1));
        };
        let scale = new.grad_scale * new.grad_scale;
        if sums.is_vector() {
            let v = span_mut::<G::Acc>(&mut full.flat, range)?;
            for (mean, g) in v.iter_mut().zip(grads) {
                let g = g.acc().f64();
                mix(mean, scale * g * g);
            }
            return Ok(());
        }
        let dims = sums.place.global_dims();
        let (height, width) = (dims[dims.len() - 2] as f64, dims[dims.len() - 1] as f64);
        for (flat, sums, count) in
            [(&mut rows.flat, &sums.rows, width), (&mut columns.flat, &sums.columns, height)]
        {
            let means = span_mut::<G::Acc>(flat, range)?.iter_mut();
            means.zip(sums).for_each(|(mean, sum)| mix(mean, scale * sum / count));
        }
        Ok(())
    }
}

/// What multiplies the gradient of one parameter.
pub(super) struct PieceFactors<A> {
    pub shape: Matrices,
    rows: Vec<A>,
    columns: Vec<A>,
}

impl<A> PieceFactors<A> {
    pub fn lend(&self) -> Factors<'_, A> {
        Factors { rows: &self.rows, columns: &self.columns }
    }
}

/// What a step takes into the means.
struct New {
    beta2: f64,
    eps1: f64,
    grad_scale: f64,
}

/// The sums of one parameter: of this rank's part, then of the whole.
struct Sums {
    param: String,
    place: Place,
    rows: Vec<f64>,
    columns: Vec<f64>,
    /// Of the squares of the weights, and of the update.
    weights: [f64; 1],
    update: [f64; 1],
}

impl Sums {
    fn is_vector(&self) -> bool {
        self.place.dims().len() < 2
    }

    /// Those sums of squares that go on in other ranks' parts.
    fn squares(&mut self) -> Vec<&mut [f64]> {
        let n = self.place.dims().len();
        let cut = |dim: usize| !self.is_vector() && is_cut(&self.place, dim);
        let (columns_go_on, rows_go_on) = (cut(n.wrapping_sub(2)), cut(n.wrapping_sub(1)));
        let mut parts: Vec<&mut [f64]> = Vec::new();
        if (0..n).any(|dim| is_cut(&self.place, dim)) {
            parts.push(&mut self.weights);
        }
        if rows_go_on {
            parts.push(&mut self.rows);
        }
        if columns_go_on {
            parts.push(&mut self.columns);
        }
        parts
    }

    /// The same of the update's.
    fn updates(&mut self) -> Vec<&mut [f64]> {
        let cut = (0..self.place.dims().len()).any(|dim| is_cut(&self.place, dim));
        if cut { vec![&mut self.update] } else { Vec::new() }
    }
}

/// Updates the mean squares of all groups; for each piece of each group, the numbers of its step.
pub(super) fn prepare(
    config: &AdafactorConfig,
    (step, count): (&StepConfig, u64),
    groups: &[ParamGroup],
    states: &mut [State],
    sum: &mut SumParts,
) -> Result<Vec<Vec<Adafactor>>> {
    let mut all = Vec::new();
    for (group, state) in groups.iter().zip(&mut *states) {
        all.push(local_sums(group, state)?);
    }
    add_up(&mut all, Sums::squares, sum)?;

    let beta2 = 1.0 - (count as f64).powf(-config.decay_rate);
    let new = New { beta2, eps1: config.eps1, grad_scale: step.grad_scale };
    for ((group, state), sums) in groups.iter().zip(&mut *states).zip(&mut all) {
        let means = state.mean_squares.as_mut().expect("`new` made them");
        group.with_owned(|_, (gradients, range)| {
            let device = gradients.device();
            for_pieces(sums, range, |piece, sums, range| {
                dispatch_float!("adafactor", gradients.dtype(), G => {
                    let grads = &gradients.whole::<G>()?[range];
                    means.update(piece, sums, grads, &new)?;
                    let factors = means.factors::<<G as Element>::Acc>(piece, &sums.place)?;
                    let (shape, scale) = (&factors.shape, new.grad_scale);
                    sums.update[0] = update_sq_norm(device, shape, grads, scale, factors.lend())?;
                    Ok(())
                })
            })
        })?;
    }
    add_up(&mut all, Sums::updates, sum)?;

    let numbers = |sums: &Sums, decay| {
        let numel = sums.place.global_dims().iter().product::<usize>().max(1) as f64;
        let rms = |[sum]: [f64; 1]| (sum / numel).sqrt();
        let alpha = match config.relative_step {
            RelativeStep::Off => step.lr,
            RelativeStep::On => step.lr * rms(sums.weights).max(config.eps2),
        };
        let weight_decay = if decay == Decay::Yes { config.weight_decay } else { 0.0 };
        Adafactor {
            grad_scale: step.grad_scale,
            keep: 1.0 - alpha * weight_decay,
            step: alpha / (rms(sums.update) / config.clip_threshold).max(1.0),
            beta1: config.beta1,
        }
    };
    let of_group = |(group, sums): (&ParamGroup, &Vec<Sums>)| {
        sums.iter().map(|sums| numbers(sums, group.decay)).collect()
    };
    Ok(groups.iter().zip(&all).map(of_group).collect())
}

/// The sums of this rank's parts, for each piece of a group.
fn local_sums(group: &ParamGroup, state: &State) -> Result<Vec<Sums>> {
    let mut all: Vec<Sums> = state
        .pieces
        .iter()
        .map(|piece| {
            let shape = Matrices::of(piece.place.dims());
            Sums {
                param: piece.param.clone(),
                place: piece.place.clone(),
                rows: vec![0.0; shape.count * shape.rows],
                columns: vec![0.0; shape.count * shape.columns],
                weights: [0.0],
                update: [0.0],
            }
        })
        .collect();
    group.with_owned(|(weights, weight_range), (gradients, range)| {
        let (device, first) = (gradients.device(), range.start);
        // The exact weights.
        let (weights, weight_start) = match &state.master {
            Some(master) => (&master.flat, 0),
            None => (&*weights, weight_range.start),
        };
        for_pieces(&mut all, range, |_, sums, range| {
            let start = weight_start + range.start - first;
            let weight_range = start..start + range.len();
            sums.weights[0] = dispatch_float!("adafactor", weights.dtype(), T => {
                sq_norm(device, &weights.whole::<T>()?[weight_range])
            });
            if sums.is_vector() {
                return Ok(());
            }
            let shape = Matrices::of(sums.place.dims());
            dispatch_float!("adafactor", gradients.dtype(), G => {
                let grads = &gradients.whole::<G>()?[range];
                square_sums(device, &shape, grads, &mut sums.rows, &mut sums.columns)
            })
        })
    })?;
    Ok(all)
}

/// Calls `f` with every piece's number, sums and elements within `owned`.
fn for_pieces(
    sums: &mut [Sums],
    owned: Range<usize>,
    mut f: impl FnMut(usize, &mut Sums, Range<usize>) -> Result<()>,
) -> Result<()> {
    let mut start = owned.start;
    for (piece, sums) in sums.iter_mut().enumerate() {
        let end = start + sums.place.dims().iter().product::<usize>();
        f(piece, sums, start..end)?;
        start = end;
    }
    Ok(())
}

/// Adds up what `parts` picks, all in one call. Ordered by name: groups may differ between the ranks.
fn add_up(
    all: &mut [Vec<Sums>],
    parts: impl for<'a> Fn(&'a mut Sums) -> Vec<&'a mut [f64]>,
    sum: &mut SumParts,
) -> Result<()> {
    let mut sums: Vec<&mut Sums> = all.iter_mut().flatten().collect();
    sums.sort_by(|a, b| a.param.cmp(&b.param));
    let mut parts: Vec<&mut [f64]> = sums.into_iter().flat_map(parts).collect();
    if parts.is_empty() {
        return Ok(());
    }
    let mut message: Vec<f64> = parts.iter().flat_map(|part| part.iter().copied()).collect();
    sum(&mut message)?;
    let mut rest = message.as_slice();
    for part in &mut parts {
        let (own, others) = rest.split_at(part.len());
        part.copy_from_slice(own);
        rest = others;
    }
    Ok(())
}

/// Whether only some coordinates of a dim are held.
fn is_cut(place: &Place, dim: usize) -> bool {
    place.dims()[dim] < place.global_dims()[dim]
}

/// What a piece is when `dim` is summed over: the same on all ranks, if only that was cut.
fn summed_over(piece: &Piece, dim: usize) -> Piece {
    let place = piece.place.without(dim);
    let cut = (0..place.dims().len()).any(|dim| is_cut(&place, dim));
    let replicated = match cut {
        true => piece.replicated,
        false => piece.replicated.with(Axis::Tensor),
    };
    Piece { param: piece.param.clone(), place, replicated }
}

fn span<A: Scalar>(flat: &Flat, range: usize) -> Result<&[A]> {
    let (start, len) = flat.span(range);
    Ok(&flat.whole::<A>()?[start..start + len])
}

fn span_mut<A: Scalar>(flat: &mut Flat, range: usize) -> Result<&mut [A]> {
    let (start, len) = flat.span(range);
    Ok(&mut flat.whole_mut::<A>()?[start..start + len])
}
