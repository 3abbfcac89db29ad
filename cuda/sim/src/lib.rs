//! Stand-ins for NVIDIA's libraries: tests run the whole GPU side on a machine without one.
//!
//! `shim/` gives the text of kernels a meaning on the CPU. `libraries/` are a driver, a compiler and matrix products
//! with the interface of NVIDIA's, made by g++ when they are first asked for and kept in the build folder.
//! `FERROTRON_CUDA_PATH` set to [`folder`]'s answer makes any program find them.
//!
//! Tests of operations take [`gpu`]'s device: with `FERROTRON_TEST_GPU` set they run on this machine's first GPU.
#![deny(missing_docs)]

use ferrotron_cuda::cubin_cache::CubinCache;
use ferrotron_cuda::gpu::GpuConfig;
use ferrotron_cuda::library::{Kind, Library, Search};
use ferrotron_cuda::stream::Stream;
use std::ffi::c_void;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The libraries, with the names that they are looked for by.
const LIBRARIES: &[(&str, &str)] = &[
    ("cuda", "libcuda.so.1"),
    ("nvrtc", "libnvrtc.so.13"),
    ("cublaslt", "libcublasLt.so.13"),
    ("nccl", "libnccl.so.2"),
];

/// The compiler flags of every library. Libraries must not share their inline variables.
const FLAGS: &[&str] = &[
    "-std=c++20",
    "-g1",
    "-shared",
    "-fPIC",
    "-w",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-gnu-unique",
];

/// Whether kernels can run here; if not, says so for `test`, on a line of its own.
pub fn available(test: &str) -> bool {
    if cfg!(not(all(target_arch = "x86_64", target_os = "linux"))) {
        println!("skipped: {test}: kernels run on the CPU only on x86-64 Linux");
        return false;
    }
    let found = Command::new("g++").arg("--version").output().is_ok_and(|out| out.status.success());
    if !found {
        println!("skipped: {test}: kernels run on the CPU only with g++ (apt install g++)");
    }
    found
}

/// The GPU that tests run on: this machine's first one if `FERROTRON_TEST_GPU` is set, else a stand-in. Nothing, and a
/// line that says so for `test`, where there is neither.
///
/// Panics if g++ refuses the stand-in.
pub fn gpu(test: &str) -> Option<GpuConfig> {
    match std::env::var_os("FERROTRON_TEST_GPU") {
        Some(_) => Some(GpuConfig::new(0)),
        None => stand_in(test),
    }
}

/// Returns the stand-in's [`gpu`], for tests of what only the stand-in has: the same memory everywhere, failures.
/// `None` where tests run on a GPU, since a process has one driver.
pub fn stand_in(test: &str) -> Option<GpuConfig> {
    if std::env::var_os("FERROTRON_TEST_GPU").is_some() {
        println!("skipped: {test}: the stand-in is not used where FERROTRON_TEST_GPU is set");
        return None;
    }
    if !available(test) {
        return None;
    }
    let folder = folder();
    let cache = CubinCache::new(folder.join("cubin"));
    Some(GpuConfig { search: Search::only(vec![folder]), cache, ..GpuConfig::new(0) })
}

/// Counts this thread's waits for the stand-in of a GPU so far, and its copies from the stand-in's memory.
///
/// Panics if g++ refuses the stand-in.
pub fn waits() -> (u64, u64) {
    let mut counts = [0; 2];
    // SAFETY: this is how libraries/cuda.cpp declares it, and it writes two numbers.
    unsafe {
        let count = driver().function::<unsafe extern "C" fn(*mut u64)>("stand_in_waits");
        count.unwrap()(counts.as_mut_ptr());
    }
    (counts[0], counts[1])
}

/// Makes a stream of the stand-in run its work as early as a driver may; others run it as late as one may. A missing
/// wait then shows as work that was done before that of another stream. Does nothing on a real GPU.
///
/// Panics if the stand-in cannot be loaded.
pub fn hasten(stream: &Stream) {
    if std::env::var_os("FERROTRON_TEST_GPU").is_some() {
        return;
    }
    // SAFETY: this is how libraries/cuda.cpp declares it, and the stream is alive.
    unsafe {
        let hasten = driver().function::<unsafe extern "C" fn(*mut c_void)>("stand_in_hasten");
        hasten.unwrap()(stream.handle());
    }
}

