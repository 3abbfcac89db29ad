//! Memory backends of a pool: system memory, GPU memory, pinned memory, files, or none.

use ferrotron_cuda::gpu::Gpu;
use ferrotron_cuda::memory::{self, GRANULE, PinnedMemory};
use memmap2::{Advice, MmapMut, MmapOptions, UncheckedAdvice};
use std::path::PathBuf;
use std::sync::Arc;

use crate::memory::mapped_file::map_unnamed;

/// The system's page.
pub(super) const PAGE: usize = 4096;
/// Alignment of arenas, so that the system can use huge pages.
pub(super) const HUGE_PAGE: usize = 2 << 20;

/// The kind of memory behind the addresses of a pool.
#[derive(Debug, Clone)]
pub(crate) enum Backing {
    /// System memory.
    Memory,
    /// None: allocations are counted, and hardly any memory is touched.
    Addresses,
    /// Unnamed files in this folder, one per arena. They are never returned.
    Files(PathBuf),
    /// GPU memory.
    Gpu(Arc<Gpu>),
    /// GPU memory that stays mapped as long as the pool exists.
    GpuGraph(Arc<Gpu>),
    /// Pinned host memory that the GPU can access, one allocation per arena. It is never returned.
    Pinned(Arc<Gpu>),
}

impl Backing {
    /// Returns whether an arena has memory from its creation until the pool is dropped.
    pub(super) fn is_whole(&self) -> bool {
        matches!(self, Backing::Files(_) | Backing::Pinned(_))
    }

    /// Returns whether no memory is returned to the system while the pool exists.
    pub(super) fn keeps(&self) -> bool {
        matches!(self, Backing::GpuGraph(_))
    }

    /// The same kind of memory for captured work, which keeps using blocks that its tensors freed.
    pub(super) fn for_graph(&self) -> Backing {
        match self {
            Backing::Gpu(gpu) => Backing::GpuGraph(gpu.clone()),
            other => other.clone(),
        }
    }

    /// Granularity of allocation from the system, for a peak use of `most` bytes.
    pub(super) fn grain(&self, most: usize) -> usize {
        match self {
            Backing::Gpu(_) | Backing::GpuGraph(_) => GRANULE,
            _ if most < 64 << 20 => 64 << 10,
            _ => HUGE_PAGE,
        }
    }

    /// Granularity and alignment of memory returned to the system.
    pub(super) fn page(&self) -> usize {
        match self {
            Backing::Gpu(_) | Backing::GpuGraph(_) => GRANULE,
            _ => PAGE,
        }
    }

    /// Reserves `len` addresses.
    ///
    /// Errors with the system's reason.
    pub(super) fn arena(&self, len: usize) -> std::result::Result<Arena, String> {
        match self {
            // Without reserving memory, which is committed on allocation.
            Backing::Memory | Backing::Addresses => {
                let arena = MmapOptions::new().len(len).no_reserve_swap().map_anon();
                let arena = arena.map_err(|error| error.to_string())?;
                if let Backing::Memory = self {
                    // Huge pages only affect speed, so a refusal is ignored.
                    let _ = arena.advise(Advice::HugePage);
                }
                Ok(Arena::Mapped(arena))
            }
            Backing::Files(folder) => map_unnamed(folder, len).map(Arena::Mapped),
            Backing::Gpu(gpu) | Backing::GpuGraph(gpu) => {
                memory::Arena::reserve(gpu.context(), len.next_multiple_of(GRANULE))
                    .map(|arena| Arena::Gpu(gpu.clone(), arena))
                    .map_err(|error| error.to_string())
            }
            Backing::Pinned(gpu) => PinnedMemory::new(gpu.context(), len)
                .map(|memory| Arena::Pinned(gpu.clone(), memory))
                .map_err(|error| error.to_string()),
        }
    }
}

/// A range of addresses of one kind of memory.
pub(super) enum Arena {
    Mapped(MmapMut),
    Gpu(Arc<Gpu>, memory::Arena),
    Pinned(Arc<Gpu>, PinnedMemory),
}

impl Arena {
    /// The first address. Only the owner of a block of host memory may dereference it.
    pub(super) fn base(&self) -> *mut u8 {
        match self {
            Arena::Mapped(arena) => arena.as_ptr().cast_mut(),
            Arena::Gpu(_, arena) => arena.base() as *mut u8,
            Arena::Pinned(_, memory) => memory.base() as *mut u8,
        }
    }

    /// Ensures that these bytes, which have no memory yet, can get some.
    ///
    /// Errors if there is none left: touching uncommitted memory would kill the process.
    pub(super) fn commit(&mut self, offset: usize, len: usize) -> std::result::Result<(), String> {
        match self {
            Arena::Mapped(_) => {
                let answer = MmapOptions::new().len(len).map_anon();
                answer.map(drop).map_err(|error| error.to_string())
            }
            Arena::Gpu(_, arena) => arena.map(offset, len).map_err(|error| error.to_string()),
            Arena::Pinned(..) => Ok(()),
        }
    }

    /// Returns the memory of these unused bytes to the system; false if the system refuses.
    pub(super) fn release(&mut self, offset: usize, len: usize) -> bool {
        match self {
            // SAFETY: there is no pointer to these bytes; the next owner reads zeros.
            Arena::Mapped(arena) => unsafe {
                arena.unchecked_advise_range(UncheckedAdvice::DontNeed, offset, len).is_ok()
            },
            // Enqueued kernels may still use memory that their tensors freed.
            Arena::Gpu(gpu, arena) => {
                gpu.compute().synchronize().is_ok() && arena.unmap(offset, len).is_ok()
            }
            Arena::Pinned(..) => false,
        }
    }

    /// Starts reading these bytes, if they are in a file.
    pub(super) fn prefetch(&self, offset: usize, len: usize) {
        if let Arena::Mapped(arena) = self {
            // A refusal only costs time.
            let _ = arena.advise_range(Advice::WillNeed, offset, len);
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if let Arena::Gpu(gpu, _) | Arena::Pinned(gpu, _) = self {
            // Enqueued kernels may still use memory that their tensors freed.
            let _ = gpu.compute().synchronize();
        }
    }
}
