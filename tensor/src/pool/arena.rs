//! What is behind the addresses of a pool: memory of the system, of a GPU, pinned memory, files, or nothing.

use ferrotron_cuda::gpu::Gpu;
use ferrotron_cuda::memory::{self, GRANULE, PinnedMemory};
use memmap2::{Advice, MmapMut, MmapOptions, UncheckedAdvice};
use std::path::PathBuf;
use std::sync::Arc;

use super::blocks::{HUGE_PAGE, PAGE};
use crate::mapped_file::map_unnamed;

/// What is behind the addresses of a pool.
#[derive(Debug, Clone)]
pub(crate) enum Backing {
    /// Memory of the system.
    Memory,
    /// Nothing: it is counted, and hardly any of it touched.
    Addresses,
    /// Files without a name in this folder, each an arena. They are never given back.
    Files(PathBuf),
    /// Memory of a GPU.
    Gpu(Arc<Gpu>),
    /// Memory of a GPU that stays where it is as long as the pool is there.
    GpuGraph(Arc<Gpu>),
    /// Memory of the host that a GPU reaches, each piece an arena. It is never given back.
    Pinned(Arc<Gpu>),
}

impl Backing {
    /// Whether an arena has memory as soon as it is made, and for as long as the pool is there.
    pub(super) fn is_whole(&self) -> bool {
        matches!(self, Backing::Files(_) | Backing::Pinned(_))
    }

    /// Whether nothing is given back while the pool is there.
    pub(super) fn keeps(&self) -> bool {
        matches!(self, Backing::GpuGraph(_))
    }

    /// The same kind of memory for captured work, which goes on using what its tensors gave back.
    pub(super) fn of_graph(&self) -> Backing {
        match self {
            Backing::Gpu(gpu) => Backing::GpuGraph(gpu.clone()),
            other => other.clone(),
        }
    }

    /// Memory comes in multiples of this from and to the system, where `most` is the most ever in use.
    pub(super) fn grain(&self, most: usize) -> usize {
        match self {
            Backing::Gpu(_) | Backing::GpuGraph(_) => GRANULE,
            _ if most < 64 << 20 => 64 << 10,
            _ => HUGE_PAGE,
        }
    }

    /// Memory goes back in multiples of this, from multiples of it on.
    pub(super) fn page(&self) -> usize {
        match self {
            Backing::Gpu(_) | Backing::GpuGraph(_) => GRANULE,
            _ => PAGE,
        }
    }

    /// `len` addresses.
    ///
    /// Errors with the system's reason.
    pub(super) fn arena(&self, len: usize) -> std::result::Result<Arena, String> {
        match self {
            // Without a claim to memory, which is made when some of it is taken.
            Backing::Memory | Backing::Addresses => {
                let arena = MmapOptions::new().len(len).no_reserve_swap().map_anon();
                let arena = arena.map_err(|error| error.to_string())?;
                if let Backing::Memory = self {
                    // Huge pages are a matter of speed only: a system without them says no, and that is fine.
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

/// Addresses of one kind of memory.
pub(super) enum Arena {
    Mapped(MmapMut),
    Gpu(Arc<Gpu>, memory::Arena),
    Pinned(Arc<Gpu>, PinnedMemory),
}

impl Arena {
    /// The first address. Only the owner of a block of host memory may follow it.
    pub(super) fn base(&self) -> *mut u8 {
        match self {
            Arena::Mapped(arena) => arena.as_ptr().cast_mut(),
            Arena::Gpu(_, arena) => arena.base() as *mut u8,
            Arena::Pinned(_, memory) => memory.base() as *mut u8,
        }
    }

    /// Makes sure that these bytes, which have none, get memory.
    ///
    /// Errors if there is no more: touching what is not there would end the process.
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

    /// Gives the memory of these bytes, which nobody has, back to the system; false if it does not take it.
    pub(super) fn release(&mut self, offset: usize, len: usize) -> bool {
        match self {
            // SAFETY: nobody has a pointer to these bytes. Whoever gets them next finds zeros.
            Arena::Mapped(arena) => unsafe {
                arena.unchecked_advise_range(UncheckedAdvice::DontNeed, offset, len).is_ok()
            },
            // Kernels that were given may still use what their tensors gave back.
            Arena::Gpu(gpu, arena) => {
                gpu.compute().synchronize().is_ok() && arena.unmap(offset, len).is_ok()
            }
            Arena::Pinned(..) => false,
        }
    }

    /// Begins to read these bytes, if they are in a file.
    pub(super) fn prefetch(&self, offset: usize, len: usize) {
        if let Arena::Mapped(arena) = self {
            // Only the time depends on whether the kernel follows.
            let _ = arena.advise_range(Advice::WillNeed, offset, len);
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if let Arena::Gpu(gpu, _) | Arena::Pinned(gpu, _) = self {
            // Kernels that were given may still use what their tensors gave back.
            let _ = gpu.compute().synchronize();
        }
    }
}
