//! Compiles kernel files to cubins for element types and architectures, through the cache.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::cubin_cache::{CubinCache, Key};
use crate::kernels::{ElementType, FILES, KernelSource, WARPGROUPS, compiles_warpgroups};
use crate::nvrtc::{Architecture, Nvrtc};
use crate::{Error, Result};

/// A kernel file for one element type and architecture, as the compiler takes it.
struct Input {
    name: &'static str,
    source: String,
    options: Vec<String>,
    version: (u32, u32),
}

impl Input {
    fn new(
        nvrtc: &Nvrtc,
        (file, element, rows): (&KernelSource, ElementType, &str),
        architecture: Architecture,
    ) -> Result<Input> {
        let options = file.options(architecture).ok_or_else(|| {
            Error::new(
                file.name,
                format!("is compiled for {WARPGROUPS} alone, not for {architecture}"),
            )
        })?;
        let source = file.source(element, rows);
        Ok(Input { name: file.name, source, options, version: nvrtc.version() })
    }

    fn key(&self) -> Key<'_> {
        Key { source: &self.source, options: &self.options, version: self.version }
    }

    fn compile(&self, nvrtc: &Nvrtc) -> Result<Vec<u8>> {
        Ok(nvrtc.compile(self.name, &self.source, &self.options)?.bytes)
    }
}

/// The cubin of `file` for elements of `element`, from the cache or compiled. `rows` is
/// [`pointwise_rows`](crate::kernels::pointwise_rows) for the file "pointwise", else empty.
///
/// Errors with the compiler's log if compilation fails, and if the file is for another architecture.
pub fn cubin(
    nvrtc: &Nvrtc,
    cache: &CubinCache,
    kind: (&KernelSource, ElementType, &str),
    architecture: Architecture,
) -> Result<Vec<u8>> {
    let input = Input::new(nvrtc, kind, architecture)?;
    cache.get(&input.key(), || input.compile(nvrtc))
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
        .filter(|&(file, _, architecture)| {
            !file.uses_warpgroups() || compiles_warpgroups(architecture, nvrtc.version())
        })
        .collect();
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(None));
    let count = AtomicUsize::new(0);
    let work = || {
        while let Some(&(file, element, architecture)) = jobs.get(next.fetch_add(1, Relaxed)) {
            let kind = (file, element, if file.name == "pointwise" { rows } else { "" });
            let kept = Input::new(nvrtc, kind, architecture)
                .and_then(|input| cache.keep(&input.key(), || input.compile(nvrtc)));
            match kept {
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
