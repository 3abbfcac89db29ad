//! The memory pool of a device, with counters by category.
//!
//! Freed blocks stay in the pool, so from the second training step on, nothing is allocated from the system. Host
//! memory is zero when it comes from the system and is never handed out uninitialised. GPU memory is uninitialised,
//! and only kernels access it. `blocks.rs` manages addresses.

mod arena;
mod blocks;

use std::cmp::Reverse;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::gemm::workspace::workspace_bytes;
use crate::{Error, ErrorKind, Result};
pub(crate) use arena::Backing;
use blocks::{BlockAllocator, Lifetime, MemoryBlock};

/// The use of memory, so that reports and limits can distinguish weights from activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Category {
    /// Temporaries of operations and unsaved values.
    Workspace,
    /// Trainable parameters.
    Weights,
    /// Gradients of parameters.
    Gradients,
    /// Optimizer state: moments and master weights.
    Optimizer,
    /// Activations saved for backward.
    Saved,
    /// Logits of a linear head, saved or not.
    Logits,
    /// Temporary buffers of collectives.
    Communication,
    /// Tables that layers share for a run: the cosines and sines of rotary positions.
    Tables,
    /// Copies of weights and optimizer state from which a checkpoint is written.
    Snapshot,
}

impl Category {
    /// Every category, in declaration order.
    pub const ALL: [Category; 9] = [
        Category::Workspace,
        Category::Weights,
        Category::Gradients,
        Category::Optimizer,
        Category::Saved,
        Category::Logits,
        Category::Communication,
        Category::Tables,
        Category::Snapshot,
    ];
}

/// A snapshot of a pool's counters, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryStats {
    /// Bytes in use now.
    pub current: usize,
    /// Peak of `current` since the last reset.
    pub peak: usize,
    /// Allocated from the system: at most 3 % more than the peak in use (5 % or one MiB below 128 MiB), plus the memory of
    /// graphs.
    pub reserved: usize,
    /// Kept by the threads of this process for packed operands and sums of matrix products on CPUs, in addition to `reserved`.
    pub packed: usize,
    /// Returned to the system since the last reset to allocate elsewhere.
    pub returned: usize,
    /// Number of buffers allocated since the last reset.
    pub n_alloc: usize,
    /// Bytes in use now, by [`Category`].
    pub by_category: [usize; Category::ALL.len()],
    /// Peak of each category since the last reset; the peaks need not coincide.
    pub peak_by_category: [usize; Category::ALL.len()],
}

impl MemoryStats {
    /// Bytes in use now for `category`.
    pub fn bytes(&self, category: Category) -> usize {
        self.by_category[category as usize]
    }

    /// Peak bytes in use for `category` since the last reset.
    pub fn peak_bytes(&self, category: Category) -> usize {
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

/// Bytes of buffers, in total and by category.
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

/// A device's memory, or a sub-pool for the work of one graph.
pub(crate) struct Pool {
    blocks: Mutex<BlockAllocator>,
    gauges: Gauges,
    n_alloc: AtomicUsize,
    /// Sub-pools of this one.
    parts: Mutex<Vec<Weak<Pool>>>,
    whole: Option<Whole>,
}

/// The parent of a sub-pool.
struct Whole {
    pool: Arc<Pool>,
    /// The peaks of `Gauges::all`, while the sub-pool is counted as if all of it were in use.
    fixed: Mutex<Option<Vec<usize>>>,
}

/// A block allocated from a pool; dropping it frees the block.
pub(crate) struct Allocation {
    pool: Arc<Pool>,
    block: MemoryBlock,
    pointer: *mut u8,
}

// SAFETY: an allocation is plain memory that this value owns until it is dropped. `Buffer` controls access by handing
// out disjoint ranges.
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

    /// Returns whether the block is from `pool` or one of its sub-pools.
    pub(crate) fn belongs_to(&self, pool: &Arc<Pool>) -> bool {
        let whole = self.pool.whole.as_ref().map(|whole| &whole.pool);
        [Some(&self.pool), whole].into_iter().flatten().any(|own| Arc::ptr_eq(own, pool))
    }

    /// Starts reading `len` bytes from `offset` on, limited to this block, if they are in a file.
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
            blocks: Mutex::new(BlockAllocator::new(backing)),
            gauges: Gauges::default(),
            n_alloc: AtomicUsize::new(0),
            parts: Mutex::default(),
            whole,
        }
    }

    /// Creates a sub-pool with memory of its own, which returns to the system all at once. This pool's counters
    /// include it.
    pub(crate) fn part(self: &Arc<Pool>) -> Arc<Pool> {
        let backing = self.lock().backing().for_graph();
        let whole = Whole { pool: self.clone(), fixed: Mutex::default() };
        let part = Arc::new(Self::with(backing, Some(whole)));
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        parts.retain(|part| part.strong_count() > 0);
        parts.push(Arc::downgrade(&part));
        part
    }

    /// The sub-pools of this pool.
    pub(crate) fn parts(&self) -> Vec<Arc<Pool>> {
        let parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        parts.iter().filter_map(Weak::upgrade).collect()
    }

    /// Counts the sub-pool at its peak from now on, until it is [released](Pool::release).
    pub(crate) fn fix(&self) {
        self.count_as(|part| part.peak.load(Relaxed), true);
    }

    /// Counts the sub-pool by its current use again.
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

    /// Returns all unused memory to the system.
    pub(crate) fn trim(&self) {
        self.lock().trim();
    }

    /// Calls `f` with the counters of this pool and of its parent, unless the parent counts it as fixed.
    fn gauge(&self, f: impl Fn(&Gauges)) {
        let Some(Whole { pool, fixed }) = &self.whole else { return f(&self.gauges) };
        let fixed = fixed.lock().unwrap_or_else(PoisonError::into_inner);
        f(&self.gauges);
        if fixed.is_none() {
            f(&pool.gauges);
        }
    }

    /// Adds the current use by category, largest first, to an allocation error. Errors of the offload folder are
    /// unchanged.
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

    /// Allocates at least `bytes` bytes, aligned to 64; host memory is initialised.
    pub(crate) fn take(self: &Arc<Pool>, bytes: usize, category: Category) -> Result<Allocation> {
        let lifetime = match category {
            Category::Gradients => Lifetime::Long,
            _ => Lifetime::Short,
        };
        let (block, pointer) = {
            let mut blocks = self.lock();
            let block = blocks.take(bytes, lifetime).map_err(|error| self.with_consumers(error))?;
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
            packed: workspace_bytes(),
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

    fn lock(&self) -> MutexGuard<'_, BlockAllocator> {
        // A panic cannot leave the lists inconsistent: no code under this lock panics.
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
