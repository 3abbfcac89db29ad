//! Parts that both directions of attention share: operands, masks, dropout and the walk over tasks.

use super::config::{AttentionConfig, AttentionDropout, AttentionMask};
use super::operands::ScoreBias;
pub(super) use super::operands::Shape;
use super::ranges::KeyRanges;
use crate::gemm::small::{PAD, SmallGemm};
use crate::numeric::disjoint::Disjoint;
use crate::numeric::lanes::sum_lanes;
use crate::numeric::real::add;
use crate::numeric::simd::vectorized;
use crate::ops::random::last_dropped;
use crate::thread_team::Parts;
use crate::{Device, Element, RandomKey, Real, Result, Scalar, Tensor};

/// Queries and keys of a tile: with heads of 64 in f32, blocks of 16 and 32 KiB.
pub(super) const QUERIES: usize = 64;
pub(super) const KEYS: usize = 128;

/// Rows that share a limit where a tile straddles the diagonal, and whose sums are on their way together; divides [`PAD`].
pub(super) const GROUP: usize = 8;

/// An operand (B, T, H, D) whose last dim is dense.
#[derive(Clone, Copy)]
pub(super) struct HeadView<'a, T> {
    data: &'a [T],
    offset: usize,
    strides: [usize; 3],
}

impl<'a, T: Scalar> HeadView<'a, T> {
    pub(super) fn from_tensor(tensor: &'a Tensor) -> Result<Self> {
        let (layout, data) = (tensor.layout(), tensor.buffer_slice::<T>()?);
        let strides = std::array::from_fn(|d| layout.strides()[d]);
        Ok(HeadView { data, offset: layout.offset(), strides })
    }

    /// Row (b, t, h) and the distance to row (b, t + 1, h).
    pub(super) fn row(&self, b: usize, t: usize, h: usize) -> (*const T, usize) {
        let [batch, position, head] = self.strides;
        let start = self.offset + b * batch + t * position + h * head;
        (self.data.as_ptr().wrapping_add(start), position)
    }

    /// The memory from row (b, 0, h) on, and the distance between rows.
    pub(super) fn rows(&self, b: usize, h: usize) -> (&'a [T], usize) {
        let [batch, position, head] = self.strides;
        let start = self.offset + b * batch + h * head;
        (self.data.get(start..).unwrap_or_default(), position)
    }
}

/// The bias of the scores, as [`ScoreBias`] states it.
#[derive(Clone, Copy)]
pub(super) struct BiasView<'a, A> {
    data: &'a [A],
    first: usize,
    steps: [i64; 3],
    keys: usize,
}

impl<'a, A: Scalar> BiasView<'a, A> {
    fn new(bias: &'a ScoreBias, keys: usize) -> Result<Self> {
        let ScoreBias { numbers, first, steps } = bias;
        let first = numbers.layout().offset() + first;
        Ok(BiasView { data: numbers.buffer_slice::<A>()?, first, steps: *steps, keys })
    }

    /// The bias of a query for every key.
    fn row(&self, b: usize, h: usize, query: usize) -> &'a [A] {
        let [batch, head, position] = self.steps;
        let start = b as i64 * batch + h as i64 * head + query as i64 * position;
        &self.data[(self.first as i64 + start) as usize..][..self.keys]
    }
}

/// Takes the gradients of a finished block of keys: the first key, the number of keys, dk and dv.
pub(super) type StoreKeyGradients<'a, A> = dyn Fn(usize, usize, &[A], &[A]) + 'a;

/// A result (B, T, H, D), perhaps a run of the heads of a larger one.
#[derive(Clone, Copy)]
pub(super) struct Target<'a, T> {
    data: &'a Disjoint<'a, T>,
    offset: usize,
    positions: usize,
    stride: usize,
    width: usize,
}

impl<'a, T> Target<'a, T> {
    pub(super) fn dense(
        data: &'a Disjoint<'a, T>,
        positions: usize,
        heads: usize,
        width: usize,
    ) -> Self {
        Target { data, offset: 0, positions, stride: heads * width, width }
    }

