//! Forward: for each block of queries, keys from first to last with a running maximum and sum.

use super::tile::{
    AttentionOperands, BlockLimits, GROUP, KEYS, QUERIES, Shape, Target, by_limit, for_each_task,
    is_visible, multiply, padded, soft_cap, take,
};
use crate::gemm::Accum;
use crate::gemm::small::PAD;
use crate::numeric::disjoint::Disjoint;
use crate::numeric::lanes::{max_lanes, sum_lanes};
use crate::numeric::simd::vectorized;
use crate::{Device, Element, Real, Result};
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use crate::{bf16, ops::attention::amx};
use bytemuck::fill_zeroes;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use std::any::Any;

/// The type of [`run`].
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
type Forward<T> = fn(
    &Device,
    &AttentionOperands<'_, T>,
    Target<'_, T>,
    Disjoint<'_, <T as Element>::Acc>,
) -> Result<()>;

/// Fills `out` (B, T, H, D) and `lse` (B, H, T).
pub(super) fn run<T: Element>(
    device: &Device,
    call: &AttentionOperands<'_, T>,
    out: Target<'_, T>,
    lse: Disjoint<'_, T::Acc>,
) -> Result<()> {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    if call.fits_tiles() && call.shape.width > 0 {
        let tiled: Forward<bf16> = amx::run;
        if let Some(tiled) = (&tiled as &dyn Any).downcast_ref::<Forward<T>>() {
            return tiled(device, call, out, lse);
        }
    }
    let Shape { batch, queries, keys, groups, width, .. } = call.shape;
    let share = call.shape.share();
    let (query_blocks, key_blocks) = (queries.div_ceil(QUERIES), keys.div_ceil(KEYS));
    // A task packs the keys and values of one key-value head for some of its query blocks: all of
    // them, unless that leaves threads idle.
    let units = share * query_blocks;
    let wanted = 4 * device.threads();
    let parts = wanted.div_ceil((batch * groups).max(1)).min(units).max(1);
    let row = padded(width);
    let (width_steps, key_steps) = (call.blocks.steps(width), call.blocks.steps(KEYS));
    let packed = key_blocks * (KEYS * width_steps + key_steps * row);
    let size = packed + QUERIES * (2 * row + 2 * KEYS + 2);
    for_each_task(device, batch * groups * parts, call.shape.work(), size, |task, workspace| {
        let (part, group) = (task % parts, task / parts % groups);
        let b = task / parts / groups;
        let mut rest = workspace;
        let k = take(&mut rest, key_blocks * KEYS * width_steps);
        let v = take(&mut rest, key_blocks * key_steps * row);
        for block in 0..key_blocks {
            let rows = KEYS.min(keys - block * KEYS);
            // SAFETY: the operands hold these rows, the workspace has room for whole blocks.
            unsafe {
                let to = k[block * KEYS * width_steps..].as_mut_ptr();
                let from = call.k.row(b, block * KEYS, group);
                call.blocks.pack_transposed(from, (rows, width), (to, KEYS));
                let to = v[block * key_steps * row..].as_mut_ptr();
                let from = call.v.row(b, block * KEYS, group);
                call.blocks.pack(from, (rows, width), (to, row));
            }
        }
        for unit in (part..units).step_by(parts) {
            let head = group * share + unit / query_blocks;
            let first = unit % query_blocks * QUERIES;
            let rows = QUERIES.min(queries - first);
            let start = (b * call.shape.heads + head) * queries + first;
            // SAFETY: each query of each head belongs to one unit.
            let lse = unsafe { lse.part(start, rows) };
            query_block(call, (b, head, first), k, v, rest, lse, out);
        }
    })
}

/// One block of queries of one head, against the packed keys and values.
fn query_block<T: Element>(
    call: &AttentionOperands<'_, T>,
    (b, head, first): (usize, usize, usize),
    k: &[T::Acc],
    v: &[T::Acc],
    workspace: &mut [T::Acc],
    lse: &mut [T::Acc],
    out: Target<'_, T>,
) {
    let one = T::Acc::ONE;
    let (width, rows) = (call.shape.width, lse.len());
    let row = padded(width);
    let mut rest = workspace;
    let q = take(&mut rest, QUERIES * row);
    let sums = take(&mut rest, QUERIES * row);
    let tile = take(&mut rest, QUERIES * KEYS);
    let factors = take(&mut rest, QUERIES * KEYS);
    let maxima = &mut take(&mut rest, QUERIES)[..rows];
    let totals = &mut take(&mut rest, QUERIES)[..rows];
    // SAFETY: the operand holds these rows, the block has room for them.
    let q = unsafe {
        call.blocks.pack_left(call.q.row(b, first, head), (rows, width), (q.as_mut_ptr(), row))
    };
    fill_zeroes(&mut sums[..rows * row]);
    maxima.fill(T::Acc::NEG_INFINITY);
    fill_zeroes(totals);
    let mut limits = BlockLimits::NOTHING;
    let [[start, _], [_, end]] = [first, first + rows - 1].map(|query| call.visible(b, query));
    for key in (start / KEYS * KEYS..end).step_by(KEYS) {
        call.limits((b, first), rows, key, &mut limits);
        if call.has_starts() && !limits.any(rows) {
            continue;
        }
        let starts = if call.has_starts() { &limits.starts[..rows] } else { &[] };
        let limits = &limits.ends[..rows];
        let k = &k[key * call.blocks.steps(width)..];
        let v = &v[call.blocks.step_of(key) * row..];
        by_limit(limits, |i, rows, limit| {
            let tile = &mut tile[i * KEYS..];
            // SAFETY: blocks of QUERIES or KEYS padded rows each.
            unsafe {
                let dst = (tile.as_mut_ptr(), KEYS, Accum::Replace);
                let size = (rows, limit, call.blocks.steps(width));
                call.blocks.product(size, dst, call.scale, q.at(i, 0), (k.as_ptr(), KEYS));
            }
            if let Some(cap) = call.softcap {
                soft_cap(tile, rows, padded(limit), cap);
            }
            call.add_bias((b, head, first + i), rows, (key, limit), tile);
            let sums = &mut sums[i * row..];
            let starts = starts.get(i..).unwrap_or_default();
            let (maxima, totals) = (&mut maxima[i..i + rows], &mut totals[i..i + rows]);
            let visible = (starts, &limits[i..i + rows]);
            online_softmax(tile, padded(limit), visible, maxima, totals, sums, row);
            if let Some(dropout) = call.dropout {
                for r in 0..rows {
                    let factors = &mut factors[..limit];
                    call.dropout_factors(dropout, (b, head, first + i + r), key, factors);
                    multiply(&mut tile[r * KEYS..][..limit], factors);
                }
            }
            // SAFETY: as above.
            unsafe {
                let dst = (sums.as_mut_ptr(), row, Accum::Add);
                let lhs = call.blocks.operands((tile.as_mut_ptr(), KEYS), (rows, limit));
                let size = (rows, width, call.blocks.steps(limit));
                call.blocks.product(size, dst, one, lhs, (v.as_ptr(), row));
            }
        });
    }
    normalise(sums, row, maxima, totals, lse);
    // SAFETY: these rows of the output belong to this block of queries alone.
    unsafe {
        call.blocks.round((sums.as_ptr(), row), (rows, width), out.row(b, first, head));
    }
}

