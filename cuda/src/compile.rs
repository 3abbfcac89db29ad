//! Compiles a kernel file to a cubin for one element type and architecture, through the cache.

use crate::Result;
use crate::cubin_cache::{CubinCache, Key};
use crate::kernels::{ElementType, KernelSource};
use crate::nvrtc::{Architecture, Nvrtc};

/// The cubin of `file` for elements of `element`, from the cache or compiled. `rows` is
/// [`pointwise_rows`](crate::kernels::pointwise_rows) for the file "pointwise", else empty.
///
/// Errors with the compiler's log if compilation fails.
pub fn cubin(
    nvrtc: &Nvrtc,
    cache: &CubinCache,
    (file, element, rows): (&KernelSource, ElementType, &str),
    architecture: Architecture,
) -> Result<Vec<u8>> {
    let source = file.source(element, rows);
    let options = Nvrtc::options(architecture, file.options);
    let key = Key { source: &source, options: &options, version: nvrtc.version() };
    cache.get(&key, || Ok(nvrtc.compile(file.name, &source, &options)?.bytes))
}
