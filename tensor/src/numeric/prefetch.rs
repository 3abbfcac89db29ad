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
