//! Backward of one query head. Scores are formed transposed, with keys in rows. So probabilities are the rows of dv,
//! and their gradients those of dk and the columns of dq^T in pairs of keys.
//!
//! Chunks of keys outside, chunks of queries inside: dk and dv of a chunk stay in L2, dq gathers its parts in the order
//! of the keys.

use super::panels::{Sizes, pack_across, pack_along};
use super::vectors::{GradientPanel, RIGHT, SIDE, row_of, transpose};
use crate::bf16;
use crate::gemm::tiles::{LANES, STEP_FLOATS, SUMS_FLOATS, TileRegisters, Tiles};
use crate::ops::attention::tile::{
    AttentionOperands, HeadView, Shape, StoreKeyGradients, Target, padded, row_products, take,
};
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// Panels of queries, at most, and of keys, that are visited together. The queries' operands and dq, which long sequences
/// have in L3, are read once for each chunk of keys.
const QUERY_CHUNK: usize = 8;
const KEY_CHUNK: usize = 16;

/// Panels of keys of the largest chunk.
fn key_chunk(sizes: &Sizes) -> usize {
    sizes.keys.min(KEY_CHUNK)
}

/// Floats of workspace that [`one_head`] needs.
pub(in crate::ops::attention) fn workspace_floats(shape: Shape, has_dropout: bool) -> usize {
    let sizes = Sizes::new(shape);
    let key_chunk = key_chunk(&sizes);
    let factors =
        if has_dropout { key_chunk * (QUERY_CHUNK * SUMS_FLOATS + LANES * LANES) } else { 0 };
    3 * sizes.packed_keys()
        + 4 * sizes.packed_queries()
        + sizes.queries * (sizes.width * SUMS_FLOATS + 2 * LANES)
        + (2 * key_chunk * sizes.width + 2) * SUMS_FLOATS
        + QUERY_CHUNK * (2 + key_chunk) * STEP_FLOATS
        + factors
        + 2 * LANES * padded(shape.width)
}

/// Operands of one head as panels, for products along the width and across it.
struct Packed<'a> {
    k: &'a mut [f32],
    v: &'a mut [f32],
    k_across: &'a mut [f32],
    q: &'a mut [f32],
    dout: &'a mut [f32],
    q_across: &'a mut [f32],
    dout_across: &'a mut [f32],
}

/// The gradients of one head, as sums.
struct Sums<'a> {
    /// dq^T by panel of queries, then of the width, with columns in the order of [`GradientPanel::query`].
    dq: &'a mut [f32],
    /// dk by panel of keys of a chunk, then of the width.
    dk: &'a mut [f32],
    dv: &'a mut [f32],
}