    /// The heads from `head` on.
    pub(super) fn starting_at(self, head: usize) -> Self {
        Target { offset: self.offset + head * self.width, ..self }
    }

    /// Row (b, t, h) and the distance to row (b, t + 1, h). All rows up to the last position lie in the result.
    pub(super) fn row(&self, b: usize, t: usize, h: usize) -> (*mut T, usize) {
        let Some(later) = self.positions.checked_sub(t + 1) else {
            return (self.data.at(0, 0), self.stride); // no row is written
        };
        let row = (b * self.positions + t) * self.stride;
        let len = later * self.stride + self.width;
        (self.data.at(self.offset + row + h * self.width, len), self.stride)
    }
}

/// The operands of a call.
pub(super) struct AttentionOperands<'a, T: Element> {
    pub shape: Shape,
    pub q: HeadView<'a, T>,
    pub k: HeadView<'a, T>,
    pub v: HeadView<'a, T>,
    pub scale: T::Acc,
    pub mask: AttentionMask,
    pub window: Option<usize>,
    pub ranges: Option<&'a KeyRanges>,
    pub softcap: Option<T::Acc>,
    pub bias: Option<BiasView<'a, T::Acc>>,
    pub dropout: Option<&'a AttentionDropout>,
    pub blocks: SmallGemm<T>,
}

impl<'a, T: Element> AttentionOperands<'a, T> {
    /// The operands of a call, with the bias in Acc if it has one.
    pub(super) fn new(
        shape: Shape,
        [q, k, v]: [&'a Tensor; 3],
        config: &'a AttentionConfig,
        bias: Option<&'a ScoreBias>,
    ) -> Result<Self> {
        let dropout = config.dropout.as_ref().filter(|dropout| dropout.p > 0.0);
        let scale = Real::from_f64(config.scale);
        Ok(AttentionOperands {
            shape,
            q: HeadView::from_tensor(q)?,
            k: HeadView::from_tensor(k)?,
            v: HeadView::from_tensor(v)?,
            scale,
            mask: config.mask,
            // A wider window than all positions is none.
            window: config.window.filter(|&window| window < shape.queries + shape.keys),
            ranges: config.ranges.as_ref(),
            softcap: config.softcap.map(Real::from_f64),
            bias: bias.map(|bias| BiasView::new(bias, shape.keys)).transpose()?,
            dropout,
            blocks: SmallGemm::best(),
        })
    }

    /// Whether the kernels in tile registers, which know neither soft caps nor biases, compute this call.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    pub(super) fn fits_tiles(&self) -> bool {
        self.blocks.has_tiles() && self.softcap.is_none() && self.bias.is_none()
    }

    /// Adds the bias to the scores of `rows` queries, [`KEYS`] apart: `limit` keys from `key` on.
    pub(super) fn add_bias(
        &self,
        (b, h, query): (usize, usize, usize),
        rows: usize,
        (key, limit): (usize, usize),
        scores: &mut [T::Acc],
    ) {
        let Some(bias) = &self.bias else { return };
        for (r, scores) in scores.chunks_mut(KEYS).take(rows).enumerate() {
            add(&mut scores[..limit], &bias.row(b, h, query + r)[key..key + limit]);
        }
    }

    /// The first key that a query of batch row `b` sees, and the one after the last. Neither decreases with the query.
    pub(super) fn visible(&self, b: usize, query: usize) -> [usize; 2] {
        let Shape { queries, keys, .. } = self.shape;
        let (mut start, mut end) = match self.mask {
            AttentionMask::None => (0, keys),
            AttentionMask::Causal => (0, (query + 1 + keys).saturating_sub(queries).min(keys)),
        };
        if let Some(window) = self.window {
            start = (query + 1 + keys).saturating_sub(queries + window);
            end = end.min((query + keys + window).saturating_sub(queries));
        }
        if let Some(ranges) = self.ranges {
            let [first, last] = ranges.range(b, query).map(|key| key as usize);
            (start, end) = (start.max(first), end.min(last));
        }
        [start.min(end), end]
    }

