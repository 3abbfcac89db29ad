//! A disk cache of compiled kernels, so that each is compiled once per machine.
//!
//! An entry's name is the SHA-256 of source, options (including the architecture) and compiler version; its contents
//! start with the SHA-256 of the rest. There are no locks: an entry is written under a temporary name and renamed.
//! Ranks that miss at the same time compile the same entry and the last rename wins; a killed process leaves nothing
//! that others wait for. Truncated or modified entries are compiled again. If the folder is not writable, only
//! compile time is lost.

use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::{Error, Result};

/// Age after which temporary files are considered abandoned.
const ABANDONED: Duration = Duration::from_secs(3600);

/// A cache in a folder.
#[derive(Debug, Clone)]
pub struct CubinCache {
    folder: PathBuf,
}

/// The inputs of a compilation, which identify an entry.
#[derive(Debug, Clone, Copy)]
pub struct Key<'a> {
    /// The whole source text.
    pub source: &'a str,
    /// All options, including the architecture.
    pub options: &'a [String],
    /// Version of the compiler.
    pub version: (u32, u32),
}

impl Key<'_> {
    /// The entry's name.
    fn name(&self) -> String {
        let mut hash = Sha256::new();
        // Lengths separate fields: ("ab", "c") differs from ("a", "bc").
        let mut add = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        add(self.source.as_bytes());
        self.options.iter().for_each(|option| add(option.as_bytes()));
        add(format!("{}.{}", self.version.0, self.version.1).as_bytes());
        hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl CubinCache {
    /// The cache in `folder`, which is created with the first entry.
    pub fn new(folder: impl Into<PathBuf>) -> CubinCache {
        CubinCache { folder: folder.into() }
    }

    /// The user's cache: `ferrotron/cubin` in `XDG_CACHE_HOME` or `~/.cache`; without a home, in the system's
    /// temporary folder.
    pub fn for_user() -> CubinCache {
        let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home);
        CubinCache::new(cache.unwrap_or_else(std::env::temp_dir).join("ferrotron/cubin"))
    }

    /// The folder of the entries.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The entry of `key`. If it is missing or damaged, `compile` creates it.
    ///
    /// Errors only if `compile` does.
    ///
    /// ```
    /// use ferrotron_cuda::cubin_cache::{CubinCache, Key};
    /// let folder = tempfile::tempdir()?;
    /// let cache = CubinCache::new(folder.path());
    /// let key = Key { source: "...", options: &["--gpu-architecture=sm_90".into()], version: (13, 0) };
    /// assert_eq!(cache.get(&key, || Ok(vec![1, 2, 3]))?, [1, 2, 3]);
    /// assert_eq!(cache.get(&key, || unreachable!("it is there"))?, [1, 2, 3]);
    /// cache.keep(&key, || unreachable!("it is there"))?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn get(&self, key: &Key, compile: impl FnOnce() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
        let path = self.folder.join(key.name());
        if let Some(bytes) = read_entry(&path) {
            return Ok(bytes);
        }
        let bytes = compile()?;
        // Failure to write the cache is not an error.
        let _ = self.store(&path, &bytes);
        Ok(bytes)
    }

    /// Creates the entry of `key` by `compile` if it is missing or damaged.
    ///
    /// Errors if `compile` does, and if the entry cannot be written.
    pub fn keep(&self, key: &Key, compile: impl FnOnce() -> Result<Vec<u8>>) -> Result<()> {
        let path = self.folder.join(key.name());
        if read_entry(&path).is_some() {
            return Ok(());
        }
        self.store(&path, &compile()?).map_err(|error| {
            let folder = self.folder.display();
            Error::new("cubin_cache", format!("kernels cannot be kept in '{folder}': {error}"))
        })
    }

    fn store(&self, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        fs::create_dir_all(&self.folder)?;
        self.remove_abandoned()?;
        let number = COUNTER.fetch_add(1, Relaxed);
        let temporary = self.folder.join(format!("{}-{number}.tmp", std::process::id()));
        let entry = [&Sha256::digest(bytes)[..], bytes].concat();
        let written = fs::write(&temporary, entry).and_then(|()| fs::rename(&temporary, path));
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written
    }

    /// Removes temporary files of killed processes.
    fn remove_abandoned(&self) -> std::io::Result<()> {
        for entry in fs::read_dir(&self.folder)?.flatten() {
            let path = entry.path();
            let old = || Some(entry.metadata().ok()?.modified().ok()?.elapsed().ok()? > ABANDONED);
            if path.extension().is_some_and(|extension| extension == "tmp") && old() == Some(true) {
                let _ = fs::remove_file(path);
            }
        }
        Ok(())
    }
}

/// The contents of an entry, if its digest matches.
fn read_entry(path: &Path) -> Option<Vec<u8>> {
    let entry = fs::read(path).ok()?;
    let (digest, bytes) = entry.split_at_checked(32)?;
    (Sha256::digest(bytes)[..] == *digest).then(|| bytes.to_vec())
}
