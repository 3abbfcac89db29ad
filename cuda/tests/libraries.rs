//! Checks that a GPU is refused with one clear error if a library is missing or too old, or the GPU is. Runs in a
//! process of its own, since a library that was found serves the whole process.

use ferrotron_cuda::Result;
use ferrotron_cuda::context::Context;
use ferrotron_cuda::cubin_cache::CubinCache;
use ferrotron_cuda::gpu::{Gpu, GpuConfig};
use ferrotron_cuda::library::{Kind, Search};
use ferrotron_cuda::nvrtc::Nvrtc;
use ferrotron_cuda::probe::probe;
use std::path::Path;

#[test]
fn matrix_products_need_their_library() -> Result<()> {
    if !ferrotron_cuda_sim::available("matrix_products_need_their_library") {
        return Ok(());
    }
    let from = ferrotron_cuda_sim::folder();
    let root = tempfile::tempdir().unwrap();
    let folder = root.path();
    for file in ["libcuda.so.1", "libnvrtc.so.13"] {
        std::fs::copy(from.join(file), folder.join(file)).unwrap();
    }
    let gpu = |products: &Path| {
        let cache = CubinCache::new(folder.join("cubin"));
        let search = Search::only(vec![folder.into(), products.into()]);
        Gpu::new(&GpuConfig { search, cache, ..GpuConfig::new(0) }, String::new())
    };
    match gpu(folder) {
        Ok(_) => println!("the system's loader knows cuBLASLt: nothing is missing"),
        Err(error) => assert_eq!(
            error.to_string(),
            "libcublasLt.so: not found, needed for matrix products: pip install nvidia-cublas"
        ),
    }
    let old = folder.join("old");
    std::fs::create_dir(&old).unwrap();
    let library = old.join("libcublasLt.so.13");
    std::fs::copy(from.join("libnvrtc.so.13"), &library).unwrap();
    if let Err(error) = gpu(&old) {
        let path = library.display();
        let want = format!("cublasLtCreate: {path} has no such function: it is too old");
        assert_eq!(error.to_string(), want);
    }
    // One that is there after all is found.
    let library = folder.join("libcublasLt.so.13");
    std::fs::copy(from.join("libcublasLt.so.13"), &library).unwrap();
    let found = probe(&Search::only(vec![folder.into()]));
    let (_, version) = found.libraries.iter().find(|(kind, _)| *kind == Kind::CublasLt).unwrap();
    let version = version.clone()?;
    assert_eq!((version.path, &version.version[..]), (library, "13.0.0"));
    gpu(folder).map(drop)
}

#[test]
fn a_gpu_that_is_older_than_the_kernels_is_refused() {
    let test = "a_gpu_that_is_older_than_the_kernels_is_refused";
    let Some(config) = ferrotron_cuda_sim::stand_in(test) else { return };
    let error = Context::new(&config.search, 7).unwrap_err().to_string();
    let want =
        "cuda: GPU 7 (stand-in 7) has compute capability 7.5: 8.0 is the least, that of the A100";
    assert_eq!(error, want);
}

/// Names in the cache of compiled kernels differ by it, so a real GPU never finds what the stand-in has made.
#[test]
fn the_stand_in_of_the_compiler_has_the_version_of_no_real_one() -> Result<()> {
    let test = "the_stand_in_of_the_compiler_has_the_version_of_no_real_one";
    let Some(config) = ferrotron_cuda_sim::stand_in(test) else { return Ok(()) };
    let (major, minor) = Nvrtc::load(&config.search)?.version();
    assert!(major == 13 && minor > 100, "{major}.{minor}");
    Ok(())
}
