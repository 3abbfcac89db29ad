//! Structs that are passed to kernels by value, in the layout that the kernel sources declare.

use bytemuck::{Pod, Zeroable};
use smallvec::SmallVec;

use crate::{Error, Result};

/// Maximum number of dims of a [`Layout`].
pub const MAX_RANK: usize = 8;
/// Maximum number of dims of a [`Place`].
pub const MAX_PLACE_RANK: usize = 6;
/// Maximum number of ranges per dim of a [`Place`].
pub const MAX_PIECES: usize = 4;

/// Dims, and strides in elements, of up to three operands.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Layout {
    rank: i32,
    dense: i32,
    dims: [u64; MAX_RANK],
    strides: [[i64; MAX_RANK]; 3],
}

impl Layout {
    /// Merges adjacent dims that are contiguously nested in every operand, and drops dims of size 1.
    ///
    /// Errors if there are more than three operands, or more than [`MAX_RANK`] dims after merging.
    ///
    /// ```
    /// use ferrotron_cuda::arguments::Layout;
    /// let joined = Layout::new(&[2, 3, 4], &[&[12, 4, 1], &[0, 4, 1]])?;
    /// assert_eq!(joined, Layout::new(&[2, 12], &[&[12, 1], &[0, 1]])?);
    /// # Ok::<(), ferrotron_cuda::Error>(())
    /// ```
    pub fn new(dims: &[usize], strides: &[&[isize]]) -> Result<Layout> {
        let mut joined: SmallVec<[(u64, SmallVec<[i64; 3]>); MAX_RANK]> = SmallVec::new();
        for (d, &size) in dims.iter().enumerate().filter(|(_, size)| **size != 1) {
            let own: SmallVec<[i64; 3]> = strides.iter().map(|strides| strides[d] as i64).collect();
            match joined.last_mut() {
                Some((outer, steps))
                    if steps.iter().zip(&own).all(|(step, own)| *step == own * size as i64) =>
                {
                    (*outer, *steps) = (*outer * size as u64, own);
                }
                _ => joined.push((size as u64, own)),
            }
        }
        let dense = match &joined[..] {
            [] => true,
            [(_, steps)] => steps.iter().all(|&step| step == 1),
            _ => false,
        };
        let mut layout =
            Layout { rank: joined.len() as i32, dense: i32::from(dense), ..Zeroable::zeroed() };
        if strides.len() > layout.strides.len() || joined.len() > MAX_RANK {
            let message = format!(
                "{} operands of dims {dims:?}: 3 of {MAX_RANK} dims at most",
                strides.len()
            );
            return Err(Error::new("layout", message));
        }
        for (d, (size, steps)) in joined.into_iter().enumerate() {
            layout.dims[d] = size;
            steps.into_iter().enumerate().for_each(|(k, step)| layout.strides[k][d] = step);
        }
        Ok(layout)
    }
}

/// A shard of a global tensor; the random numbers of elements depend on it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Place {
    rank: i64,
    dim: [PlaceDim; MAX_PLACE_RANK],
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
struct PlaceDim {
    size: u64,
    stride: u64,
    pieces: u64,
    offset: [u64; MAX_PIECES],
    length: [u64; MAX_PIECES],
}

impl Place {
    /// The global dims and, for each, the local (offset, length) ranges in local order.
    ///
    /// Errors if there are more than [`MAX_PLACE_RANK`] dims, or more than [`MAX_PIECES`] ranges per dim.
    pub fn new(global: &[usize], pieces: &[&[(usize, usize)]]) -> Result<Place> {
        if global.len() > MAX_PLACE_RANK || pieces.iter().any(|list| list.len() > MAX_PIECES) {
            let message = format!(
                "{pieces:?} of {global:?}: {MAX_PLACE_RANK} dims of {MAX_PIECES} pieces at most"
            );
            return Err(Error::new("place", message));
        }
        let mut place = Place { rank: global.len() as i64, ..Zeroable::zeroed() };
        let mut stride = 1;
        for (d, list) in pieces.iter().enumerate().rev() {
            let dim = &mut place.dim[d];
            (dim.stride, dim.pieces) = (stride, list.len() as u64);
            for (k, &(offset, length)) in list.iter().enumerate() {
                (dim.offset[k], dim.length[k]) = (offset as u64, length as u64);
                dim.size += length as u64;
            }
            stride *= global[d] as u64;
        }
        Ok(place)
    }
}

/// Optimizer step parameters, stored in device memory where kernels read them.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct Step {
    /// The training step, which is the counter of random numbers.
    pub number: u64,
    /// Number of this optimizer step, from 1.
    pub update: u64,
    /// Learning rate.
    pub lr: f64,
    /// Factor of the gradients: clip coefficient x inverse loss scale.
    pub grad_scale: f64,
    /// Not 0 if a gradient is not finite: the step is then skipped.
    pub found_inf: u64,
}

