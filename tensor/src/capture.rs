//! What belongs to a GPU's work while it is captured: memory of its own, and the blocks of others that it uses.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::pool::{Allocation, Pool};
use crate::{MemoryKind, Result};

/// Memory that captured work has been given addresses of. It stays as long as this is held.
pub(crate) struct Capture {
    device: Arc<Pool>,
    host: Arc<Pool>,
    /// Blocks of other pools, by their address.
    kept: Mutex<HashMap<usize, Arc<Allocation>>>,
    /// Pinned memory that the work copies to the GPU, the same each time. Nothing is given back to this pool.
    constants: Arc<Pool>,
    copied: Mutex<Vec<Allocation>>,
    /// Until the capture ends, the memory of other graphs. It is given back when the GPU is done with it, which nobody can
    /// wait for meanwhile.
    others: Mutex<Vec<Arc<Pool>>>,
}

impl Capture {
    /// Whatever is taken from now on is not part of the blocks that `device` and `host` hand out.
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

    /// The work uses this block: if it is not of its own pools, nobody else gets it.
    pub(crate) fn uses(&self, block: &Arc<Allocation>) {
        if [&self.device, &self.host].iter().any(|pool| block.is_of(pool)) {
            return;
        }
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.entry(Arc::as_ptr(block) as usize).or_insert_with(|| block.clone());
    }

    /// The address of a copy of `bytes`, which the GPU reaches and which stays as it is.
    pub(crate) fn constant(&self, bytes: &[u8]) -> Result<u64> {
        let block = self.constants.take(bytes.len())?;
        // SAFETY: pinned memory has the same address for the host, and nobody had this block before.
        unsafe { block.pointer().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        let address = block.pointer() as u64;
        self.copied.lock().unwrap_or_else(PoisonError::into_inner).push(block);
        Ok(address)
    }

    /// The capture has ended: from now on all of its memory counts as in use.
    pub(crate) fn end(&self) {
        self.others.lock().unwrap_or_else(PoisonError::into_inner).clear();
        [&self.device, &self.host].into_iter().for_each(|pool| pool.fix());
    }

    /// What its tensors hold counts from now on, no more.
    pub(crate) fn release(&self) {
        [&self.device, &self.host].into_iter().for_each(|pool| pool.release());
    }
}
