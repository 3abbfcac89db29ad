//! The device of the tests.

use ferrotron_cuda::cubin_cache::CubinCache;
use ferrotron_cuda::gpu::GpuConfig;
use ferrotron_cuda::library::Search;
use ferrotron_tensor::{Device, Result};

/// A device on the stand-in, unless `test` must be skipped.
pub fn gpu(test: &str) -> Result<Option<Device>> {
    if !ferrotron_cuda_stand_in::available(test) {
        return Ok(None);
    }
    let folder = ferrotron_cuda_stand_in::folder();
    let cache = CubinCache::new(folder.join("cubin"));
    let config = GpuConfig { ordinal: 0, search: Search::only(vec![folder]), cache };
    Device::cuda(&config).map(Some)
}