/// All gradients of one query head; `store(key, rows, dk, dv)` takes each finished block of keys.
pub(in crate::ops::attention) fn one_head(
    call: &AttentionOperands<'_, bf16>,
    (b, head): (usize, usize),
    (dout, out, lse): (HeadView<'_, bf16>, HeadView<'_, bf16>, &[f32]),
    workspace: &mut [f32],
    dq: Target<'_, bf16>,
    store: &StoreKeyGradients<'_, f32>,
) {
    let Shape { queries, keys, heads, width, .. } = call.shape;
    let sizes = Sizes::new(call.shape);
    let group = head / call.shape.share();
    let mut rest = workspace;
    let (of_keys, of_queries) = (sizes.packed_keys(), sizes.packed_queries());
    let packed = Packed {
        k: take(&mut rest, of_keys),
        v: take(&mut rest, of_keys),
        k_across: take(&mut rest, of_keys),
        q: take(&mut rest, of_queries),
        dout: take(&mut rest, of_queries),
        q_across: take(&mut rest, of_queries),
        dout_across: take(&mut rest, of_queries),
    };
    let key_chunk = key_chunk(&sizes);
    let mut sums = Sums {
        dq: take(&mut rest, sizes.queries * sizes.width * SUMS_FLOATS),
        dk: take(&mut rest, key_chunk * sizes.width * SUMS_FLOATS),
        dv: take(&mut rest, key_chunk * sizes.width * SUMS_FLOATS),
    };
    let delta = take(&mut rest, sizes.queries * LANES);
    let base = take(&mut rest, sizes.queries * LANES);
    let (q_rows, k_rows) = (call.q.row(b, 0, head), call.k.row(b, 0, group));
    let (dout_rows, v_rows) = (dout.row(b, 0, head), call.v.row(b, 0, group));
    // SAFETY: the operands hold these rows; the process may use AMX, or it is emulated.
    let registers = unsafe {
        pack_along(Tiles::Rows, k_rows, [keys, width], packed.k);
        pack_along(Tiles::Rows, v_rows, [keys, width], packed.v);
        pack_across(Tiles::Rows, k_rows, [keys, width], packed.k_across);
        pack_along(Tiles::Columns, q_rows, [queries, width], packed.q);
        pack_along(Tiles::Columns, dout_rows, [queries, width], packed.dout);
        pack_across(Tiles::Columns, q_rows, [queries, width], packed.q_across);
        pack_across(Tiles::Columns, dout_rows, [queries, width], packed.dout_across);
        TileRegisters::configure()
    };
    delta.fill(0.0);
    row_products(dout.rows(b, head), out.rows(b, head), width, &mut delta[..queries]);
    // The exponential of minus infinity is 0: padding changes nothing.
    base.fill(f32::INFINITY);
    for (base, lse) in base.iter_mut().zip(&lse[(b * heads + head) * queries..][..queries]) {
        // So is it for a query that sees nothing.
        *base = if *lse == f32::NEG_INFINITY { f32::INFINITY } else { lse * LOG2_E };
    }
    sums.dq.fill(0.0);
    let (scratch, rows) = rest.split_at_mut(rest.len() - 2 * LANES * padded(width));
    let panels =
        HeadPanels { call, head: (b, head), sizes: &sizes, registers: &registers, delta, base };
    for key_panel in (0..sizes.keys).step_by(KEY_CHUNK) {
        sums.dk.fill(0.0);
        sums.dv.fill(0.0);
        for query_panel in (0..sizes.queries).step_by(QUERY_CHUNK) {
            panels.run(&packed, &mut sums, (key_panel, query_panel), scratch);
        }
        let row = padded(width);
        for panel in key_panel..sizes.keys.min(key_panel + KEY_CHUNK) {
            let (dk, dv) = rows.split_at_mut(LANES * row);
            let at = (panel - key_panel) * sizes.width * SUMS_FLOATS;
            lay_out(&sums.dk[at..], call.scale, dk, row);
            lay_out(&sums.dv[at..], 1.0, dv, row);
            let key = panel * LANES;
            store(key, LANES.min(keys - key), dk, dv);
        }
    }
    let row = padded(width);
    for query in (0..queries).step_by(LANES) {
        let sums = &sums.dq[query / LANES * sizes.width * SUMS_FLOATS..];
        for c in 0..row / SIDE {
            for side in 0..2 {
                let from = &sums[c / 2 * SUMS_FLOATS + c % 2 * 2 * RIGHT + side * RIGHT..][..RIGHT];
                let to = (rows[c * SIDE..].as_mut_ptr(), row);
                let place = |j| GradientPanel::query(side * SIDE + j);
                // SAFETY: the places are 32 rows, and each has 16 floats from there on.
                unsafe { transpose(from.as_ptr(), to, call.scale, place) };
            }
        }
        let size = (LANES.min(queries - query), width);
        // SAFETY: the queries of this head belong to this task alone.
        unsafe { call.blocks.round((rows.as_ptr(), row), size, dq.row(b, query, head)) };
    }
}

/// Sums of 32 rows times `scale`, as rows `row` apart.
fn lay_out(sums: &[f32], scale: f32, to: &mut [f32], row: usize) {
    for (i, to) in to.chunks_exact_mut(row).enumerate() {
        for (c, to) in to.chunks_exact_mut(SIDE).enumerate() {
            let at = c / 2 * SUMS_FLOATS + c % 2 * RIGHT + row_of(i);
            for (to, sum) in to.iter_mut().zip(&sums[at..at + SIDE]) {
                *to = sum * scale;
            }
        }
    }
}

