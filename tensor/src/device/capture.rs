//! Memory of a GPU capture: its own pools, and the blocks of other pools that captured work uses.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::memory::pool::{Allocation, Pool};
use crate::{Category, MemoryKind, Result};

/// Memory whose addresses captured work contains. Holding this value keeps it allocated.
pub(crate) struct Capture {
    device: Arc<Pool>,
    host: Arc<Pool>,
    /// Blocks of other pools, keyed by address.
    kept: Mutex<HashMap<usize, Arc<Allocation>>>,
    /// Pinned memory with constants that every replay copies to the GPU. No block returns to this pool.
    constants: Arc<Pool>,
    copied: Mutex<Vec<Allocation>>,
    /// Memory of other graphs, held until the capture ends: freeing it waits for the GPU, which is not allowed during
    /// capture.
    others: Mutex<Vec<Arc<Pool>>>,
}

impl Capture {
    /// Allocates from new sub-pools of `device` and `host`, whose blocks are not handed out elsewhere.
    pub(crate) fn new(device: &Arc<Pool>, host: &Arc<Pool>) -> Capture {
        let others = Mutex::new([device.parts(), host.parts()].concat());
        let (device, host, constants) = (device.part(), host.part(), host.part());
        let (kept, copied) = (Mutex::default(), Mutex::default());
        Capture { device, host, kept, constants, copied, others }
    }

    pub(crate) fn pool(&self, kind: MemoryKind) -> &Arc<Pool> {
        match kind {
            MemoryKind::Device => &self.device,
            MemoryKind::Host => &self.host,
        }
    }

    /// Records that captured work uses this block. A block of another pool is kept from reuse.
    pub(crate) fn uses(&self, block: &Arc<Allocation>) {
        if [&self.device, &self.host].iter().any(|pool| block.belongs_to(pool)) {
            return;
        }
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.entry(Arc::as_ptr(block) as usize).or_insert_with(|| block.clone());
    }

    /// The address of a pinned copy of `bytes` that the GPU can read and that never changes.
    pub(crate) fn constant(&self, bytes: &[u8]) -> Result<u64> {
        let block = self.constants.take(bytes.len(), Category::Workspace)?;
        // SAFETY: pinned memory has the same address for the host, and this block was not in use before.
        unsafe { block.pointer().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        let address = block.pointer() as u64;
        self.copied.lock().unwrap_or_else(PoisonError::into_inner).push(block);
        Ok(address)
    }

    /// Ends the capture: all of its memory counts as in use from now on.
    pub(crate) fn end(&self) {
        self.others.lock().unwrap_or_else(PoisonError::into_inner).clear();
        [&self.device, &self.host].into_iter().for_each(|pool| pool.fix());
    }

    /// Counts only the memory that its tensors hold from now on.
    pub(crate) fn release(&self) {
        [&self.device, &self.host].into_iter().for_each(|pool| pool.release());
    }
}
