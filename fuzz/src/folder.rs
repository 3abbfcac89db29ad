//! A folder for the files of a thread.

use std::cell::LazyCell;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

thread_local! {
    /// A folder in memory, where there is one.
    static FOLDER: LazyCell<TempDir> = LazyCell::new(|| {
        let memory = Path::new("/dev/shm");
        let folder = if memory.is_dir() { memory.into() } else { std::env::temp_dir() };
        tempfile::tempdir_in(folder).expect("a folder")
    });
}

/// A path in a folder of this thread.
pub fn path(name: &str) -> PathBuf {
    FOLDER.with(|folder| folder.path().join(name))
}

pub fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).expect("a file can be written");
}
