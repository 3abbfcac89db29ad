//! Backward: for each head, key blocks outside and query blocks inside. So dk and dv of a block stay in cache, while dq
//! gathers its parts in the order of the keys.

use super::tile::{
    AttentionOperands, BlockLimits, GROUP, HeadView, KEYS, QUERIES, Shape, StoreKeyGradients,
    Target, by_limit, for_each_task, is_visible, multiply, padded, row_products, soft_cap,
    soft_cap_slopes, take,
};
use crate::gemm::Accum;
use crate::gemm::small::PAD;
use crate::numeric::disjoint::Disjoint;
use crate::numeric::real::add;
use crate::numeric::simd::vectorized;
use crate::{Device, Element, Real, Result, Scalar, Tensor};
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use crate::{bf16, ops::attention::amx};
use bytemuck::fill_zeroes;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use std::any::Any;

/// Fills dq (B, T, H, D), dk and dv (B, S, G, D) from dout, out and lse.
pub(super) fn run<T: Element>(
    device: &Device,
    call: &AttentionOperands<'_, T>,
    outputs: (HeadView<'_, T>, HeadView<'_, T>, &[T::Acc]),
    [dq, dk, dv]: [Target<'_, T>; 3],
) -> Result<()> {
    let Shape { batch, keys, heads, groups, width, .. } = call.shape;
    if width == 0 {
        return Ok(());
    }
    let share = call.shape.share();
    // Where query heads share a key-value head, each leaves its part of dk and dv here.
    let dims = if share > 1 { [batch * heads, keys, 2 * width] } else { [0; 3] };
    let mut parts = Tensor::empty(device, T::Acc::DTYPE, &dims)?;
    let shared = Disjoint::new(parts.as_mut_slice::<T::Acc>()?);
    let (one_head, size) = method(call);
    for_each_task(device, batch * heads, call.shape.work(), size, |task, workspace| {
        let (b, head) = (task / heads, task % heads);
        let store = |key: usize, rows: usize, dk_block: &[T::Acc], dv_block: &[T::Acc]| {
            let size = (rows, width);
            let row = padded(width);
            let (dk_from, dv_from) = ((dk_block.as_ptr(), row), (dv_block.as_ptr(), row));
            // SAFETY: these keys of this head belong to this task alone.
            unsafe {
                if share == 1 {
                    call.blocks.round(dk_from, size, dk.row(b, key, head));
                    call.blocks.round(dv_from, size, dv.row(b, key, head));
                } else {
                    let to = shared.at((task * keys + key) * 2 * width, rows * 2 * width);
                    call.blocks.round(dk_from, size, (to, 2 * width));
                    call.blocks.round(dv_from, size, (to.add(width), 2 * width));
                }
            }
        };
        one_head(call, (b, head), outputs, workspace, dq, &store);
    })?;
    if share > 1 {
        let parts = parts.as_slice::<T::Acc>()?;
        device.for_each(batch * groups, parts.len(), &|task| {
            let (b, group) = (task / groups, task % groups);
            let mut sum = vec![T::Acc::ZERO; 2 * width];
            for key in 0..keys {
                sum.fill(T::Acc::ZERO);
                for head in group * share..(group + 1) * share {
                    let start = ((b * heads + head) * keys + key) * 2 * width;
                    add(&mut sum, &parts[start..start + 2 * width]);
                }
                let size = (1, width);
                // SAFETY: this key-value head belongs to this task alone.
                unsafe {
                    call.blocks.round((sum.as_ptr(), width), size, dk.row(b, key, group));
                    let dv_from = (sum[width..].as_ptr(), width);
                    call.blocks.round(dv_from, size, dv.row(b, key, group));
                }
            }
        });
    }
    Ok(())
}

/// A function that computes all gradients of one query head: `store(key, rows, dk, dv)` takes each finished block of keys.
type OneHead<T> = for<'a> fn(
    &AttentionOperands<'a, T>,
    (usize, usize),
    (HeadView<'a, T>, HeadView<'a, T>, &[<T as Element>::Acc]),
    &mut [<T as Element>::Acc],
    Target<'_, T>,
    &StoreKeyGradients<'_, <T as Element>::Acc>,
);

