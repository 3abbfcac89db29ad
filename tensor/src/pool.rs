//! The memory pool of a device: size bins up to 1 MiB, best fit with split and coalesce above.
//!
//! Freed blocks stay with the pool, so that the second step of a training run allocates nothing from
//! the system. Memory is zero when it first comes from the system and is never handed out
//! uninitialised. Counters tell what is in use, by category.

use memmap2::{Advice, MmapMut, MmapOptions};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{Error, Result};

/// Alignment of every block: a cache line and an AVX-512 register.
const ALIGNMENT: usize = 64;
/// Requests up to this size come from bins of equal blocks.
const LARGEST_BIN: usize = 1 << 20;
/// Larger requests are rounded up to pages.
const PAGE: usize = 4096;
/// Segments are asked of the system in multiples of a huge page, at least eight at a time.
const SEGMENT: usize = 2 << 20;
const SMALLEST_SEGMENT: usize = 16 << 20;

/// What memory is used for, so that reports and limits can tell weights from activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Category {
    /// Temporaries of an operation and values in flight.
    Workspace,
    /// Trainable parameters.
    Weights,
    /// Their gradients.
    Gradients,
    /// Moments and master copies.
    Optimizer,
    /// Kept from forward for backward.
    Saved,
    /// Logits of a linear head, kept or not.
    Logits,
    /// What ranks gather for a while.
    Communication,
}

impl Category {
    /// Every category, in declaration order.
    pub const ALL: [Category; 7] = [
        Category::Workspace,
        Category::Weights,
        Category::Gradients,
        Category::Optimizer,
        Category::Saved,
        Category::Logits,
        Category::Communication,
    ];
}

/// A snapshot of a pool's counters, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryStats {
    /// In use now.
    pub current: usize,
    /// Most ever in use at once since the last reset.
    pub peak: usize,
    /// Taken from the system.
    pub reserved: usize,
    /// Buffers handed out since the last reset.
    pub n_alloc: usize,
    /// In use now, by [`Category`].
    pub by_category: [usize; Category::ALL.len()],
    /// Peak of each category since the last reset (not all at the same moment).
    pub peak_by_category: [usize; Category::ALL.len()],
}

impl MemoryStats {
    /// Bytes in use now for `category`.
    pub fn of(&self, category: Category) -> usize {
        self.by_category[category as usize]
    }

    /// Most bytes in use at once for `category` since the last reset.
    pub fn peak_of(&self, category: Category) -> usize {
        self.peak_by_category[category as usize]
    }
}

#[derive(Default)]
struct Gauge {
    current: AtomicUsize,
    peak: AtomicUsize,
}

impl Gauge {
    fn add(&self, bytes: usize) {
        let now = self.current.fetch_add(bytes, Relaxed) + bytes;
        self.peak.fetch_max(now, Relaxed);
    }

    fn sub(&self, bytes: usize) {
        self.current.fetch_sub(bytes, Relaxed);
    }
}

/// Whether anybody means to use the memory of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Backing {
    /// Somebody does.
    #[default]
    Memory,
    /// It is counted and hardly ever touched: addresses alone, of which the system has any number.
    Addresses,
}

/// A device's memory.
pub(crate) struct Pool {
    blocks: Mutex<Blocks>,
    total: Gauge,
    categories: [Gauge; Category::ALL.len()],
    n_alloc: AtomicUsize,
}

#[derive(Default)]
struct Blocks {
    backing: Backing,
    segments: Vec<MmapMut>,
    /// Free small blocks by rounded size.
    bins: BTreeMap<usize, Vec<Block>>,
    /// Free large blocks by (size, segment, offset): the first that is large enough fits best.
    free_by_size: BTreeSet<(usize, usize, usize)>,
    /// The same by (segment, offset) -> size, to find neighbours.
    free_by_place: BTreeMap<(usize, usize), usize>,
    reserved: usize,
}