    /// Whether a query may not see the first keys: only then does [`BlockLimits`] have starts.
    pub(super) fn has_starts(&self) -> bool {
        self.window.is_some() || self.ranges.is_some()
    }

    /// The visible keys of the block from `key` on, for each query of a tile.
    pub(super) fn limits(
        &self,
        (b, query): (usize, usize),
        rows: usize,
        key: usize,
        out: &mut BlockLimits,
    ) {
        for i in 0..rows {
            let [start, end] = self.visible(b, query + i);
            out.ends[i] = end.saturating_sub(key).min(KEYS);
            out.starts[i] = start.saturating_sub(key).min(out.ends[i]);
        }
    }

    /// The factors, 0 or 1 / (1 - p), of the keys from `key` on for one query.
    pub(super) fn dropout_factors(
        &self,
        dropout: &AttentionDropout,
        (b, h, query): (usize, usize, usize),
        key: usize,
        out: &mut [T::Acc],
    ) {
        let Shape { heads, queries, .. } = self.shape;
        let kept = Real::from_f64(1.0 / (1.0 - dropout.p));
        let last_dropped = last_dropped(dropout.p);
        let mut start = 0;
        for (first, len) in dropout.place.runs((b * heads + h) * queries + query) {
            let (from, to) = (key.max(start), (key + out.len()).min(start + len));
            if from < to {
                let out = &mut out[from - key..to - key];
                keep(dropout.key, first + (from - start) as u64, last_dropped, kept, out);
            }
            start += len;
        }
    }
}

vectorized! {
    /// out\[i\] = `kept` where the bits of element first + i are larger than `last_dropped`, else 0.
    fn keep<A: Real>(key: RandomKey, first: u64, last_dropped: u32, kept: A, out: &mut [A]) {
        let mut index = first;
        let mut rest = out;
        while !rest.is_empty() {
            // Blocks of four numbers, sixteen at a time so that the compiler can vectorise.
            let mut bits = [[0_u32; 4]; 16];
            for (i, block) in bits.iter_mut().enumerate() {
                *block = key.block((index >> 2) + i as u64);
            }
            let skip = (index & 3) as usize;
            let count = (64 - skip).min(rest.len());
            let (now, later) = rest.split_at_mut(count);
            for (x, &bits) in now.iter_mut().zip(&bits.as_flattened()[skip..]) {
                *x = if bits > last_dropped { kept } else { A::ZERO };
            }
            index += count as u64;
            rest = later;
        }
    }

    /// out\[i\] = the product of row i of `a` and `b`, each with the distance between its rows: sums of every
    /// [`PAD`]th column, added in pairs.
    pub(super) fn row_products<T: Element>(
        a: (&[T], usize),
        b: (&[T], usize),
        width: usize,
        out: &mut [T::Acc],
    ) {
        let ((a, a_row), (b, b_row)) = (a, b);
        // Sums of several rows are on their way at a time.
        for (group, out) in out.chunks_mut(GROUP).enumerate() {
            let mut sums = [[T::Acc::ZERO; PAD]; GROUP];
            for (r, lanes) in sums[..out.len()].iter_mut().enumerate() {
                let row = group * GROUP + r;
                let (a, b) = (&a[row * a_row..][..width], &b[row * b_row..][..width]);
                let (a, b) = (a.chunks_exact(PAD), b.chunks_exact(PAD));
                let rest = a.remainder().iter().zip(b.remainder());
                for (a, b) in a.zip(b) {
                    for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
                        *lane += a.acc() * b.acc();
                    }
                }
                for (lane, (a, b)) in lanes.iter_mut().zip(rest) {
                    *lane += a.acc() * b.acc();
                }
            }
            for (out, lanes) in out.iter_mut().zip(sums) {
                *out = sum_lanes(lanes);
            }
        }
    }

    /// s = cap tanh(s / cap) in rows of `width` elements, [`KEYS`] apart.
    pub(super) fn soft_cap<A: Real>(scores: &mut [A], rows: usize, width: usize, cap: A) {
        for row in scores.chunks_mut(KEYS).take(rows) {
            for s in &mut row[..width] {
                *s = cap * (*s / cap).tanh();
            }
        }
    }

    /// slope = 1 - (s / cap)^2 of capped scores s, in rows as those of [`soft_cap`].
    pub(super) fn soft_cap_slopes<A: Real>(scores: &[A], rows: usize, width: usize, cap: A, slopes: &mut [A]) {
        for (row, slopes) in scores.chunks(KEYS).zip(slopes.chunks_mut(KEYS)).take(rows) {
            for (slope, &s) in slopes[..width].iter_mut().zip(row) {
                *slope = A::ONE - (s / cap) * (s / cap);
            }
        }
    }

    /// x\[i\] *= factor\[i\].
    pub(super) fn multiply<A: Real>(x: &mut [A], factor: &[A]) {
        for (x, &factor) in x.iter_mut().zip(factor) {
            *x *= factor;
        }
    }
}

