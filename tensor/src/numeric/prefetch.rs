//! Fetches memory to the caches before it is used.

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// Fetches the line at an address to L1. Any address is allowed, and nothing but the caches changes.
#[inline(always)]
pub(crate) fn to_l1<T>(from: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of any address is allowed; SSE is part of x86-64.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(from.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = from;
}

/// Like [`to_l1`], to L2.
#[inline(always)]
pub(crate) fn to_l2<T>(from: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as above.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(from.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = from;
}

/// Elements from a block of a row to the one that is fetched.
const DISTANCE: usize = 1024;

/// Fetches a later block of a row to L2. A loop over one row in memory takes up to two thirds longer with the processor's
/// own prefetches alone; one over four rows does not.
#[inline(always)]
pub(crate) fn fetch_ahead<T, const N: usize>(block: &[T; N]) {
    for line in (0..size_of_val(block)).step_by(LINE) {
        to_l2(block.as_ptr().wrapping_add(DISTANCE).cast::<u8>().wrapping_add(line));
    }
}
