//! Device memory, and pinned host memory.

use std::alloc::{self, Layout};
use std::collections::BTreeSet;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use crate::context::Context;
use crate::driver::check;
use crate::driver::sys::{self, CUmemAccessDesc, CUmemAllocationProp, CUmemLocation};
use crate::{Error, Result};

/// Device memory is mapped in multiples of this many bytes.
pub const GRANULE: usize = 2 << 20;

/// A range of device addresses in which each granule may have memory or not.
///
/// Addresses are fixed, and memory of any granules can be unmapped and used at other addresses.
#[derive(Debug)]
pub struct Arena {
    context: Arc<Context>,
    base: u64,
    len: usize,
    /// Offsets of the granules with memory.
    mapped: BTreeSet<usize>,
}

impl Arena {
    /// Reserves `len` addresses, a multiple of [`GRANULE`], without memory.
    pub fn reserve(context: &Arc<Context>, len: usize) -> Result<Arena> {
        if context.is_fake() {
            return Ok(Arena { context: context.clone(), base: 0, len, mapped: BTreeSet::new() });
        }
        context.bind()?;
        let mut granule = 0;
        let (properties, smallest) = (properties(context), sys::CU_MEM_ALLOC_GRANULARITY_MINIMUM);
        // SAFETY: the pointers are to live variables.
        let status =
            unsafe { sys::cuMemGetAllocationGranularity(&mut granule, &properties, smallest) };
        check("cuMemGetAllocationGranularity", status)?;
        if granule == 0 || !GRANULE.is_multiple_of(granule) {
            let message = format!("the GPU gives memory in {granule} bytes, not in {GRANULE}");
            return Err(Error::new("cuda", message));
        }
        let mut base = 0;
        // SAFETY: the pointer is to a live variable; `drop` frees the addresses.
        let status = unsafe { sys::cuMemAddressReserve(&mut base, len, GRANULE, 0, 0) };
        check("cuMemAddressReserve", status)?;
        Ok(Arena { context: context.clone(), base, len, mapped: BTreeSet::new() })
    }

    /// The first address.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Number of addresses.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the arena has no addresses.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Maps memory to the `len` bytes from `offset` on, which have none; both are multiples of [`GRANULE`].
    ///
    /// Errors, without any change, if the GPU has no memory left.
    pub fn map(&mut self, offset: usize, len: usize) -> Result<()> {
        if self.context.is_fake() {
            return Ok(());
        }
        self.context.bind()?;
        for at in (offset..offset + len).step_by(GRANULE) {
            if let Err(error) = self.map_granule(at) {
                self.unmap(offset, at - offset)?;
                return Err(error);
            }
        }
        let access = CUmemAccessDesc {
            location: properties(&self.context).location,
            flags: sys::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the range has just been mapped.
        let status = unsafe { sys::cuMemSetAccess(self.base + offset as u64, len, &access, 1) };
        check("cuMemSetAccess", status).or_else(|error| {
            self.unmap(offset, len)?;
            Err(error)
        })
    }

    fn map_granule(&mut self, at: usize) -> Result<()> {
        let mut handle = 0;
        let properties = properties(&self.context);
        // SAFETY: the pointers are to live variables. The granule is within the reserved addresses and has no memory;
        // the mapping keeps the memory after its handle is released.
        unsafe {
            check("cuMemCreate", sys::cuMemCreate(&mut handle, GRANULE, &properties, 0))?;
            let status = sys::cuMemMap(self.base + at as u64, GRANULE, 0, handle, 0);
            let _ = sys::cuMemRelease(handle);
            check("cuMemMap", status)?;
        }
        self.mapped.insert(at);
        Ok(())
    }

    /// Unmaps the memory of these bytes, where they have any. The GPU must have finished using it.
    pub fn unmap(&mut self, offset: usize, len: usize) -> Result<()> {
        self.context.bind()?;
        let granules: Vec<usize> = self.mapped.range(offset..offset + len).copied().collect();
        for at in granules {
            // SAFETY: exactly this range was mapped by one call.
            check("cuMemUnmap", unsafe { sys::cuMemUnmap(self.base + at as u64, GRANULE) })?;
            self.mapped.remove(&at);
        }
        Ok(())
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.context.is_fake() {
            return;
        }
        let _ = self.unmap(0, self.len);
        // SAFETY: the arena owns the addresses, and they have no memory left.
        let _ = unsafe { sys::cuMemAddressFree(self.base, self.len) };
    }
}

fn properties(context: &Context) -> CUmemAllocationProp {
    CUmemAllocationProp {
        kind: sys::CU_MEM_ALLOCATION_TYPE_PINNED,
        requested_handle_types: 0,
        location: CUmemLocation {
            kind: sys::CU_MEM_LOCATION_TYPE_DEVICE,
            id: context.ordinal() as i32,
        },
        win32_handle_metadata: ptr::null_mut(),
        flags: [0; 8],
    }
}

/// Pinned host memory, which a GPU can access.
///
/// It is ordinary memory that is registered with the driver. Memory allocated by the driver could not be read by
/// other processes with `process_vm_readv`, as collectives do.
#[derive(Debug)]
pub struct PinnedMemory {
    context: Arc<Context>,
    base: u64,
    layout: Layout,
}

impl PinnedMemory {
    /// Allocates `len` zero bytes.
    ///
    /// Errors if the host cannot pin more memory.
    pub fn new(context: &Arc<Context>, len: usize) -> Result<PinnedMemory> {
        /// Accessible in every context, at the host's addresses.
        const PORTABLE_AND_MAPPED: u32 = 3;
        const PAGE: usize = 4096;
        context.bind()?;
        let none = || Error::new("cuda", format!("the host has no {len} bytes to be pinned"));
        let rounded = len.max(1).next_multiple_of(PAGE);
        let layout = Layout::from_size_align(rounded, PAGE).map_err(|_| none())?;
        // SAFETY: the size is not zero; `drop` frees the memory.
        let pointer = unsafe { alloc::alloc_zeroed(layout) };
        if pointer.is_null() {
            return Err(none());
        }
        // SAFETY: the memory was just allocated; `drop` unregisters it before freeing it.
        let status =
            unsafe { sys::cuMemHostRegister_v2(pointer.cast(), rounded, PORTABLE_AND_MAPPED) };
        if let Err(error) = check("cuMemHostRegister", status) {
            // SAFETY: it is from the call above, and has no user.
            unsafe { alloc::dealloc(pointer, layout) };
            return Err(error);
        }
        Ok(PinnedMemory { context: context.clone(), base: pointer as u64, layout })
    }

    /// The first address, equal on host and GPU.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Number of bytes, a multiple of the page size.
    pub fn len(&self) -> usize {
        self.layout.size()
    }

    /// Returns whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: `new` registered the memory, and it has no user left. If the driver fails to unregister it, it is
        // leaked.
        unsafe {
            if check("cuMemHostUnregister", sys::cuMemHostUnregister(self.base as *mut c_void))
                .is_ok()
            {
                alloc::dealloc(self.base as *mut u8, self.layout);
            }
        }
    }
}
