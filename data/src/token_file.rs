//! A file of tokens that is read by position: it stays open, or is opened for each read.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// A file, recognised by device and inode when it is opened again.
pub(super) struct TokenFile {
    path: PathBuf,
    id: (u64, u64),
    open: Option<File>,
}

impl TokenFile {
    /// Keeps `file`, which was opened at `path`.
    pub fn new(path: &Path, file: File) -> io::Result<TokenFile> {
        Ok(TokenFile { path: path.to_path_buf(), id: id(&file)?, open: Some(file) })
    }

    /// Gives the file descriptor back. From now on each read opens the file.
    pub fn close(&mut self) {
        self.open = None;
    }

    /// Fills `bytes` from byte `at` on.
    ///
    /// # Errors
    /// A file that cannot be read, has become shorter, or has been replaced since.
    pub fn read_exact_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        if let Some(file) = &self.open {
            return file.read_exact_at(bytes, at);
        }
        let file = File::open(&self.path)?;
        if id(&file)? != self.id {
            return Err(io::Error::other(
                "another file has taken its name: do not replace a file while a run reads it",
            ));
        }
        file.read_exact_at(bytes, at)
    }
}

fn id(file: &File) -> io::Result<(u64, u64)> {
    file.metadata().map(|found| (found.dev(), found.ino()))
}