/// The loss scale and its history, stored in device memory where kernels read and adapt it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct LossScale {
    /// Factor of the loss.
    pub scale: f64,
    /// Steps without an overflow since the last overflow or change of scale.
    pub steady: u64,
    /// Overflows left until the scale is halved.
    pub patience: u64,
    /// Number of steps that were applied.
    pub updates: u64,
}

/// Parameters of the next step, whose number depends on how many steps the device has skipped.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct NextStep {
    /// The step if the device skips none of those before it.
    pub step: Step,
    /// The loss scale, if the host knows it.
    pub known: LossScale,
    /// Not 0: the host knows it.
    pub is_known: u64,
    /// Number of learning rates kept.
    pub rows: u64,
}

/// Parameters of the decision whether a step is applied.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct Outcome {
    /// Divisor of the summed loss.
    pub tokens: f64,
    /// Maximum gradient norm; 0 disables clipping.
    pub max_norm: f64,
    /// Not 0: a step whose gradients overflow is skipped, the loss scale is adapted, and training continues.
    pub skips: u64,
    /// Steps without an overflow after which the loss scale is doubled.
    pub window: u64,
    /// Overflows until the loss scale is halved.
    pub hysteresis: u64,
    /// Lower bound of the loss scale.
    pub minimum: f64,
    /// Number of outcomes kept.
    pub rows: u64,
}

/// Hyperparameters of an Adafactor step.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct Adafactor {
    /// Lower bound of the parameter scale for relative steps.
    pub eps2: f64,
    /// Upper bound of the RMS of an update.
    pub clip_threshold: f64,
    /// Decay of the running mean of updates.
    pub beta1: f64,
    /// Fraction of a weight that is subtracted per unit of step size.
    pub weight_decay: f64,
    /// Elements of the whole parameter.
    pub numel: u64,
}

/// Cross-entropy: ignored targets, label smoothing, and the vocabulary shard.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct CrossEntropy {
    /// Tokens with this target are not valid; neither are tokens with negative targets.
    pub ignore_index: i64,
    /// The first class of this shard.
    pub offset: i64,
    /// Classes of the whole vocabulary.
    pub global: i64,
    /// Probability that is distributed over all classes.
    pub smoothing: f64,
    /// The row of the whole call that is the first of this launch; positions of bad targets are relative to the whole
    /// call.
    pub first: i64,
}

/// Attention: sizes, and for each operand the strides of batch, position and head, in elements. Heads are dense and
/// aligned to 16 bytes, so strides and `width` are multiples of 8.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct Attention {
    /// Queries of a sequence, T.
    pub queries: i64,
    /// Keys of a sequence, S.
    pub keys: i64,
    /// Query heads, H.
    pub heads: i64,
    /// Key-value heads, G, a divisor of H.
    pub groups: i64,
    /// Elements of a head, at most the maximum of the kernel.
    pub width: i64,
    /// Not 0: query i sees keys j <= i + S - T.
    pub causal: i64,
    /// Not 0: query i sees keys j with |i + S - T - j| < window.
    pub window: i64,
    /// Address of the first key that each query of each batch row may see, and the one after the last, as u32; or 0.
    pub ranges: u64,
    /// Elements of a batch row of the ranges; 0 if all rows have the same.
    pub ranges_row: i64,
    /// Factor of the scores.
    pub scale: f64,
    /// Not 0: scores s become softcap tanh(s / softcap).
    pub softcap: f64,
    /// Address of the bias, added to the scores after that, in the accumulator type; or 0.
    pub bias: u64,
    /// Strides of the bias for batch, head and query; keys are dense.
    pub bias_step: [i64; 3],
    /// Strides of the queries.
    pub q: [i64; 3],
    /// Strides of the keys.
    pub k: [i64; 3],
    /// Strides of the values.
    pub v: [i64; 3],
    /// Strides of the result.
    pub out: [i64; 3],
    /// Strides of the result's gradient.
    pub dout: [i64; 3],
    /// Strides of the queries' gradient.
    pub dq: [i64; 3],
    /// Strides of the keys' gradient.
    pub dk: [i64; 3],
    /// Strides of the values' gradient.
    pub dv: [i64; 3],
}

/// The dtype of a kernel's indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum IndexType {
    /// Unsigned bytes
    U8,
    /// Unsigned 32 bits
    U32,
    /// Signed 64 bits
    I64,
}

/// The initial value of the position of the first bad index, which means that there is none.
pub const NO_BAD_INDEX: u64 = u64::MAX;
