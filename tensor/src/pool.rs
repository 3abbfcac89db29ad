//! The memory pool of a device: whose blocks are handed out, and counted by what they are for.
//!
//! Freed blocks stay with the pool, so that the second step of a training run allocates nothing from the system. Memory
//! of the host is zero when it first comes from the system and is never handed out uninitialised; a GPU's holds anything,
//! and only its kernels reach it. Where blocks lie is the business of `blocks.rs`.

mod arena;
mod blocks;

use std::cmp::Reverse;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

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
    /// Taken from the system and not given back: at most 3 % more than was ever in use, or a mebibyte, beside
    /// what graphs keep.
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

/// Bytes of buffers, in all and by what they are for.
#[derive(Default)]
struct Gauges {
    total: Gauge,
    categories: [Gauge; Category::ALL.len()],
}

impl Gauges {
    fn all(&self) -> impl Iterator<Item = &Gauge> {
        self.categories.iter().chain([&self.total])
    }
}

/// A device's memory, or a part of it that a graph of captured work has for itself.
pub(crate) struct Pool {
    blocks: Mutex<Blocks>,
    gauges: Gauges,
    n_alloc: AtomicUsize,
    /// Pools that are parts of this one.
    parts: Mutex<Vec<Weak<Pool>>>,
    whole: Option<Whole>,
}

/// The pool that another is a part of.
struct Whole {
    pool: Arc<Pool>,
    /// The peaks of a part that counts as if all of it were in use, whatever is given back: those of `Gauges::all`.
    fixed: Mutex<Option<Vec<usize>>>,
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

    /// Whether it is a block of `pool` or of a part of it.
    pub(crate) fn is_of(&self, pool: &Arc<Pool>) -> bool {
        let whole = self.pool.whole.as_ref().map(|whole| &whole.pool);
        [Some(&self.pool), whole].into_iter().flatten().any(|own| Arc::ptr_eq(own, pool))
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
        Arc::new(Self::with(backing, None))
    }

    fn with(backing: Backing, whole: Option<Whole>) -> Pool {
        Pool {
            blocks: Mutex::new(Blocks::new(backing)),
            gauges: Gauges::default(),
            n_alloc: AtomicUsize::new(0),
            parts: Mutex::default(),
            whole,
        }
    }

    /// A pool with memory of its own, of which nothing goes back to the system before all of it. It is counted here.
    pub(crate) fn part(self: &Arc<Pool>) -> Arc<Pool> {
        let backing = self.lock().backing().of_graph();
        let whole = Whole { pool: self.clone(), fixed: Mutex::default() };
        let part = Arc::new(Self::with(backing, Some(whole)));
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        parts.retain(|part| part.strong_count() > 0);
        parts.push(Arc::downgrade(&part));
        part
    }

    /// The pools that are parts of this one.
    pub(crate) fn parts(&self) -> Vec<Arc<Pool>> {
        let parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        parts.iter().filter_map(Weak::upgrade).collect()
    }

    /// From now on a part counts as much as it ever did, and does so until it is [released](Pool::release).
    pub(crate) fn fix(&self) {
        self.count_as(|part| part.peak.load(Relaxed), true);
    }

    /// From now on a part counts what is in use again.
    pub(crate) fn release(&self) {
        self.count_as(|part| part.current.load(Relaxed), false);
    }

    fn count_as(&self, bytes: impl Fn(&Gauge) -> usize, is_fixed: bool) {
        let Some(Whole { pool, fixed }) = &self.whole else { return };
        let mut fixed = fixed.lock().unwrap_or_else(PoisonError::into_inner);
        let counted: Vec<usize> = match fixed.take() {
            Some(peaks) => peaks,
            None => self.gauges.all().map(|part| part.current.load(Relaxed)).collect(),
        };
        let new: Vec<usize> = self.gauges.all().map(bytes).collect();
        for ((gauge, counted), new) in pool.gauges.all().zip(counted).zip(&new) {
            gauge.sub(counted);
            gauge.add(*new);
        }
        *fixed = is_fixed.then_some(new);
    }

    /// Gives all memory that is not in use back to the system.
    pub(crate) fn trim(&self) {
        self.lock().trim();
    }

    /// Calls `f` with the gauges of this pool and of the one that it is a part of, unless it counts as fixed there.
    fn gauge(&self, f: impl Fn(&Gauges)) {
        let Some(Whole { pool, fixed }) = &self.whole else { return f(&self.gauges) };
        let fixed = fixed.lock().unwrap_or_else(PoisonError::into_inner);
        f(&self.gauges);
        if fixed.is_none() {
            f(&pool.gauges);
        }
    }

    /// An error of memory that cannot be had, with what the memory is used for, the largest first. A
    /// folder's error is none of these.
    fn with_consumers(&self, error: Error) -> Error {
        if error.kind() == ErrorKind::Io {
            return error;
        }
        let gauges = self.whole.as_ref().map_or(&self.gauges, |whole| &whole.pool.gauges);
        let bytes = |category: Category| gauges.categories[category as usize].current.load(Relaxed);
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
        if let Some(whole) = &self.whole {
            whole.pool.n_alloc.fetch_add(1, Relaxed);
        }
        Ok(Allocation { pool: self.clone(), block, pointer })
    }

    pub(crate) fn count(&self, category: Category, bytes: usize) {
        self.gauge(|gauges| {
            gauges.total.add(bytes);
            gauges.categories[category as usize].add(bytes);
        });
    }

    pub(crate) fn uncount(&self, category: Category, bytes: usize) {
        self.gauge(|gauges| {
            gauges.total.sub(bytes);
            gauges.categories[category as usize].sub(bytes);
        });
    }

    pub(crate) fn recount(&self, from: Category, to: Category, bytes: usize) {
        self.gauge(|gauges| {
            gauges.categories[to as usize].add(bytes);
            gauges.categories[from as usize].sub(bytes);
        });
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        let (reserved, returned) = {
            let blocks = self.lock();
            (blocks.reserved(), blocks.returned)
        };
        let reserved =
            reserved + self.parts().iter().map(|part| part.lock().reserved()).sum::<usize>();
        let Gauges { total, categories } = &self.gauges;
        MemoryStats {
            current: total.current.load(Relaxed),
            peak: total.peak.load(Relaxed),
            reserved,
            returned,
            n_alloc: self.n_alloc.load(Relaxed),
            by_category: std::array::from_fn(|i| categories[i].current.load(Relaxed)),
            peak_by_category: std::array::from_fn(|i| categories[i].peak.load(Relaxed)),
        }
    }

    pub(crate) fn reset_stats(&self) {
        for gauge in self.gauges.all() {
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
