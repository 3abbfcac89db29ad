//! The memory pool of a device: whose blocks are handed out, and counted by what they are for.
//!
//! Freed blocks stay with the pool, so that the second step of a training run allocates nothing from the system. Memory
//! of the host is zero when it first comes from the system and is never handed out uninitialised; a GPU's holds anything,
//! and only its kernels reach it. Where blocks lie is the business of `blocks.rs`.

mod arena;
mod blocks;

use std::cmp::Reverse;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{Error, ErrorKind, Result};
pub(crate) use arena::Backing;
use blocks::{Block, Blocks};

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
    /// Taken from the system and not given back: at most 3 % more than was ever in use, or a mebibyte.
    pub reserved: usize,
    /// Given back to the system since the last reset, for memory elsewhere.
    pub returned: usize,
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

/// A device's memory.
pub(crate) struct Pool {
    blocks: Mutex<Blocks>,
    total: Gauge,
    categories: [Gauge; Category::ALL.len()],
    n_alloc: AtomicUsize,
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

    /// Begins to read `len` bytes from `offset` on, as far as they are this block's, if they are in a file.
    pub(crate) fn prefetch(&self, offset: usize, len: usize) {
        self.pool.lock().prefetch(self.block, offset, len);
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
            blocks: Mutex::new(Blocks::new(backing)),
            total: Gauge::default(),
            categories: Default::default(),
            n_alloc: AtomicUsize::new(0),
        })
    }

    /// An error of memory that cannot be had, with what the memory is used for, the largest first. A
    /// folder's error is none of these.
    fn with_consumers(&self, error: Error) -> Error {
        if error.kind() == ErrorKind::Io {
            return error;
        }
        let bytes = |category: Category| self.categories[category as usize].current.load(Relaxed);
        let mut used: Vec<Category> =
            Category::ALL.into_iter().filter(|&category| bytes(category) > 0).collect();
        used.sort_by_key(|&category| Reverse(bytes(category)));
        let used: Vec<String> =
            used.into_iter().map(|category| format!("{category:?} {}", bytes(category))).collect();
        let context = match used.is_empty() {
            true => error.context().to_string(),
            false => format!("{}; in use: {}", error.context(), used.join(", ")),
        };
        Error::memory("pool", context)
    }

    /// A block of at least `bytes` bytes, aligned to 64; on the host they are initialised.
    pub(crate) fn take(self: &Arc<Pool>, bytes: usize) -> Result<Allocation> {
        let (block, pointer) = {
            let mut blocks = self.lock();
            let block = blocks.take(bytes).map_err(|error| self.with_consumers(error))?;
            (block, blocks.pointer(block))
        };
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
        let (reserved, returned) = {
            let blocks = self.lock();
            (blocks.reserved(), blocks.returned)
        };
        MemoryStats {
            current: self.total.current.load(Relaxed),
            peak: self.total.peak.load(Relaxed),
            reserved,
            returned,
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
        self.lock().returned = 0;
    }

    fn lock(&self) -> MutexGuard<'_, Blocks> {
        // A panic elsewhere cannot leave the lists half changed: nothing in here panics.
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