/// The visible keys of a block for each query of a tile, counted from the first key.
pub(super) struct BlockLimits {
    /// The first visible key of each query, at most its end: 0 without windows and ranges.
    pub starts: [usize; QUERIES],
    /// The end of its visible keys; ascending.
    pub ends: [usize; QUERIES],
}

impl BlockLimits {
    pub(super) const NOTHING: BlockLimits =
        BlockLimits { starts: [0; QUERIES], ends: [0; QUERIES] };

    /// Whether one of the first `rows` queries sees a key of the block.
    pub(super) fn any(&self, rows: usize) -> bool {
        (0..rows).any(|i| self.starts[i] < self.ends[i])
    }
}

/// Whether key number `key` of a block is among the `count` from `start` on: one comparison, so that loops over keys are
/// vectorised.
#[inline(always)]
pub(super) fn is_visible(key: usize, [start, count]: [u32; 2]) -> bool {
    (key as u32).wrapping_sub(start) < count
}

/// Calls `f(first row, rows, limit)` for runs of rows and the limit of the run's last. A run is all rows where their
/// limits agree, else a group of [`GROUP`].
#[inline(always)]
pub(super) fn by_limit(limits: &[usize], mut f: impl FnMut(usize, usize, usize)) {
    let (Some(&first), Some(&last)) = (limits.first(), limits.last()) else { return };
    if first == last {
        return f(0, limits.len(), last);
    }
    for (i, group) in limits.chunks(GROUP).enumerate() {
        f(i * GROUP, group.len(), group[group.len() - 1]);
    }
}

/// Rows of a workspace are padded to whole registers.
pub(super) fn padded(n: usize) -> usize {
    n.next_multiple_of(PAD)
}

/// Calls `f(task, workspace)` for every task; as many tasks run at a time as there are threads, each with `size` elements of
/// its own. A thread begins with a run of tasks of its own: of the same samples in every layer. Tasks must not depend on one
/// another, nor on what the workspace holds.
pub(super) fn for_each_task<A: Element>(
    device: &Device,
    tasks: usize,
    work: usize,
    size: usize,
    f: impl Fn(usize, &mut [A]) + Send + Sync,
) -> Result<()> {
    let slots = device.threads().min(tasks);
    let size = padded(size);
    let mut workspace = Tensor::empty(device, A::DTYPE, &[slots, size])?;
    let workspace = Disjoint::new(workspace.as_mut_slice::<A>()?);
    let parts = Parts::new(slots);
    device.for_each(slots, work, &|slot| {
        // SAFETY: each slot has its own run of the workspace.
        let workspace = unsafe { workspace.part(slot * size, size) };
        if cfg!(test) {
            // What a task reads without having written it shows.
            workspace.fill(A::from_acc(Real::from_f64(f64::NAN)));
        }
        while let Some(task) = parts.take(&(0..tasks), slot, |_| 1) {
            f(task.start, workspace);
        }
    });
    Ok(())
}

/// Takes the first `len` elements off a workspace.
pub(super) fn take<'a, A>(workspace: &mut &'a mut [A], len: usize) -> &'a mut [A] {
    let (taken, rest) = std::mem::take(workspace).split_at_mut(len);
    *workspace = rest;
    taken
}
