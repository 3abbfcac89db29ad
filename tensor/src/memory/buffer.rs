//! A buffer is an owned, disjoint byte range of an allocation.
//!
//! The sole holder of a buffer's `Arc` may write to it: unique ownership replaces version counters.
//! Several buffers may share one allocation ([`crate::FlatBuffer`]) but never a byte. The exception is a buffer that spans
//! others: it holds them, and can be written only while it is the sole holder of each.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use crate::memory::pool::{Allocation, Category, Pool};
use crate::{Error, Result};

/// Untyped bytes of a device's pool.
pub(crate) struct Buffer {
    allocation: Arc<Allocation>,
    offset: usize,
    len: usize,
    category: AtomicU8,
    /// The buffers that this one spans; they count their own bytes.
    parts: Vec<Arc<Buffer>>,
}

impl Buffer {
    /// A buffer in an allocation of its own: `len` initialised bytes with unspecified contents.
    pub(crate) fn new(pool: &Arc<Pool>, len: usize, category: Category) -> Result<Buffer> {
        Ok(Self::range(Arc::new(pool.take(len, category)?), 0, len, category))
    }

    /// Consecutive buffers of the given lengths over one allocation.
    pub(crate) fn split(
        pool: &Arc<Pool>,
        lens: &[usize],
        category: Category,
    ) -> Result<Vec<Buffer>> {
        let sum = lens.iter().try_fold(0_usize, |sum, &len| sum.checked_add(len));
        let bytes = sum.ok_or_else(|| Error::memory("pool", "the ranges exceed any memory"))?;
        let allocation = Arc::new(pool.take(bytes, category)?);
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
        let category = AtomicU8::new(category as u8);
        Buffer { allocation, offset, len, category, parts: Vec::new() }
    }

    /// A buffer over `len` bytes of one or more consecutive buffers of one allocation. `offset` is relative to the
    /// first byte of the first buffer.
    ///
    /// Errors if the buffers are not consecutive or have fewer than `offset + len` bytes.
    pub(crate) fn span(parts: Vec<Arc<Buffer>>, offset: usize, len: usize) -> Result<Buffer> {
        let consecutive = parts.windows(2).all(|pair| {
            Arc::ptr_eq(&pair[0].allocation, &pair[1].allocation)
                && pair[0].offset + pair[0].len == pair[1].offset
        });
        let bytes: usize = parts.iter().map(|part| part.len).sum();
        let inside = offset.checked_add(len).is_some_and(|end| end <= bytes);
        let (Some(first), true, true) = (parts.first(), consecutive, inside) else {
            let message =
                format!("{len} bytes from {offset} on are not in {} buffers", parts.len());
            return Err(Error::memory("buffer", message));
        };
        let (allocation, offset) = (first.allocation.clone(), first.offset + offset);
        // Not used: `category` asks the parts.
        let category = AtomicU8::new(Category::Workspace as u8);
        Ok(Buffer { allocation, offset, len, category, parts })
    }

    /// The buffers that this one spans; empty if it spans none.
    pub(crate) fn parts(&self) -> &[Arc<Buffer>] {
        &self.parts
    }

    /// Number of holders of the buffer, or of its most shared part if that is larger.
    pub(crate) fn holders(buffer: &Arc<Buffer>) -> usize {
        let of_parts = buffer.parts.iter().map(Arc::strong_count).max();
        Arc::strong_count(buffer).max(of_parts.unwrap_or(1))
    }

    /// The buffer, if it and all its parts have no other holder.
    /// Unlike reading the count, `Arc::get_mut` orders reads by former holders on other threads before the following
    /// writes.
    pub(crate) fn unique(buffer: &mut Arc<Buffer>) -> Option<&mut Buffer> {
        let buffer = Arc::get_mut(buffer)?;
        buffer.parts.iter_mut().all(|part| Arc::get_mut(part).is_some()).then_some(buffer)
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The first byte. Reading through it needs a reference to the buffer; writing needs a unique one.
    pub(crate) fn pointer(&self) -> *mut u8 {
        // SAFETY: the constructors only make ranges that lie inside the allocation.
        unsafe { self.allocation.pointer().add(self.offset) }
    }

    /// The allocation that contains the buffer.
    pub(crate) fn allocation(&self) -> &Arc<Allocation> {
        &self.allocation
    }

    /// The category under which its bytes are counted.
    pub(crate) fn category(&self) -> Category {
        match self.parts.first() {
            Some(part) => part.category(),
            None => Category::ALL[self.category.load(Relaxed) as usize],
        }
    }

    /// Starts reading `len` bytes from `offset` on if the allocation is a mapped file. The range may extend into the
    /// buffers that follow.
    pub(crate) fn prefetch(&self, offset: usize, len: usize) {
        self.allocation.prefetch(self.offset + offset, len);
    }

    /// Recounts workspace bytes under `category`. Bytes that already have another category (a weight saved by an
    /// operation) keep it.
    pub(crate) fn set_category(&self, category: Category) {
        if !self.parts.is_empty() {
            self.parts.iter().for_each(|part| part.set_category(category));
            return;
        }
        let workspace = Category::Workspace as u8;
        if self.category.compare_exchange(workspace, category as u8, Relaxed, Relaxed).is_ok() {
            self.allocation.pool().recount(Category::Workspace, category, self.len);
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.parts.is_empty() {
            self.allocation.pool().uncount(self.category(), self.len);
        }
    }
}
