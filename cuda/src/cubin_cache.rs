//! A disk cache of compiled kernels, so that each is compiled once per machine.
//!
//! An entry's name is the SHA-256 of source, options (including the architecture) and compiler version; its contents
//! start with the SHA-256 of the rest. Ranks that miss at the same time compile the same entry, and the last one
//! stays. Truncated or modified entries are compiled again. If the folder is not writable, only compile time is lost.

use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};

use crate::cache_folder::CacheFolder;
use crate::{Error, Result};

/// A cache in a folder.
#[derive(Debug, Clone)]
pub struct CubinCache {
    folder: CacheFolder,
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

impl CubinCache {
    /// The cache in `folder`, which is created with the first entry.
    pub fn new(folder: impl Into<PathBuf>) -> CubinCache {
        CubinCache { folder: CacheFolder::new(folder) }
    }

    /// The user's cache: `ferrotron/cubin` in `XDG_CACHE_HOME` or `~/.cache`; without a home, in the system's
    /// temporary folder.
    pub fn for_user() -> CubinCache {
        CubinCache { folder: CacheFolder::for_user("cubin") }
    }

    /// The folder of the entries.
    pub fn folder(&self) -> &Path {
        self.folder.path()
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
        let path = self.path(key);
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
        let path = self.path(key);
        if read_entry(&path).is_some() {
            return Ok(());
        }
        self.store(&path, &compile()?).map_err(|error| {
            let folder = self.folder().display();
            Error::new("cubin_cache", format!("kernels cannot be kept in '{folder}': {error}"))
        })
    }

    fn path(&self, key: &Key) -> PathBuf {
        let version = format!("{}.{}", key.version.0, key.version.1);
        let options = key.options.iter().map(|option| option.as_bytes());
        let parts = [key.source.as_bytes()].into_iter().chain(options).chain([version.as_bytes()]);
        self.folder.entry(parts)
    }

    fn store(&self, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
        self.folder.replace(path, &[&Sha256::digest(bytes)[..], bytes].concat())
    }
}

/// The contents of an entry, if its digest matches.
fn read_entry(path: &Path) -> Option<Vec<u8>> {
    let entry = fs::read(path).ok()?;
    let (digest, bytes) = entry.split_at_checked(32)?;
    (Sha256::digest(bytes)[..] == *digest).then(|| bytes.to_vec())
}
