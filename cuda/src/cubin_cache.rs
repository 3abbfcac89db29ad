//! Compiled kernels on disk, so that a program compiles them once on a machine.
//!
//! An entry is named by the SHA-256 of source, options (the architecture is one) and version of the compiler, and
//! begins with the SHA-256 of what follows. There is no lock: an entry is written under a name of its own and renamed,
//! so ranks that miss at the same time compile the same thing and the last one's stays, and a process that is killed
//! leaves nothing that another waits for. What is cut short or changed is compiled again. A folder that cannot be
//! written to costs time, not the run.

use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::Result;

/// Temporary files that are older than this belong to nobody any more.
const ABANDONED: Duration = Duration::from_secs(3600);

/// Entries in a folder.
#[derive(Debug, Clone)]
pub struct CubinCache {
    folder: PathBuf,
}

/// What an entry depends on.
#[derive(Debug, Clone, Copy)]
pub struct Key<'a> {
    /// The whole text.
    pub source: &'a str,
    /// All options, the architecture among them.
    pub options: &'a [String],
    /// Version of the compiler.
    pub version: (u32, u32),
}

impl Key<'_> {
    /// The entry's name.
    fn name(&self) -> String {
        let mut hash = Sha256::new();
        // Lengths keep neighbours apart: ("ab", "c") is not ("a", "bc").
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
    /// The cache in `folder`, which is made when the first entry is stored.
    pub fn new(folder: impl Into<PathBuf>) -> CubinCache {
        CubinCache { folder: folder.into() }
    }

    /// The user's: `ferrotron/cubin` in `XDG_CACHE_HOME` or `~/.cache`; without a home, in the system's temporary
    /// folder.
    pub fn of_user() -> CubinCache {
        let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home);
        CubinCache::new(cache.unwrap_or_else(std::env::temp_dir).join("ferrotron/cubin"))
    }

    /// Where the entries lie.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The entry of `key`, made by `compile` if it is not there or damaged.
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
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn get(&self, key: &Key, compile: impl FnOnce() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
        let path = self.folder.join(key.name());
        if let Some(bytes) = read_entry(&path) {
            return Ok(bytes);
        }
        let bytes = compile()?;
        // A cache that cannot be written is no reason to stop.
        let _ = self.store(&path, &bytes);
        Ok(bytes)
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

    /// Removes what killed processes left behind.
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

/// What an entry holds, if it is whole.
fn read_entry(path: &Path) -> Option<Vec<u8>> {
    let entry = fs::read(path).ok()?;
    let (digest, bytes) = entry.split_at_checked(32)?;
    (Sha256::digest(bytes)[..] == *digest).then(|| bytes.to_vec())
}
