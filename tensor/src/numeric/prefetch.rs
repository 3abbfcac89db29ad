//! Fetches memory to the caches before it is used.

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// Elements from those that a loop over several streams uses to those that it fetches.
pub(crate) const AHEAD: usize = 512;

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

/// Like [`to_l1`], to be written: no other core keeps the line.
#[inline(always)]
pub(crate) fn to_write<T>(to: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as above. Processors without this hint do nothing.
    unsafe {
        use std::arch::asm;
        asm!("prefetchw [{}]", in(reg) to, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = to;
}

/// Elements that a loop runs through, to be fetched before it reaches them.
#[derive(Clone, Copy)]
pub(crate) struct Stream {
    data: *const u8,
    /// Bytes of an element: none if there are no elements, whose address is not mapped.
    bytes: usize,
}

impl Stream {
    pub(crate) fn new<T>(elements: &[T]) -> Stream {
        let bytes = if elements.is_empty() { 0 } else { size_of::<T>() };
        Stream { data: elements.as_ptr().cast(), bytes }
    }

    /// Calls `fetch` with an address in each line of `N` elements from `first` on, which may lie beyond the end.
    #[inline(always)]
    pub(crate) fn fetch<const N: usize>(self, first: usize, fetch: impl Fn(*const u8)) {
        let first = self.data.wrapping_add(first * self.bytes);
        // So many lines for two bytes of each element: a constant, so that the compiler unrolls the loop.
        for part in 0..self.bytes / 2 {
            for line in 0..2 * N / LINE {
                fetch(first.wrapping_add(part * 2 * N + line * LINE));
            }
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn elements_of_a_stream_have_an_address_in_each_line() {
        fn lines<T>(elements: &[T]) -> Vec<usize> {
            let (start, found) = (elements.as_ptr().addr(), Cell::new(Vec::new()));
            Stream::new(elements).fetch::<64>(512, |line| {
                to_write(line);
                found.set([found.take(), vec![line.addr() - start]].concat());
            });
            found.take()
        }
        assert_eq!(lines(&[0_u16; 4]), [1024, 1088]);
        assert_eq!(lines(&[0_f32; 4]), [2048, 2112, 2176, 2240]);
        assert_eq!(lines(&[0_f64; 4]).len(), 8);
        assert_eq!(lines::<u16>(&[]), []);
    }
}
