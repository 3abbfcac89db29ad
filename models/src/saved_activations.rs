//! What becomes of the activations that blocks keep for backward: packed, and in host memory.

use ferrotron_autograd::{Offloaded, Offloader, Packing, PackingConfig, Zeros};
use ferrotron_tensor::{Device, Result};
use std::sync::Arc;

/// What becomes of the activations that blocks keep for backward. Nothing here changes a bit of what is computed, but
/// for a type of 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SavedActivations {
    /// Of how many blocks, the first of each chunk of the model, they wait in the device's host memory.
    pub offloaded_layers: usize,
    /// In which form those of all blocks wait.
    pub packing: PackingConfig,
}

impl SavedActivations {
    /// What offloads from `device`, if anything is to be.
    ///
    /// Errors as [`Offloader::start`].
    pub fn offloader(&self, device: &Device) -> Result<Option<Arc<Offloader>>> {
        (self.offloaded_layers > 0).then(|| Offloader::start(device).map(Arc::new)).transpose()
    }
}

/// Runs blocks so that what they keep is packed.
#[derive(Debug, Clone, Default)]
pub(crate) struct BlockPacking {
    config: SavedActivations,
    offloader: Option<Arc<Offloader>>,
    here: Option<Packing>,
    away: Option<Packing>,
}

impl BlockPacking {
    pub fn new(config: SavedActivations, offloader: Option<Arc<Offloader>>) -> BlockPacking {
        let SavedActivations { packing, .. } = config;
        let packs = packing.dtype.is_some() || packing.zeros == Zeros::Bitmap;
        BlockPacking {
            config,
            here: packs.then(|| Packing::new(packing, None)),
            away: offloader.clone().map(|offloader| Packing::new(packing, Some(offloader))),
            offloader,
        }
    }

    /// Runs `f`, which is the chunk's block `block`, or blocks from there on.
    pub fn run<R>(
        &self,
        block: usize,
        f: impl FnOnce() -> Result<R>,
    ) -> Result<(R, Option<Offloaded>)> {
        if let Some(away) = &self.away
            && block < self.config.offloaded_layers
        {
            return away.run(f);
        }
        let done = match &self.here {
            Some(here) => here.run(f)?,
            None => (f()?, None),
        };
        // As after a block that is offloaded itself: no more than two wait to be moved.
        self.wait()?;
        Ok(done)
    }

    /// Waits until what goes to host memory is there.
    pub fn wait(&self) -> Result<()> {
        self.offloader.as_ref().map_or(Ok(()), |offloader| offloader.wait())
    }
}