#[derive(Debug, Clone, Copy)]
struct Block {
    segment: usize,
    offset: usize,
    size: usize,
}

/// A block taken from a pool; dropping it gives the block back.
pub(crate) struct Allocation {
    pool: Arc<Pool>,
    block: Block,
    pointer: *mut u8,
}

// SAFETY: an allocation is plain memory that belongs to this value alone until it is dropped; who may
// read and write which part is decided by `Buffer`, which hands out disjoint ranges.
unsafe impl Send for Allocation {}
// SAFETY: as above; the pointer itself is never written through a shared reference.
unsafe impl Sync for Allocation {}

impl Allocation {
    pub(crate) fn pointer(&self) -> *mut u8 {
        self.pointer
    }

    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.pool.lock().give_back(self.block);
    }
}

impl Pool {
    pub(crate) fn new(backing: Backing) -> Arc<Pool> {
        Arc::new(Pool {
            blocks: Mutex::new(Blocks { backing, ..Blocks::default() }),
            total: Gauge::default(),
            categories: Default::default(),
            n_alloc: AtomicUsize::new(0),
        })
    }

    /// A block of at least `bytes` initialised bytes, aligned to 64.
    pub(crate) fn take(self: &Arc<Pool>, bytes: usize) -> Result<Allocation> {
        let (block, pointer) = self.lock().take(bytes)?;
        self.n_alloc.fetch_add(1, Relaxed);
        Ok(Allocation { pool: self.clone(), block, pointer })
    }

    pub(crate) fn count(&self, category: Category, bytes: usize) {
        self.total.add(bytes);
        self.categories[category as usize].add(bytes);
    }

    pub(crate) fn uncount(&self, category: Category, bytes: usize) {
        self.total.sub(bytes);
        self.categories[category as usize].sub(bytes);
    }

    pub(crate) fn recount(&self, from: Category, to: Category, bytes: usize) {
        self.categories[to as usize].add(bytes);
        self.categories[from as usize].sub(bytes);
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        MemoryStats {
            current: self.total.current.load(Relaxed),
            peak: self.total.peak.load(Relaxed),
            reserved: self.lock().reserved,
            n_alloc: self.n_alloc.load(Relaxed),
            by_category: std::array::from_fn(|i| self.categories[i].current.load(Relaxed)),
            peak_by_category: std::array::from_fn(|i| self.categories[i].peak.load(Relaxed)),
        }
    }