/// Operands that the panels of one head share.
struct HeadPanels<'a> {
    call: &'a AttentionOperands<'a, bf16>,
    head: (usize, usize),
    sizes: &'a Sizes,
    registers: &'a TileRegisters,
    delta: &'a [f32],
    /// lse in powers of two.
    base: &'a [f32],
}

impl HeadPanels<'_> {
    /// The last query of a panel.
    fn last(&self, panel: usize) -> usize {
        ((panel + 1) * LANES).min(self.call.shape.queries) - 1
    }

    /// Adds what a chunk of keys and one of queries contribute.
    fn run(
        &self,
        packed: &Packed<'_>,
        sums: &mut Sums<'_>,
        (key_panel, query_panel): (usize, usize),
        scratch: &mut [f32],
    ) {
        let &HeadPanels { call, sizes, registers, .. } = self;
        let steps = sizes.width;
        let key_panels = KEY_CHUNK.min(sizes.keys - key_panel);
        let query_panels = QUERY_CHUNK.min(sizes.queries - query_panel);
        let b = self.head.0;
        // The end of the panels of keys, of these, that a panel of queries sees, and their beginning.
        let seen = |i: usize| {
            let [_, end] = call.visible(b, self.last(query_panel + i));
            end.div_ceil(LANES).saturating_sub(key_panel).min(key_panels)
        };
        let unseen = |i: usize| match call.has_starts() {
            true => {
                let [start, _] = call.visible(b, (query_panel + i) * LANES);
                (start / LANES).saturating_sub(key_panel)
            }
            false => 0,
        };
        if (0..query_panels).all(|i| seen(i) <= unseen(i)) {
            return;
        }
        let mut rest = scratch;
        let scores = take(&mut rest, SUMS_FLOATS);
        let dprobabilities = take(&mut rest, SUMS_FLOATS);
        let p = take(&mut rest, QUERY_CHUNK * STEP_FLOATS);
        let ds = take(&mut rest, QUERY_CHUNK * STEP_FLOATS);
        let ds_across = take(&mut rest, query_panels * key_panels * STEP_FLOATS);
        let factors = call.dropout.is_some().then(|| {
            let seen = |i: usize| unseen(i)..seen(i);
            self.factors((key_panel, query_panel), seen, rest)
        });
        for j in 0..key_panels {
            let first = (0..query_panels).find(|&i| seen(i) > j);
            let Some(first) = first else { break };
            let end = (first..query_panels).find(|&i| unseen(i) > j).unwrap_or(query_panels);
            if first == end {
                continue;
            }
            let key = (key_panel + j) * LANES;
            for i in first..end {
                let query = (query_panel + i) * LANES;
                let at_key = (key_panel + j) * steps * STEP_FLOATS;
                let at_query = (query_panel + i) * steps * STEP_FLOATS;
                // SAFETY: panels of so many steps have been packed.
                unsafe {
                    let (k, q) = (packed.k[at_key..].as_ptr(), packed.q[at_query..].as_ptr());
                    registers.product(k, q, steps, scores.as_mut_ptr(), false);
                    let (v, g) = (packed.v[at_key..].as_ptr(), packed.dout[at_query..].as_ptr());
                    registers.product(v, g, steps, dprobabilities.as_mut_ptr(), false);
                }
                let limits;
                let mut visible = None;
                let [[_, end], [start, _]] =
                    [query, self.last(query_panel + i)].map(|query| call.visible(b, query));
                if factors.is_some() || end < key + LANES || start > key {
                    limits = call.panel_limits((b, query), key);
                    visible = Some(&limits);
                }
                let mut gradient = GradientPanel {
                    scores,
                    dprobabilities,
                    scale: call.scale * LOG2_E,
                    lse: &self.base[query..],
                    delta: &self.delta[query..],
                    visible,
                    factors: factors
                        .as_ref()
                        .map(|all| &all[(j * QUERY_CHUNK + i) * SUMS_FLOATS..]),
                    probabilities: &mut p[i * STEP_FLOATS..],
                    dscores: &mut ds[i * STEP_FLOATS..],
                    dscores_across: &mut ds_across[(i * key_panels + j) * STEP_FLOATS..],
                };
                // SAFETY: the processor has AVX512-BF16, or these tiles are not chosen.
                unsafe { gradient.run() };
            }
            for column in 0..sizes.width {
                let at = (column * sizes.queries + query_panel + first) * STEP_FLOATS;
                let to = (j * sizes.width + column) * SUMS_FLOATS;
                let count = end - first;
                let (p, ds) =
                    (p[first * STEP_FLOATS..].as_ptr(), ds[first * STEP_FLOATS..].as_ptr());
                let (g, q) = (packed.dout_across[at..].as_ptr(), packed.q_across[at..].as_ptr());
                // SAFETY: as above.
                unsafe {
                    registers.product(p, g, count, sums.dv[to..].as_mut_ptr(), true);
                    registers.product(ds, q, count, sums.dk[to..].as_mut_ptr(), true);
                }
            }
        }
        for i in (0..query_panels).filter(|&i| seen(i) > unseen(i)) {
            let (from, count) = (unseen(i), seen(i) - unseen(i));
            let ds = ds_across[(i * key_panels + from) * STEP_FLOATS..].as_ptr();
            for column in 0..sizes.width {
                let at = (column * sizes.keys + key_panel + from) * STEP_FLOATS;
                let k = packed.k_across[at..].as_ptr();
                let to = ((query_panel + i) * sizes.width + column) * SUMS_FLOATS;
                // SAFETY: as above.
                unsafe { registers.product(k, ds, count, sums.dq[to..].as_mut_ptr(), true) };
            }
        }
    }

    /// Factors of the probabilities as sums lie, for each panel of keys, for each of [`QUERY_CHUNK`] panels of queries: of
    /// the panels of keys that these see.
    fn factors<'a>(
        &self,
        (key_panel, query_panel): (usize, usize),
        seen: impl Fn(usize) -> Range<usize>,
        workspace: &'a mut [f32],
    ) -> &'a [f32] {
        let (call, (b, head)) = (self.call, self.head);
        let key_panels = KEY_CHUNK.min(self.sizes.keys - key_panel);
        let keys = key_panels * LANES;
        let mut rest = workspace;
        let turned = take(&mut rest, key_panels * QUERY_CHUNK * SUMS_FLOATS);
        let rows = take(&mut rest, LANES * keys);
        let Some(dropout) = call.dropout else { return turned };
        let count = keys.min(call.shape.keys - key_panel * LANES);
        for i in 0..QUERY_CHUNK.min(self.sizes.queries - query_panel) {
            let query = (query_panel + i) * LANES;
            let seen = seen(i);
            let columns = seen.start * LANES..count.min(seen.end * LANES);
            if columns.is_empty() {
                continue;
            }
            let key = key_panel * LANES + columns.start;
            rows.fill(0.0);
            for (r, row) in rows.chunks_exact_mut(keys).enumerate() {
                if query + r < call.shape.queries {
                    let row = &mut row[columns.clone()];
                    call.dropout_factors(dropout, (b, head, query + r), key, row);
                }
            }
            for tile in 4 * seen.start..4 * seen.end {
                let (j, lower, right) = (tile / 4, tile / 2 % 2, tile % 2);
                let from = &rows[right * SIDE * keys + j * LANES + lower * SIDE..];
                let to = (j * QUERY_CHUNK + i) * SUMS_FLOATS + (2 * lower + right) * RIGHT;
                let to = &mut turned[to..][..RIGHT];
                for (key, to) in to.chunks_exact_mut(SIDE).enumerate() {
                    for (query, to) in to.iter_mut().enumerate() {
                        *to = from[query * keys + key];
                    }
                }
            }
        }
        turned
    }
}
