//! The gradient of the bias: ds of every query and key, of the samples that share it in order.

use super::backward::score_gradients;
use super::tile::{
    AttentionOperands, BlockLimits, HeadView, KEYS, QUERIES, Shape, by_limit, for_each_task,
    padded, row_products, take,
};
use crate::gemm::Accum;
use crate::numeric::disjoint::Disjoint;
use crate::numeric::real::add;
use crate::{Device, Element, Real, Result};

/// Adds ds to `to` (`samples`, H, T, S), where `samples` is B, or 1 for the sum over the batch.
pub(super) fn run<T: Element>(
    device: &Device,
    call: &AttentionOperands<'_, T>,
    outputs: (HeadView<'_, T>, HeadView<'_, T>, &[T::Acc]),
    samples: usize,
    to: &Disjoint<'_, T::Acc>,
) -> Result<()> {
    let Shape { batch, queries, keys, heads, width, .. } = call.shape;
    if width == 0 {
        return Ok(());
    }
    let query_blocks = queries.div_ceil(QUERIES);
    let row = padded(width);
    let slopes = usize::from(call.softcap.is_some());
    let size = QUERIES * (2 * row + (3 + slopes) * KEYS + 1) + 2 * KEYS * call.blocks.steps(width);
    let tasks = samples * heads * query_blocks;
    for_each_task(device, tasks, call.shape.work(), size, |task, workspace| {
        let (first, head) = (task % query_blocks * QUERIES, task / query_blocks % heads);
        let sample = task / query_blocks / heads;
        let rows = QUERIES.min(queries - first);
        let start = ((sample * heads + head) * queries + first) * keys;
        // SAFETY: the scores of these queries belong to this task alone.
        let sums = unsafe { to.part(start, rows * keys) };
        let own = if samples == batch { sample..sample + 1 } else { 0..batch };
        for b in own {
            query_block(call, (b, head, first), outputs, workspace, sums);
        }
    })
}

/// Adds ds of a block of queries of one sample and head to `sums`, which has a row of S for each.
fn query_block<T: Element>(
    call: &AttentionOperands<'_, T>,
    (b, head, first): (usize, usize, usize),
    (dout, out, lse): (HeadView<'_, T>, HeadView<'_, T>, &[T::Acc]),
    workspace: &mut [T::Acc],
    sums: &mut [T::Acc],
) {
    let Shape { queries, keys, heads, width, .. } = call.shape;
    let (row, rows) = (padded(width), QUERIES.min(queries - first));
    let (steps, group) = (call.blocks.steps(width), head / call.shape.share());
    let mut rest = workspace;
    let q = take(&mut rest, QUERIES * row);
    let g = take(&mut rest, QUERIES * row);
    let k = take(&mut rest, KEYS * steps);
    let v = take(&mut rest, KEYS * steps);
    let p = take(&mut rest, QUERIES * KEYS);
    let ds = take(&mut rest, QUERIES * KEYS);
    let factors = take(&mut rest, QUERIES * KEYS);
    let slopes = take(&mut rest, if call.softcap.is_some() { QUERIES * KEYS } else { 0 });
    let delta = &mut take(&mut rest, QUERIES)[..rows];
    let lse = &lse[(b * heads + head) * queries + first..][..rows];
    let size = (rows, width);
    // SAFETY: the operands hold these rows, the workspace has room for whole blocks.
    let (q, g) = unsafe {
        (
            call.blocks.pack_left(call.q.row(b, first, head), size, (q.as_mut_ptr(), row)),
            call.blocks.pack_left(dout.row(b, first, head), size, (g.as_mut_ptr(), row)),
        )
    };
    let ((dout, dout_row), (out, out_row)) = (dout.rows(b, head), out.rows(b, head));
    let (dout, out) = (&dout[first * dout_row..], &out[first * out_row..]);
    row_products((dout, dout_row), (out, out_row), width, delta);
    let mut limits = BlockLimits::NOTHING;
    for key in (0..keys).step_by(KEYS) {
        call.limits((b, first), rows, key, &mut limits);
        if !limits.any(rows) {
            continue;
        }
        let key_count = KEYS.min(keys - key);
        // SAFETY: as above.
        unsafe {
            let size = (key_count, width);
            call.blocks.pack_transposed(call.k.row(b, key, group), size, (k.as_mut_ptr(), KEYS));
            call.blocks.pack_transposed(call.v.row(b, key, group), size, (v.as_mut_ptr(), KEYS));
        }
        let starts = if call.has_starts() { &limits.starts[..rows] } else { &[] };
        let limits = &limits.ends[..rows];
        by_limit(limits, |i, rows, limit| {
            let (p, ds) = (&mut p[i * KEYS..], &mut ds[i * KEYS..]);
            let size = (rows, limit, steps);
            // SAFETY: blocks of QUERIES or KEYS padded rows each.
            unsafe {
                let dst = (p.as_mut_ptr(), KEYS, Accum::Replace);
                call.blocks.product(size, dst, call.scale, q.at(i, 0), (k.as_ptr(), KEYS));
                let dst = (ds.as_mut_ptr(), KEYS, Accum::Replace);
                call.blocks.product(size, dst, T::Acc::ONE, g.at(i, 0), (v.as_ptr(), KEYS));
            }
            let visible = (starts.get(i..).unwrap_or_default(), &limits[i..i + rows]);
            let statistics = (&lse[i..i + rows], &delta[i..i + rows]);
            let place = (b, head, first + i);
            let blocks = [p, &mut *ds, &mut *factors, &mut *slopes];
            score_gradients(call, place, (key, limit), visible, statistics, blocks);
            for r in 0..rows {
                let to = &mut sums[(i + r) * keys + key..][..limit];
                add(to, &ds[r * KEYS..][..limit]);
            }
        });
    }
}
