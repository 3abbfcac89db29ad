//! A part of an operand to pack.

/// Part of an operand and its destination: `depth` steps of k by `count` lanes, packed into panels of `width` lanes.
/// Lanes are rows of the left or columns of the right operand. Within a panel step p is the contiguous row at p *
/// width; lanes from `count` up to a full register are filled with zeros. Where the steps of a lane lie together
/// instead, lane i begins at i * panel_stride / width.
pub(super) struct PackTask<T> {
    /// First element; its type is that of the packing routine.
    pub from: *const u8,
    pub step_stride: isize,
    pub lane_stride: isize,
    pub depth: usize,
    /// Elements of a lane in all these steps.
    pub elements: usize,
    pub count: usize,
    pub to: *mut T,
    /// Half a register, or a multiple of a register.
    pub width: usize,
    /// Elements from one panel to the next.
    pub panel_stride: usize,
}

/// Bytes over which the lines of an operand may be spread and yet be read from the caches without being fetched.
const NEAR: usize = 32 << 10;

/// Whether lines of `S`, `stride` elements apart, should be fetched before they are read.
#[inline(always)]
pub(super) fn is_far<S>(lines: usize, stride: isize) -> bool {
    lines * stride.unsigned_abs() * size_of::<S>() > NEAR
}
