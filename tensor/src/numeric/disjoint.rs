//! A mutable slice that parallel tasks write in disjoint ranges.
//!
//! Interleaved outputs (the heads of an attention output, several outputs of one row) cannot be split by
//! `chunks_mut`; each task takes its own ranges instead.

use std::marker::PhantomData;
use std::slice;

/// A mutable slice shared by tasks that take disjoint ranges of it.
pub(crate) struct Disjoint<'a, T> {
    pointer: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: only `part` reaches the elements, and its callers promise disjoint ranges.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Disjoint { pointer: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// The address of element `start`, for kernels that write rows with gaps. Writing through it has the safety
    /// requirement of [`Disjoint::part`].
    #[inline(always)]
    pub(crate) fn at(&self, start: usize) -> *mut T {
        self.pointer.wrapping_add(start)
    }

    /// Elements `start..start + len`.
    ///
    /// # Safety
    ///
    /// Ranges that are live at the same time must not overlap.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)] // the caller's promise makes it a split of the one `&mut [T]`
    pub(crate) unsafe fn part(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "a part lies inside its slice");
        // SAFETY: the range is inside the slice, and the caller promises that no other live range overlaps it.
        unsafe { slice::from_raw_parts_mut(self.pointer.add(start), len) }
    }
}
