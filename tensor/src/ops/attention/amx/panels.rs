//! Panels of queries, keys and the width: how many there are, how they are packed, and what is seen of them.

use crate::bf16;
use crate::gemm::tiles::{LANES, STEP_FLOATS, Tiles, pack_panels, steps};
use crate::ops::attention::tile::{AttentionOperands, Shape};

/// Panels of keys that share a running maximum.
pub(super) const KEY_PANELS: usize = 4;

/// Panels of a dimension, and floats of a packed operand of `panels` panels.
pub(super) struct Sizes {
    /// Panels of queries, of keys and of the width; steps of the width are as many.
    pub queries: usize,
    pub keys: usize,
    pub width: usize,
}

impl Sizes {
    pub(super) fn new(shape: Shape) -> Sizes {
        Sizes { queries: steps(shape.queries), keys: steps(shape.keys), width: steps(shape.width) }
    }

    /// Floats of all queries and of all keys, in panels of either dimension.
    pub(super) fn packed_queries(&self) -> usize {
        self.queries * self.width * STEP_FLOATS
    }

    pub(super) fn packed_keys(&self) -> usize {
        self.keys * self.width * STEP_FLOATS
    }
}

/// Packs rows of `width` elements whose products run over the width.
///
/// # Safety
/// The conditions of [`pack_panels`], for rows `row` apart.
pub(super) unsafe fn pack_along(
    tiles: Tiles,
    (from, row): (*const bf16, usize),
    [rows, width]: [usize; 2],
    to: &mut [f32],
) {
    debug_assert!(to.len() >= rows.div_ceil(LANES) * steps(width) * STEP_FLOATS);
    // SAFETY: the caller's promise, passed on.
    unsafe { pack_panels(tiles, from, [row, 1], [rows, width], to.as_mut_ptr()) }
}

/// Packs rows of `width` elements whose products run over the rows.
///
/// # Safety
/// The conditions of [`pack_along`].
pub(super) unsafe fn pack_across(
    tiles: Tiles,
    (from, row): (*const bf16, usize),
    [rows, width]: [usize; 2],
    to: &mut [f32],
) {
    debug_assert!(to.len() >= width.div_ceil(LANES) * steps(rows) * STEP_FLOATS);
    // SAFETY: the caller's promise, passed on.
    unsafe { pack_panels(tiles, from, [1, row], [width, rows], to.as_mut_ptr()) }
}

/// The visible keys of each query of a panel, counted from some key on; none for padding.
pub(super) struct PanelLimits {
    /// The first key that each query sees, perhaps negative.
    pub starts: [i32; LANES],
    /// The end of the keys that each query sees, perhaps negative.
    pub ends: [i32; LANES],
}

impl AttentionOperands<'_, bf16> {
    /// The visible keys of each query of a panel, counted from `key`.
    pub(super) fn panel_limits(&self, (b, query): (usize, usize), key: usize) -> PanelLimits {
        let mut starts = [0; LANES];
        let mut ends = [0; LANES];
        let relative = |at: usize| (at as i64 - key as i64).clamp(-1, i32::MAX as i64) as i32;
        for (i, (start, end)) in starts.iter_mut().zip(&mut ends).enumerate() {
            let seen = match query + i < self.shape.queries {
                true => self.visible(b, query + i),
                false => [0; 2],
            };
            [*start, *end] = seen.map(relative);
        }
        PanelLimits { starts, ends }
    }
}
