//! A folder of the user's cache, whose entries processes share without locks.
//!
//! An entry is written under a temporary name, so readers see it whole or not at all, and a killed process leaves
//! nothing that others wait for. [`CacheFolder::replace`] renames it: the last of several writers wins.
//! [`CacheFolder::create`] links it: the first one wins.

use sha2::{Digest, Sha256};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Age after which temporary files are considered abandoned.
const ABANDONED: Duration = Duration::from_secs(3600);

/// A folder, which is created with its first entry.
#[derive(Debug, Clone)]
pub(crate) struct CacheFolder {
    path: PathBuf,
}

impl CacheFolder {
    pub(crate) fn new(path: impl Into<PathBuf>) -> CacheFolder {
        CacheFolder { path: path.into() }
    }

    /// The user's folder `ferrotron/name` in `XDG_CACHE_HOME` or `~/.cache`; without a home, in the system's temporary
    /// folder.
    pub(crate) fn for_user(name: &str) -> CacheFolder {
        let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home);
        CacheFolder::new(cache.unwrap_or_else(std::env::temp_dir).join("ferrotron").join(name))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The path of the entry that `parts` identify: the SHA-256 of them.
    pub(crate) fn entry<'a>(&self, parts: impl IntoIterator<Item = &'a [u8]>) -> PathBuf {
        let mut hash = Sha256::new();
        for part in parts {
            // Lengths separate parts: ("ab", "c") differs from ("a", "bc").
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        let name: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        self.path.join(name)
    }

    /// Writes an entry, in place of one that is there.
    pub(crate) fn replace(&self, entry: &Path, bytes: &[u8]) -> io::Result<()> {
        self.with_temporary(bytes, |temporary| fs::rename(temporary, entry))
    }

    /// Writes an entry unless there is one, which stays as it is.
    pub(crate) fn create(&self, entry: &Path, bytes: &[u8]) -> io::Result<()> {
        self.with_temporary(bytes, |temporary| {
            let linked = fs::hard_link(temporary, entry);
            fs::remove_file(temporary)?;
            linked.or_else(|error| match error.kind() {
                ErrorKind::AlreadyExists => Ok(()),
                _ => Err(error),
            })
        })
    }

    fn with_temporary(
        &self,
        bytes: &[u8],
        name: impl FnOnce(&Path) -> io::Result<()>,
    ) -> io::Result<()> {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        fs::create_dir_all(&self.path)?;
        self.remove_abandoned()?;
        let number = COUNTER.fetch_add(1, Relaxed);
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let temporary =
            self.path.join(format!("{}-{}-{number}.tmp", host.trim(), std::process::id()));
        let written = fs::write(&temporary, bytes).and_then(|()| name(&temporary));
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written
    }

    /// Removes temporary files of killed processes.
    fn remove_abandoned(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.path)?.flatten() {
            let path = entry.path();
            let old = || Some(entry.metadata().ok()?.modified().ok()?.elapsed().ok()? > ABANDONED);
            if path.extension().is_some_and(|extension| extension == "tmp") && old() == Some(true) {
                let _ = fs::remove_file(path);
            }
        }
        Ok(())
    }
}
