//! Files that a command writes once at its end, and replaces only if they are its own.

use ferrotron::Result;
use ferrotron::parallel::output_file;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// A file that is open before the work whose result it shall hold.
pub struct OwnFile {
    option: &'static str,
    path: PathBuf,
    file: File,
    /// Whether it is new and empty: such a file is removed again.
    unused: bool,
}

impl OwnFile {
    /// Opens `path` for the option of that name, and leaves its content.
    ///
    /// Errors if it cannot be written, or holds something that does not start with `begin`: no `what` of this program.
    pub fn open(option: &'static str, path: &Path, begin: &str, what: &str) -> Result<OwnFile> {
        let unused = !path.exists();
        let mut file = output_file::open(option, path)?;
        let found = output_file::beginning(&mut file, begin.len() as u64)
            .map_err(|error| output_file::unwritable(option, path, &error))?;
        if !found.is_empty() && found != begin.as_bytes() {
            return Err(output_file::not_own(option, path, what));
        }
        Ok(OwnFile { option, path: path.to_path_buf(), file, unused })
    }

    /// Replaces the content.
    ///
    /// Errors if it cannot be written.
    pub fn replace(mut self, text: &str) -> Result<()> {
        self.unused = false;
        let written = output_file::truncate(&self.file, 0)
            .and_then(|()| self.file.write_all(text.as_bytes()));
        written.map_err(|error| output_file::unwritable(self.option, &self.path, &error))
    }
}

impl Drop for OwnFile {
    fn drop(&mut self) {
        if self.unused {
            // The error of the work is reported, not that of an empty file that stays.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