vectorized! {
    /// Turns scores into exp(score - maximum so far), adds them to the totals and brings totals and sums to the new
    /// maximum. Scores before the starts (if there are any), and from the ends to `width`, a multiple of [`PAD`],
    /// become 0.
    fn online_softmax<A: Real>(
        tile: &mut [A],
        width: usize,
        visible: (&[usize], &[usize]),
        maxima: &mut [A],
        totals: &mut [A],
        sums: &mut [A],
        row: usize,
    ) {
        let (starts, ends) = visible;
        // Hidden scores are passed over in registers: stores of single elements would hold up the loads of vectors. Their
        // exponentials may be any number. Sums and maxima of several rows are on their way at a time.
        for first in (0..ends.len()).step_by(GROUP) {
            let rows = GROUP.min(ends.len() - first);
            let mut seen = [[0_u32; 2]; GROUP];
            for (r, seen) in seen[..rows].iter_mut().enumerate() {
                let i = first + r;
                let start = starts.get(i).copied().unwrap_or(0);
                *seen = [start as u32, (ends[i] - start) as u32];
            }
            let tile = &mut tile[first * KEYS..];
            let mut lanes = [[A::NEG_INFINITY; PAD]; GROUP];
            for (r, lanes) in lanes[..rows].iter_mut().enumerate() {
                for (c, chunk) in tile[r * KEYS..r * KEYS + width].chunks_exact(PAD).enumerate() {
                    for (l, (lane, &x)) in lanes.iter_mut().zip(chunk).enumerate() {
                        let visible = is_visible(c * PAD + l, seen[r]);
                        *lane = lane.max(if visible { x } else { A::NEG_INFINITY });
                    }
                }
            }
            let mut largest = [A::NEG_INFINITY; GROUP];
            for r in 0..rows {
                largest[r] = maxima[first + r].max(max_lanes(lanes[r]));
                if largest[r] == A::NEG_INFINITY {
                    seen[r] = [0; 2]; // nothing, or a bias of minus infinity hides every key so far
                }
            }
            let mut lanes = [[A::ZERO; PAD]; GROUP];
            for (r, lanes) in lanes[..rows].iter_mut().enumerate() {
                let (seen, largest) = (seen[r], largest[r]);
                for (c, chunk) in tile[r * KEYS..r * KEYS + width].chunks_exact_mut(PAD).enumerate() {
                    for (l, (lane, x)) in lanes.iter_mut().zip(chunk).enumerate() {
                        let exponential = (*x - largest).exp_bounded();
                        *x = if is_visible(c * PAD + l, seen) { exponential } else { A::ZERO };
                        *lane += *x;
                    }
                }
            }
            for r in 0..rows {
                let (i, sum) = (first + r, sum_lanes(lanes[r]));
                // As a rule the maximum is found early; multiplying by e^0 = 1 would change nothing.
                if largest[r] != maxima[i] && totals[i] != A::ZERO {
                    let shrink = (maxima[i] - largest[r]).exp_bounded();
                    totals[i] *= shrink;
                    for x in &mut sums[i * row..(i + 1) * row] {
                        *x *= shrink;
                    }
                }
                totals[i] += sum;
                maxima[i] = largest[r];
            }
        }
    }

    /// Divides the sums by their totals; a query that saw no key gets 0 and -infinity.
    fn normalise<A: Real>(sums: &mut [A], row: usize, maxima: &[A], totals: &[A], lse: &mut [A]) {
        for (i, lse) in lse.iter_mut().enumerate() {
            let seen = totals[i] != A::ZERO;
            *lse = if seen { maxima[i] + totals[i].ln() } else { A::NEG_INFINITY };
            let factor = if seen { A::ONE / totals[i] } else { A::ZERO };
            for x in &mut sums[i * row..(i + 1) * row] {
                *x *= factor;
            }
        }
    }
}
