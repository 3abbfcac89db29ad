//! Compiles kernel files to cubins for element types and architectures, through the cache.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::cubin_cache::{CubinCache, Key};
use crate::kernels::{ElementType, FILES, KernelSource};
use crate::nvrtc::{Architecture, Nvrtc};
use crate::{Error, Result};

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
    let (source, options) = inputs((file, element, rows), architecture);
    let key = Key { source: &source, options: &options, version: nvrtc.version() };
    cache.get(&key, || Ok(nvrtc.compile(file.name, &source, &options)?.bytes))
}

/// The whole source text, and all options.
fn inputs(
    (file, element, rows): (&KernelSource, ElementType, &str),
    architecture: Architecture,
) -> (String, Vec<String>) {
    (file.source(element, rows), Nvrtc::options(architecture, file.options))
}

/// As [`cubin`]. Errors also if the cache does not keep it.
fn kept(
    nvrtc: &Nvrtc,
    cache: &CubinCache,
    kind: (&KernelSource, ElementType, &str),
    architecture: Architecture,
) -> Result<()> {
    cubin(nvrtc, cache, kind, architecture)?;
    let (source, options) = inputs(kind, architecture);
    let key = Key { source: &source, options: &options, version: nvrtc.version() };
    match cache.holds(&key) {
        true => Ok(()),
        false => {
            let folder = cache.folder().display();
            let message = format!("compiled kernels cannot be kept in '{folder}': is it writable?");
            Err(Error::new("compile_kernels", message))
        }
    }
}

/// Compiles all kernel files for all their element types and these architectures, on so many threads, so that programs find
/// them in the cache. `rows` is as in [`cubin`]. Calls `done` with the number of cubins so far and of all. Needs no GPU.
///
/// Errors with the compiler's log of the first that fails, and if the cache cannot keep one.
pub fn all_cubins(
    (nvrtc, cache, rows): (&Nvrtc, &CubinCache, &str),
    architectures: &[Architecture],
    threads: usize,
    done: &(dyn Fn(usize, usize) + Sync),
) -> Result<usize> {
    let kinds =
        FILES.iter().flat_map(|file| file.types.iter().map(move |&element| (file, element)));
    let jobs: Vec<(&KernelSource, ElementType, Architecture)> = kinds
        .flat_map(|(file, element)| architectures.iter().map(move |&one| (file, element, one)))
        .collect();
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(None));
    let count = AtomicUsize::new(0);
    let work = || {
        while let Some(&(file, element, architecture)) = jobs.get(next.fetch_add(1, Relaxed)) {
            let kind = (file, element, if file.name == "pointwise" { rows } else { "" });
            match kept(nvrtc, cache, kind, architecture) {
                Ok(()) => done(count.fetch_add(1, Relaxed) + 1, jobs.len()),
                Err(error) => {
                    next.store(jobs.len(), Relaxed);
                    failed.lock().unwrap_or_else(|held| held.into_inner()).get_or_insert(error);
                }
            }
        }
    };
    std::thread::scope(|scope| (0..threads.max(1)).for_each(|_| drop(scope.spawn(work))));
    let failed = failed.into_inner().unwrap_or_else(|held| held.into_inner());
    failed.map_or(Ok(jobs.len()), Err)
}
