//! Files with a checksum: written as streams until the disk has them, replaced whole, and verified.
//!
//! Functions here fail with a [`Fault`]; callers add what to do about it.

use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// One line that names a file and what is wrong with it.
pub(crate) type Fault = String;

/// The size and the checksum that a file should have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileRecord {
    pub bytes: u64,
    /// CRC-32 of all bytes, as Python's `zlib.crc32`.
    pub crc32: u32,
}

impl FileRecord {
    /// Errors if the file at `path` is shorter than this.
    pub fn verify_length(&self, path: &Path) -> Result<(), Fault> {
        let bytes = path.metadata().map_err(|error| cannot("read", path, &error))?.len();
        if bytes < self.bytes {
            let path = path.display();
            return Err(format!("'{path}' is truncated: {bytes} of {} bytes", self.bytes));
        }
        Ok(())
    }

    /// Errors unless the file at `path` has this size and this checksum.
    pub fn verify(&self, path: &Path) -> Result<(), Fault> {
        self.verify_unless(path, &AtomicBool::new(false))
    }

    /// Like [`FileRecord::verify`]; errors soon after `cancelled` is set.
    pub fn verify_unless(&self, path: &Path, cancelled: &AtomicBool) -> Result<(), Fault> {
        self.verify_length(path)?;
        let found = checksum(path, cancelled)?;
        self.compare(&found, path)
    }

    /// Errors unless the file at `path` was `found` to be as it should be.
    pub fn compare(&self, found: &FileRecord, path: &Path) -> Result<(), Fault> {
        if found != self {
            return Err(format!(
                "'{}' is damaged: checksum {:08x} over {} bytes, not {:08x} over {}",
                path.display(),
                found.crc32,
                found.bytes,
                self.crc32,
                self.bytes
            ));
        }
        Ok(())
    }
}

/// Bytes that are read or written at a time: they stay in the cache between checksum and copy.
pub(crate) const CHUNK: usize = 256 << 10;

fn checksum(path: &Path, cancelled: &AtomicBool) -> Result<FileRecord, Fault> {
    let mut file = File::open(path).map_err(|error| cannot("read", path, &error))?;
    let (mut hasher, mut bytes, mut chunk) = (crc32fast::Hasher::new(), 0, vec![0; CHUNK]);
    loop {
        if cancelled.load(Relaxed) {
            return Err(cannot("read", path, &std::io::Error::other("cancelled")));
        }
        match file.read(&mut chunk).map_err(|error| cannot("read", path, &error))? {
            0 => return Ok(FileRecord { bytes, crc32: hasher.finalize() }),
            n => {
                hasher.update(&chunk[..n]);
                bytes += n as u64;
            }
        }
    }
}

pub(crate) fn cannot(verb: &str, path: &Path, error: &std::io::Error) -> Fault {
    format!("cannot {verb} '{}': {error}", path.display())
}

/// Writes `contents` to a new file and waits until the disk has them.
pub(crate) fn write_bytes(path: &Path, contents: &[u8]) -> Result<FileRecord, Fault> {
    write_chunks(path, &AtomicBool::new(false), |writer| writer.put(contents))
}

/// Lets `write` make a new file and gives it its name when it is complete.
pub(crate) fn replace(
    folder: &Path,
    file: &str,
    write: impl FnOnce(&Path) -> Result<FileRecord, Fault>,
) -> Result<(), Fault> {
    let (target, new) = (folder.join(file), folder.join(format!("{file}.tmp")));
    let written = write(&new).and_then(|_| {
        std::fs::rename(&new, &target).map_err(|error| cannot("rename", &new, &error))
    });
    if written.is_err() {
        // The first error is the one to report; a file that was never made cannot be removed.
        let _ = std::fs::remove_file(&new);
    }
    written
}

/// A file that is being written, with its checksum so far.
pub(crate) struct ChecksumWriter<'a> {
    file: File,
    hasher: crc32fast::Hasher,
    bytes: u64,
    cancelled: &'a AtomicBool,
}

impl ChecksumWriter<'_> {
    pub fn put(&mut self, data: &[u8]) -> std::io::Result<()> {
        for chunk in data.chunks(CHUNK) {
            if self.cancelled.load(Relaxed) {
                return Err(std::io::Error::other("cancelled"));
            }
            self.hasher.update(chunk);
            self.file.write_all(chunk)?;
        }
        self.bytes += data.len() as u64;
        Ok(())
    }
}

/// Writes a new file by `write`, and waits until the disk has it. Errors soon after `cancelled` is set.
pub(crate) fn write_chunks(
    path: &Path,
    cancelled: &AtomicBool,
    write: impl FnOnce(&mut ChecksumWriter) -> std::io::Result<()>,
) -> Result<FileRecord, Fault> {
    let write = || {
        let file = File::create(path)?;
        let hasher = crc32fast::Hasher::new();
        let mut writer = ChecksumWriter { file, hasher, bytes: 0, cancelled };
        write(&mut writer)?;
        writer.file.sync_all()?;
        Ok(FileRecord { bytes: writer.bytes, crc32: writer.hasher.finalize() })
    };
    write().map_err(|error| cannot("write", path, &error))
}