/// The function for these operands, and the elements of its workspace.
fn method<T: Element>(call: &AttentionOperands<'_, T>) -> (OneHead<T>, usize) {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    if call.fits_tiles() {
        let tiled: OneHead<bf16> = amx::one_head;
        if let Some(&tiled) = (&tiled as &dyn Any).downcast_ref::<OneHead<T>>() {
            return (tiled, amx::workspace_floats(call.shape, call.dropout.is_some()));
        }
    }
    let Shape { queries, keys, width, .. } = call.shape;
    let row = padded(width);
    let (query_rows, key_rows) = (queries.next_multiple_of(QUERIES), keys.next_multiple_of(KEYS));
    let size = call.blocks.steps(key_rows) * row
        + query_rows * (3 * row + 1)
        + KEYS * 2 * (call.blocks.steps(width) + row)
        + QUERIES * (3 + usize::from(call.softcap.is_some())) * KEYS
        + 2 * call.blocks.transposed_elements(QUERIES, KEYS);
    (one_head::<T>, size)
}

/// An [`OneHead`] on any processor.
fn one_head<T: Element>(
    call: &AttentionOperands<'_, T>,
    (b, head): (usize, usize),
    (dout, out, lse): (HeadView<'_, T>, HeadView<'_, T>, &[T::Acc]),
    workspace: &mut [T::Acc],
    dq: Target<'_, T>,
    store: &StoreKeyGradients<'_, T::Acc>,
) {
    let Shape { queries, keys, heads, width, .. } = call.shape;
    let one = T::Acc::ONE;
    let row = padded(width);
    let group = head / call.shape.share();
    let lse = &lse[(b * heads + head) * queries..][..queries];
    let (query_rows, key_rows) = (queries.next_multiple_of(QUERIES), keys.next_multiple_of(KEYS));
    let mut rest = workspace;
    let width_steps = call.blocks.steps(width);
    let k_turned = take(&mut rest, KEYS * width_steps);
    let v_turned = take(&mut rest, KEYS * width_steps);
    let k = take(&mut rest, call.blocks.steps(key_rows) * row);
    let q = take(&mut rest, query_rows * row);
    let g = take(&mut rest, query_rows * row);
    let dq_sums = take(&mut rest, query_rows * row);
    let dk = take(&mut rest, KEYS * row);
    let dv = take(&mut rest, KEYS * row);
    let p = take(&mut rest, QUERIES * KEYS);
    let ds = take(&mut rest, QUERIES * KEYS);
    let factors = take(&mut rest, QUERIES * KEYS);
    let slopes = take(&mut rest, if call.softcap.is_some() { QUERIES * KEYS } else { 0 });
    let delta = &mut take(&mut rest, query_rows)[..queries];
    let turned_elements = call.blocks.transposed_elements(QUERIES, KEYS);
    let p_turned = take(&mut rest, turned_elements);
    let ds_turned = take(&mut rest, turned_elements);
    let turned = |block: &mut [T::Acc], to: &mut [T::Acc]| {
        call.blocks.transposed((block.as_ptr(), KEYS), to.as_mut_ptr())
    };
    // SAFETY: the operands hold these rows, the workspace has room for whole blocks.
    let (q, g) = unsafe {
        let size = (queries, width);
        call.blocks.pack(call.k.row(b, 0, group), (keys, width), (k.as_mut_ptr(), row));
        (
            call.blocks.pack_both(call.q.row(b, 0, head), size, (q.as_mut_ptr(), row)),
            call.blocks.pack_both(dout.row(b, 0, head), size, (g.as_mut_ptr(), row)),
        )
    };
    row_products(dout.rows(b, head), out.rows(b, head), width, delta);
    fill_zeroes(&mut dq_sums[..queries * row]);
    let mut limits = BlockLimits::NOTHING;
    for key in (0..keys).step_by(KEYS) {
        let key_count = KEYS.min(keys - key);
        // SAFETY: as above.
        unsafe {
            let size = (key_count, width);
            let to = (k_turned.as_mut_ptr(), KEYS);
            call.blocks.pack_transposed(call.k.row(b, key, group), size, to);
            let to = (v_turned.as_mut_ptr(), KEYS);
            call.blocks.pack_transposed(call.v.row(b, key, group), size, to);
        }
        let k = &k[call.blocks.step_of(key) * row..];
        fill_zeroes(&mut dk[..key_count * row]);
        fill_zeroes(&mut dv[..key_count * row]);
        for first in (0..queries).step_by(QUERIES) {
            let rows = QUERIES.min(queries - first);
            call.limits((b, first), rows, key, &mut limits);
            if limits.ends[rows - 1] == 0 || call.has_starts() && !limits.any(rows) {
                continue;
            }
            let starts = if call.has_starts() { &limits.starts[..rows] } else { &[] };
            let limits = &limits.ends[..rows];
            by_limit(limits, |i, rows, limit| {
                let (p, ds) = (&mut p[i * KEYS..], &mut ds[i * KEYS..]);
                let size = (rows, limit, width_steps);
                // SAFETY: blocks of QUERIES or KEYS padded rows each.
                unsafe {
                    let lhs = q.left.at(first + i, 0);
                    let dst = (p.as_mut_ptr(), KEYS, Accum::Replace);
                    call.blocks.product(size, dst, call.scale, lhs, (k_turned.as_ptr(), KEYS));
                    let lhs = g.left.at(first + i, 0);
                    let dst = (ds.as_mut_ptr(), KEYS, Accum::Replace);
                    call.blocks.product(size, dst, one, lhs, (v_turned.as_ptr(), KEYS));
                }
                let visible = (starts.get(i..).unwrap_or_default(), &limits[i..i + rows]);
                let at = first + i..first + i + rows;
                let sums = (&lse[at.clone()], &delta[at]);
                let factors = &mut factors[i * KEYS..];
                let place = (b, head, first + i);
                let blocks = [&mut *p, &mut *ds, &mut *factors, &mut *slopes];
                score_gradients(call, place, (key, limit), visible, sums, blocks);
                if call.softcap.is_some() {
                    for r in 0..rows {
                        multiply(&mut ds[r * KEYS..][..limit], &slopes[r * KEYS..][..limit]);
                    }
                }
                if call.dropout.is_some() {
                    for r in 0..rows {
                        let factors = &factors[r * KEYS..][..limit];
                        multiply(&mut p[r * KEYS..][..limit], factors);
                    }
                }
                // SAFETY: as above; what is not visible up to the padded limit is zero.
                unsafe {
                    let seen = (rows, padded(limit));
                    call.blocks.operands((p.as_mut_ptr(), KEYS), seen);
                    let lhs = call.blocks.operands((ds.as_mut_ptr(), KEYS), seen);
                    let dst = (dq_sums[(first + i) * row..].as_mut_ptr(), row, Accum::Add);
                    let size = (rows, width, call.blocks.steps(limit));
                    call.blocks.product(size, dst, call.scale, lhs, (k.as_ptr(), row));
                    for (block, to) in [(p, &mut *p_turned), (ds, &mut *ds_turned)] {
                        let to = turned(block, to).at(0, call.blocks.step_of(i));
                        call.blocks.transpose((block.as_ptr(), KEYS), seen, to);
                    }
                }
            });
            let (p_turned, ds_turned) = (turned(p, p_turned), turned(ds, ds_turned));
            // dk and dv: rows are keys, the sum runs over the queries that see the group's first key.
            let step = if limits[0] >= key_count { KEYS } else { GROUP };
            for j in (0..key_count).step_by(step) {
                let from = limits.partition_point(|&limit| limit <= j);
                if from == rows {
                    break;
                }
                // A step that begins before `from` does so in the same group, with zeros for these keys.
                let from = call.blocks.step_of(from);
                let size = (step.min(key_count - j), width, call.blocks.steps(rows) - from);
                let at = call.blocks.step_of(first) + from;
                // SAFETY: as above; scores of queries from `from` on are set up to the group's end.
                unsafe {
                    let dst = (dv[j * row..].as_mut_ptr(), row, Accum::Add);
                    let rhs = (g.right.add(at * row), row);
                    call.blocks.product(size, dst, one, p_turned.at(j, from), rhs);
                    let dst = (dk[j * row..].as_mut_ptr(), row, Accum::Add);
                    let rhs = (q.right.add(at * row), row);
                    call.blocks.product(size, dst, call.scale, ds_turned.at(j, from), rhs);
                }
            }
        }
        store(key, key_count, dk, dv);
    }
    // SAFETY: the queries of this head belong to this task alone.
    unsafe {
        call.blocks.round((dq_sums.as_ptr(), row), (queries, width), dq.row(b, 0, head));
    }
}

