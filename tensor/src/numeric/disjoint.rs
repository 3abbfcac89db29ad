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

    /// The address of elements `start..start + len`, for kernels that write rows with gaps. Writing through it has
    /// the safety requirement of [`Disjoint::part`].
    #[inline(always)]
    pub(crate) fn at(&self, start: usize, len: usize) -> *mut T {
        self.check(start, len);
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
        self.check(start, len);
        // SAFETY: the range is inside the slice, and the caller promises that no other live range overlaps it.
        unsafe { slice::from_raw_parts_mut(self.pointer.add(start), len) }
    }

    #[inline(always)]
    fn check(&self, start: usize, len: usize) {
        assert!(start <= self.len && len <= self.len - start, "a part lies inside its slice");
    }
}

#[cfg(test)]
mod tests {
    use super::Disjoint;
    use std::panic::catch_unwind;

    #[test]
    fn addresses_and_parts_lie_inside_the_slice() {
        for (start, len, inside) in
            [(0, 4, true), (4, 0, true), (3, 2, false), (5, 0, false), (2, usize::MAX, false)]
        {
            let mut values = [0_u8; 4];
            let slice = Disjoint::new(&mut values);
            // SAFETY: no other part is live.
            let part = || unsafe { slice.part(start, len) }.len();
            let (address, part) = (catch_unwind(|| slice.at(start, len)), catch_unwind(part));
            assert_eq!((address.is_ok(), part.is_ok()), (inside, inside), "{start}, {len}");
        }
    }
}
