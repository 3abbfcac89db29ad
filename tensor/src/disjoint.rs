//! A mutable slice whose parts are written by parallel tasks.
//!
//! Outputs that interleave (the heads of an attention output, several outputs of one row) cannot be cut
//! by `chunks_mut`; each task takes the parts that are its own.

use std::marker::PhantomData;
use std::slice;

/// A mutable slice that tasks share; each part is handed out by range.
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

    /// Where element `start` lies, for kernels that write rows with gaps; writing through it is under
    /// the same promise as [`Disjoint::part`].
    #[inline(always)]
    pub(crate) fn at(&self, start: usize) -> *mut T {
        self.pointer.wrapping_add(start)
    }

    /// Elements `start .. start + len`.
    ///
    /// # Safety
    ///
    /// No two parts that are alive at the same time may overlap.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)] // the caller's promise makes it a split of the one `&mut [T]`
    pub(crate) unsafe fn part(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "a part lies inside its slice");
        // SAFETY: the range is inside the slice, and nobody else has it by the caller's promise.
        unsafe { slice::from_raw_parts_mut(self.pointer.add(start), len) }
    }
}