/// Calls of the stand-in for NCCL, of all ranks of this process.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NcclCalls {
    /// Communicators that were made; those of each rank count.
    pub communicators: u64,
    /// All-reduces.
    pub all_reduces: u64,
    /// Reduce-scatters.
    pub reduce_scatters: u64,
    /// All-gathers.
    pub all_gathers: u64,
    /// Broadcasts.
    pub broadcasts: u64,
    /// Reductions to one rank.
    pub reduces: u64,
    /// Sends and receives.
    pub messages: u64,
}

/// Counts the calls of the stand-in for NCCL so far.
///
/// Panics if g++ refuses the stand-in.
pub fn nccl_calls() -> NcclCalls {
    let library = Search::only(vec![folder()]).load(Kind::Nccl).unwrap();
    let mut calls = NcclCalls::default();
    // SAFETY: this is how libraries/nccl.cpp declares it, and it writes seven numbers.
    unsafe {
        let count = library.function::<unsafe extern "C" fn(*mut NcclCalls)>("stand_in_nccl_calls");
        count.unwrap()(&mut calls);
    }
    calls
}

fn driver() -> Library {
    Search::only(vec![folder()]).load(Kind::Driver).unwrap()
}

/// A folder with the stand-ins, under the names that NVIDIA's libraries have.
///
/// Panics if g++ refuses one.
pub fn folder() -> PathBuf {
    let shim = root().join("shim");
    let kernels = built().join("kernels");
    std::fs::create_dir_all(&kernels).unwrap();
    let mut hash = DefaultHasher::new();
    shim.hash(&mut hash); // the libraries include it by its path
    for file in files(&root().join("libraries")).iter().chain(&files(&shim)) {
        std::fs::read(file).unwrap().hash(&mut hash);
    }
    let folder = built().join(format!("libraries-{:016x}", hash.finish()));
    std::fs::create_dir_all(&folder).unwrap();
    for (name, file) in LIBRARIES {
        if folder.join(file).exists() {
            continue;
        }
        let text = std::fs::read_to_string(root().join(format!("libraries/{name}.cpp"))).unwrap();
        let defines = [
            format!("-DFOLDER=\"{}\"", kernels.display()),
            format!("-DSHIM=\"{}\"", shim.display()),
            format!("-DFLAGS=\"{} -O1\"", FLAGS.join(" ")),
            format!("-Wl,-soname,{file}"),
            "-O2".to_string(),
        ];
        let made = compile(&folder, name, &text, &defines);
        std::fs::rename(made, folder.join(file)).unwrap();
    }
    folder
}

/// Compiles a library for the CPU from a text that includes the shim's headers, with `options` for g++. It is named by
/// its contents, so that it is made once.
///
/// Panics if g++ refuses the text.
pub fn library(name: &str, source: &str, options: &[&str]) -> PathBuf {
    let mut hash = DefaultHasher::new();
    (source, options).hash(&mut hash);
    for header in files(&root().join("shim")) {
        std::fs::read(header).unwrap().hash(&mut hash);
    }
    let folder = built().join("kernels");
    std::fs::create_dir_all(&folder).unwrap();
    let library = folder.join(format!("{name}-{:016x}.so", hash.finish()));
    if !library.exists() {
        let options: Vec<String> = options.iter().map(|option| option.to_string()).collect();
        std::fs::rename(compile(&folder, name, source, &options), &library).unwrap();
    }
    library
}

/// The folder of g++'s outputs, in the nearest `tmp` above the program that runs: the one that cargo makes in its build folder
/// for tests, else the system's.
fn built() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let near = program.ancestors().map(|folder| folder.join("tmp")).find(|tmp| tmp.is_dir());
    near.unwrap_or_else(std::env::temp_dir).join("stand-in")
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Compiles a text under a name of its own, so that processes that do the same do not meet.
fn compile(folder: &Path, name: &str, text: &str, options: &[String]) -> PathBuf {
    let unique = format!("{name}-{}-{:?}", std::process::id(), std::thread::current().id());
    let (source, made) =
        (folder.join(format!("{unique}.cpp")), folder.join(format!("{unique}.so")));
    std::fs::write(&source, text).unwrap();
    let mut command = Command::new("g++");
    command.args(FLAGS);
    for headers in ["shim", "libraries"] {
        command.arg("-I").arg(root().join(headers));
    }
    let out = command.arg("-o").arg(&made).arg(&source).args(options).arg("-ldl").output().unwrap();
    assert!(out.status.success(), "g++ refuses {name}:\n{}", String::from_utf8_lossy(&out.stderr));
    std::fs::remove_file(&source).unwrap();
    made
}
