//! What a GPU is refused for: a library that is missing or too old, by one clear error. In a process of its own, since a
//! library that was found serves the whole process.

use ferrotron_cuda::Result;
use ferrotron_cuda::cubin_cache::CubinCache;
use ferrotron_cuda::gpu::{Gpu, GpuConfig};
use ferrotron_cuda::library::{Kind, Search};
use ferrotron_cuda::probe::probe;

#[test]
fn matrix_products_need_their_library() -> Result<()> {
    if !ferrotron_cuda_stand_in::available("matrix_products_need_their_library") {
        return Ok(());
    }
    let from = ferrotron_cuda_stand_in::folder();
    let root = tempfile::tempdir().unwrap();
    let folder = root.path();
    for file in ["libcuda.so.1", "libnvrtc.so.13"] {
        std::fs::copy(from.join(file), folder.join(file)).unwrap();
    }
    let gpu = || {
        let cache = CubinCache::new(folder.join("cubin"));
        let config = GpuConfig { ordinal: 0, search: Search::only(vec![folder.into()]), cache };
        Gpu::new(&config, String::new())
    };
    match gpu() {
        Ok(_) => println!("the system's loader knows cuBLASLt: nothing is missing"),
        Err(error) => assert_eq!(
            error.to_string(),
            "libcublasLt.so: not found, needed for matrix products: pip install nvidia-cublas"
        ),
    }
    let library = folder.join("libcublasLt.so.13");
    std::fs::copy(from.join("libnvrtc.so.13"), &library).unwrap();
    if let Err(error) = gpu() {
        let path = library.display();
        let want = format!("cublasLtCreate: {path} has no such function: it is too old");
        assert_eq!(error.to_string(), want);
    }
    // One that is there after all is found.
    std::fs::copy(from.join("libcublasLt.so.13"), &library).unwrap();
    let found = probe(&Search::only(vec![folder.into()]));
    let (_, version) = found.libraries.iter().find(|(kind, _)| *kind == Kind::CublasLt).unwrap();
    let version = version.clone()?;
    assert_eq!((version.path, &version.version[..]), (library, "13.0.0"));
    gpu().map(drop)
}
