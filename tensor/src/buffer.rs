//! A buffer is an owned, disjoint range of an allocation.
//!
//! Whoever holds the only `Arc` of a buffer may write to it: ownership takes the place of version
//! counters. Several buffers may share one allocation ([`crate::Flat`]), never one byte.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use crate::pool::{Allocation, Category, Pool};
use crate::{Error, Result};

/// Untyped bytes of a device's pool.
pub(crate) struct Buffer {
    allocation: Arc<Allocation>,
    offset: usize,
    len: usize,
    category: AtomicU8,
}

impl Buffer {
    /// A buffer of its own of `len` initialised bytes with unspecified contents.
    pub(crate) fn new(pool: &Arc<Pool>, len: usize, category: Category) -> Result<Buffer> {
        Ok(Self::range(Arc::new(pool.take(len)?), 0, len, category))
    }

    /// Consecutive buffers of the given lengths over one allocation.
    pub(crate) fn split(
        pool: &Arc<Pool>,
        lens: &[usize],
        category: Category,
    ) -> Result<Vec<Buffer>> {
        let sum = lens.iter().try_fold(0_usize, |sum, &len| sum.checked_add(len));
        let bytes = sum.ok_or_else(|| Error::memory("pool", "the ranges exceed any memory"))?;
        let allocation = Arc::new(pool.take(bytes)?);
        let mut offset = 0;
        Ok(lens
            .iter()
            .map(|&len| {
                let start = offset;
                offset += len;
                Self::range(allocation.clone(), start, len, category)
            })
            .collect())
    }

    fn range(allocation: Arc<Allocation>, offset: usize, len: usize, category: Category) -> Buffer {
        allocation.pool().count(category, len);
        Buffer { allocation, offset, len, category: AtomicU8::new(category as u8) }
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The first byte. Reading through it needs a reference to the buffer, writing a unique one.
    pub(crate) fn pointer(&self) -> *mut u8 {
        // SAFETY: the constructors only make ranges that lie inside the allocation.
        unsafe { self.allocation.pointer().add(self.offset) }
    }

    /// Whether it is a part of this pool.
    pub(crate) fn is_in(&self, pool: &Arc<Pool>) -> bool {
        std::ptr::eq(self.allocation.pool(), &**pool)
    }

    /// What its bytes count as.
    pub(crate) fn category(&self) -> Category {
        Category::ALL[self.category.load(Relaxed) as usize]
    }

    /// Begins to read `len` bytes from `offset` on, and of the buffers behind this one as far as that reaches, if they
    /// are in a file.
    pub(crate) fn prefetch(&self, offset: usize, len: usize) {
        self.allocation.prefetch(self.offset + offset, len);
    }

    /// Counts bytes that were workspace under another category from now on; bytes that already have
    /// a purpose (a weight that an operation keeps) stay with it.
    pub(crate) fn set_category(&self, category: Category) {
        let workspace = Category::Workspace as u8;
        if self.category.compare_exchange(workspace, category as u8, Relaxed, Relaxed).is_ok() {
            self.allocation.pool().recount(Category::Workspace, category, self.len);
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.allocation.pool().uncount(self.category(), self.len);
    }
}
