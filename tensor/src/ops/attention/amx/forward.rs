//! Forward: for each panel of queries, panels of keys from first to last with a running maximum and sum.

use super::panels::{KEY_PANELS, Sizes, pack_across, pack_along};
use super::softmax::SoftmaxPanel;
use super::vectors::{RIGHT, SIDE, row_of};
use crate::gemm::tiles::{LANES, STEP_FLOATS, SUMS_FLOATS, TileRegisters, Tiles};
use crate::numeric::disjoint::Disjoint;
use crate::ops::attention::tile::{AttentionOperands, Shape, Target, for_each_task, padded, take};
use crate::{Device, Real, Result, bf16};
use std::f32::consts::{LN_2, LOG2_E};

/// Keys of [`KEY_PANELS`] panels.
const KEYS: usize = KEY_PANELS * LANES;

/// Fills `out` (B, T, H, D) and `lse` (B, H, T).
pub(in crate::ops::attention) fn run(
    device: &Device,
    call: &AttentionOperands<'_, bf16>,
    out: Target<'_, bf16>,
    lse: Disjoint<'_, f32>,
) -> Result<()> {
    let Shape { batch, queries, keys, heads, groups, width } = call.shape;
    let share = call.shape.share();
    let sizes = Sizes::new(call.shape);
    // A task packs the keys and values of one key-value head for some of its panels of queries: all of them, unless
    // that leaves threads idle.
    let units = share * sizes.queries;
    let wanted = 4 * device.threads();
    let parts = wanted.div_ceil((batch * groups).max(1)).min(units).max(1);
    let factors = if call.dropout.is_some() { LANES * KEYS } else { 0 };
    let unit = (sizes.width + KEY_PANELS) * (STEP_FLOATS + SUMS_FLOATS) + 2 * LANES + factors;
    let size = 2 * sizes.packed_keys() + unit + LANES * padded(width);
    for_each_task(device, batch * groups * parts, call.shape.work(), size, |task, workspace| {
        let (part, group) = (task % parts, task / parts % groups);
        let b = task / parts / groups;
        let mut rest = workspace;
        let k = take(&mut rest, sizes.packed_keys());
        let v = take(&mut rest, sizes.packed_keys());
        // SAFETY: the operands hold these rows; the process may use AMX, or it is emulated.
        let registers = unsafe {
            pack_along(Tiles::Columns, call.k.row(b, 0, group), [keys, width], k);
            pack_across(Tiles::Columns, call.v.row(b, 0, group), [keys, width], v);
            TileRegisters::configure()
        };
        for unit in (part..units).step_by(parts) {
            let head = group * share + unit / sizes.queries;
            let first = unit % sizes.queries * LANES;
            let rows = LANES.min(queries - first);
            let start = (b * heads + head) * queries + first;
            // SAFETY: each query of each head belongs to one unit.
            let lse = unsafe { lse.part(start, rows) };
            let panel = QueryPanel { call, sizes: &sizes, registers: &registers, k, v };
            panel.run((b, head, first), rest, lse, out);
        }
    })
}

/// Operands that the panels of queries of one key-value head share.
struct QueryPanel<'a> {
    call: &'a AttentionOperands<'a, bf16>,
    sizes: &'a Sizes,
    registers: &'a TileRegisters,
    k: &'a [f32],
    v: &'a [f32],
}

impl QueryPanel<'_> {
    /// One panel of queries of one head.
    fn run(
        &self,
        (b, head, first): (usize, usize, usize),
        workspace: &mut [f32],
        lse: &mut [f32],
        out: Target<'_, bf16>,
    ) {
        let &QueryPanel { call, sizes, registers, k, v } = self;
        let (width, rows) = (call.shape.width, lse.len());
        let steps = sizes.width;
        let mut rest = workspace;
        let q = take(&mut rest, steps * STEP_FLOATS);
        let sums = take(&mut rest, steps * SUMS_FLOATS);
        let scores = take(&mut rest, KEY_PANELS * SUMS_FLOATS);
        let probabilities = take(&mut rest, KEY_PANELS * STEP_FLOATS);
        let maxima = take(&mut rest, LANES);
        let totals = take(&mut rest, LANES);
        let factors = take(&mut rest, if call.dropout.is_some() { LANES * KEYS } else { 0 });
        // SAFETY: the operand holds these rows.
        unsafe { pack_along(Tiles::Rows, call.q.row(b, first, head), [rows, width], q) };
        sums.fill(0.0);
        maxima.fill(f32::NEG_INFINITY);
        totals.fill(0.0);
        let [[unseen, all_end], [all_start, seen]] =
            [first, first + rows - 1].map(|i| call.visible(b, i));
        for key in (unseen / KEYS * KEYS..seen).step_by(KEYS) {
            let panels = (seen - key).div_ceil(LANES).min(KEY_PANELS);
            for panel in 0..panels {
                let k = &k[(key / LANES + panel) * steps * STEP_FLOATS..];
                let sums = &mut scores[panel * SUMS_FLOATS..];
                // SAFETY: panels of so many steps have been packed.
                unsafe {
                    registers.product(q.as_ptr(), k.as_ptr(), steps, sums.as_mut_ptr(), false);
                }
            }
            if let Some(dropout) = call.dropout {
                factors.fill(0.0);
                for (i, factors) in factors.chunks_exact_mut(KEYS).enumerate().take(rows) {
                    let factors = &mut factors[..KEYS.min(call.shape.keys - key)];
                    call.dropout_factors(dropout, (b, head, first + i), key, factors);
                }
            }
            // Of long sequences, all queries see all keys in most panels.
            let is_all_seen = rows == LANES && all_start <= key && key + panels * LANES <= all_end;
            let limits = (!is_all_seen).then(|| call.panel_limits((b, first), key));
            let mut softmax = SoftmaxPanel {
                scores,
                scale: call.scale * LOG2_E,
                visible: limits.as_ref(),
                factors: call.dropout.map(|_| &*factors),
                maxima,
                totals,
                sums,
                probabilities,
            };
            // SAFETY: the processor has AVX512-BF16, or these tiles are not chosen.
            unsafe { softmax.run(panels) };
            for (column, sums) in sums.chunks_exact_mut(SUMS_FLOATS).enumerate() {
                let v = &v[(column * sizes.keys + key / LANES) * STEP_FLOATS..];
                let (p, sums) = (probabilities.as_ptr(), sums.as_mut_ptr());
                // SAFETY: as above.
                unsafe { registers.product(p, v.as_ptr(), panels, sums, true) };
            }
        }
        let row = padded(width);
        let result = take(&mut rest, LANES * row);
        for (i, lse) in lse.iter_mut().enumerate() {
            let is_seen = totals[i] != 0.0;
            *lse = match is_seen {
                true => Real::ln(totals[i]) + maxima[i] * LN_2,
                false => f32::NEG_INFINITY,
            };
            let factor = if is_seen { 1.0 / totals[i] } else { 0.0 };
            let result = &mut result[i * row..][..row];
            for (c, result) in result.chunks_exact_mut(SIDE).enumerate() {
                let at = c / 2 * SUMS_FLOATS + c % 2 * RIGHT + row_of(i);
                for (result, sum) in result.iter_mut().zip(&sums[at..at + SIDE]) {
                    *result = sum * factor;
                }
            }
        }
        // SAFETY: these queries of this head belong to this unit alone.
        unsafe {
            call.blocks.round((result.as_ptr(), row), (rows, width), out.row(b, first, head))
        };
    }
}
