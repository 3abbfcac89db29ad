//! Storage of the activations that blocks save for backward: compression and offloading.

use ferrotron_autograd::{
    ActivationCompression, ActivationCompressionConfig, Offloaded, Offloader, ZeroEncoding,
};
use ferrotron_tensor::{Device, Result};
use std::sync::Arc;

/// Storage of the activations that blocks save for backward. Results are bitwise unchanged, except with a 16-bit
/// dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SavedActivations {
    /// Number of blocks, the first of each model chunk, whose activations are offloaded to host memory.
    pub offloaded_layers: usize,
    /// Storage format of all blocks' activations.
    pub packing: ActivationCompressionConfig,
}

impl SavedActivations {
    /// Creates the offloader for `device`, if anything is offloaded.
    ///
    /// Errors as [`Offloader::start`].
    pub fn offloader(&self, device: &Device) -> Result<Option<Arc<Offloader>>> {
        (self.offloaded_layers > 0).then(|| Offloader::start(device).map(Arc::new)).transpose()
    }
}

/// Runs blocks with compression and offloading of their activations.
#[derive(Debug, Clone, Default)]
pub(crate) struct BlockPacking {
    config: SavedActivations,
    offloader: Option<Arc<Offloader>>,
    here: Option<ActivationCompression>,
    away: Option<ActivationCompression>,
}

impl BlockPacking {
    pub fn new(config: SavedActivations, offloader: Option<Arc<Offloader>>) -> BlockPacking {
        let SavedActivations { packing, .. } = config;
        let packs = packing.dtype.is_some() || packing.zeros == ZeroEncoding::Bitmap;
        BlockPacking {
            config,
            here: packs.then(|| ActivationCompression::new(packing, None)),
            away: offloader
                .clone()
                .map(|offloader| ActivationCompression::new(packing, Some(offloader))),
            offloader,
        }
    }

    /// Runs `f`, which computes block `block` of the chunk, or several blocks from there on.
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
        // As after an offloaded block: at most two blocks wait for their copies.
        self.wait()?;
        Ok(done)
    }

    /// Waits until all offloaded activations are in host memory.
    pub fn wait(&self) -> Result<()> {
        self.offloader.as_ref().map_or(Ok(()), |offloader| offloader.wait())
    }
}