/// Turns scores and dp, of queries from `place` on and `limit` keys from `key` on, into p without dropout and ds without
/// the slopes of a soft cap. Leaves the factors of dropout, and the slopes. Rows are [`KEYS`] apart.
pub(super) fn score_gradients<T: Element>(
    call: &AttentionOperands<'_, T>,
    (b, head, query): (usize, usize, usize),
    (key, limit): (usize, usize),
    visible: (&[usize], &[usize]),
    (lse, delta): (&[T::Acc], &[T::Acc]),
    [p, ds, factors, slopes]: [&mut [T::Acc]; 4],
) {
    let rows = lse.len();
    if let Some(cap) = call.softcap {
        soft_cap(p, rows, padded(limit), cap);
        soft_cap_slopes(p, rows, padded(limit), cap, slopes);
    }
    call.add_bias((b, head, query), rows, (key, limit), p);
    if let Some(dropout) = call.dropout {
        for r in 0..rows {
            let factors = &mut factors[r * KEYS..][..limit];
            call.dropout_factors(dropout, (b, head, query + r), key, factors);
            multiply(&mut ds[r * KEYS..][..limit], factors);
        }
    }
    softmax_gradient(p, ds, padded(limit), visible, lse, delta);
}

vectorized! {
    /// p = exp(score - lse) and ds = p (dp - delta) in place of score and dp. Both are 0 before the starts (if there
    /// are any), and from the ends to `width`.
    fn softmax_gradient<A: Real>(
        p: &mut [A],
        ds: &mut [A],
        width: usize,
        visible: (&[usize], &[usize]),
        lse: &[A],
        delta: &[A],
    ) {
        let (starts, ends) = visible;
        for (i, &end) in ends.iter().enumerate() {
            let p = &mut p[i * KEYS..i * KEYS + width];
            let ds = &mut ds[i * KEYS..i * KEYS + width];
            let (lse, delta) = (lse[i], delta[i]);
            let start = starts.get(i).copied().unwrap_or(0);
            // A query that sees nothing has no finite sum.
            let count = if lse == A::NEG_INFINITY { 0 } else { end - start };
            let seen = [start as u32, count as u32];
            for (c, (p, ds)) in p.chunks_exact_mut(PAD).zip(ds.chunks_exact_mut(PAD)).enumerate() {
                for (l, (p, ds)) in p.iter_mut().zip(ds).enumerate() {
                    let visible = is_visible(c * PAD + l, seen);
                    let probability = (*p - lse).exp_bounded();
                    let gradient = probability * (*ds - delta);
                    *p = if visible { probability } else { A::ZERO };
                    *ds = if visible { gradient } else { A::ZERO };
                }
            }
        }
    }
}