    pub(crate) fn reset_stats(&self) {
        for gauge in self.categories.iter().chain([&self.total]) {
            gauge.peak.store(gauge.current.load(Relaxed), Relaxed);
        }
        self.n_alloc.store(0, Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, Blocks> {
        // A panic elsewhere cannot leave the lists half changed: nothing in here panics.
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Blocks {
    fn take(&mut self, bytes: usize) -> Result<(Block, *mut u8)> {
        // No slice spans more; below it, rounding up cannot overflow.
        if bytes > isize::MAX as usize {
            return Err(Error::memory("pool", format!("{bytes} bytes exceed any memory")));
        }
        let size = rounded(bytes);
        let binned =
            if size <= LARGEST_BIN { self.bins.get_mut(&size).and_then(Vec::pop) } else { None };
        let block = match binned {
            Some(block) => block,
            None => self.carve(size)?,
        };
        let pointer = self.segments[block.segment].as_mut_ptr().wrapping_add(block.offset);
        Ok((block, pointer))
    }

    /// Cuts `size` bytes from the smallest free range that holds them, or from a new segment.
    fn carve(&mut self, size: usize) -> Result<Block> {
        if self.free_by_size.range((size, 0, 0)..).next().is_none() {
            self.grow(size)?;
        }
        let &(free, segment, offset) =
            self.free_by_size.range((size, 0, 0)..).next().expect("grow made room for the request");
        self.remove_free(segment, offset, free);
        if free > size {
            self.insert_free(segment, offset + size, free - size);
        }
        Ok(Block { segment, offset, size })
    }

    fn grow(&mut self, size: usize) -> Result<()> {
        let bytes = size.next_multiple_of(SEGMENT).max(SMALLEST_SEGMENT);
        let mut options = MmapOptions::new();
        if self.backing == Backing::Addresses {
            options.no_reserve_swap(); // nor memory
        }
        let memory = options.len(bytes).map_anon().map_err(|error| {
            Error::memory(
                "pool",
                format!(
                    "the system refuses {bytes} bytes beside {} in use: {error}",
                    self.reserved
                ),
            )
        })?;
        if self.backing == Backing::Memory {
            // Huge pages are a matter of speed only: a system without them says no, and that is fine.
            let _ = memory.advise(Advice::HugePage);
        }
        self.segments.push(memory);
        self.reserved += bytes;
        self.insert_free(self.segments.len() - 1, 0, bytes);
        Ok(())
    }

    fn give_back(&mut self, block: Block) {
        if block.size <= LARGEST_BIN {
            self.bins.entry(block.size).or_default().push(block);
            return;
        }
        let Block { segment, mut offset, mut size } = block;
        if let Some(after) = self.free_by_place.get(&(segment, offset + size)).copied() {
            self.remove_free(segment, offset + size, after);
            size += after;
        }
        let before = self
            .free_by_place
            .range((segment, 0)..(segment, offset))
            .next_back()
            .map(|(&k, &v)| (k, v));
        if let Some(((_, start), length)) =
            before.filter(|&((_, start), length)| start + length == offset)
        {
            self.remove_free(segment, start, length);
            offset = start;
            size += length;
        }
        self.insert_free(segment, offset, size);
    }

    fn insert_free(&mut self, segment: usize, offset: usize, size: usize) {
        self.free_by_size.insert((size, segment, offset));
        self.free_by_place.insert((segment, offset), size);
    }

    fn remove_free(&mut self, segment: usize, offset: usize, size: usize) {
        self.free_by_size.remove(&(size, segment, offset));
        self.free_by_place.remove(&(segment, offset));
    }
}

/// Small sizes go to one of four steps per power of two, large ones to pages.
fn rounded(bytes: usize) -> usize {
    if bytes <= 4 * ALIGNMENT {
        return bytes.max(1).next_multiple_of(ALIGNMENT);
    }
    if bytes > LARGEST_BIN {
        return bytes.next_multiple_of(PAGE);
    }
    bytes.next_multiple_of((bytes.next_power_of_two() / 8).max(ALIGNMENT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_blocks_are_used_again_and_neighbours_join() {
        let pool = Pool::new(Backing::Memory);
        let sizes = [3 << 20, 5 << 20, 4 << 20];
        let blocks: Vec<_> = sizes.iter().map(|&bytes| pool.take(bytes).unwrap()).collect();
        let reserved = pool.stats().reserved;
        drop(blocks);
        let whole = pool.take(16 << 20).unwrap();
        assert_eq!(
            pool.stats().reserved,
            reserved,
            "three neighbours and the rest join into one segment"
        );
        drop(whole);
        let small = pool.take(1000).unwrap().pointer();
        assert_eq!(
            pool.take(990).unwrap().pointer(),
            small,
            "equal bins give back the block freed last"
        );
    }

    #[test]
    fn sizes_beyond_any_memory_are_errors() {
        for bytes in [usize::MAX, isize::MAX as usize, isize::MAX as usize + 1] {
            assert!(Pool::new(Backing::Memory).take(bytes).is_err(), "{bytes}");
        }
    }

    #[test]
    fn rounding_wastes_little() {
        for bytes in 1..(3 << 20) / 17 {
            let bytes = bytes * 17;
            let size = rounded(bytes);
            assert!(size >= bytes && size.is_multiple_of(ALIGNMENT));
            assert!(size <= bytes + bytes / 4 + ALIGNMENT, "{bytes} takes {size}");
        }
    }
}
