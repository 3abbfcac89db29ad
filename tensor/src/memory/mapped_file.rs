//! File-backed memory: pages that the operating system can write to disk, evict, and read again on access.

use memmap2::{MmapMut, MmapOptions};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::{Errno, retry_on_intr};
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// Maps `bytes` zero bytes in an unnamed file of `folder`, which disappears with the process.
///
/// Disk space is reserved first: a write through the mapping to a full disk would kill the process.
///
/// Errors, with the reason and the remedy, if the folder cannot be written or the disk has too little space.
pub(crate) fn map_unnamed(folder: &Path, bytes: usize) -> Result<MmapMut, String> {
    let refused = |what: &str, error: io::Error, remedy: &str| {
        format!("{what} '{}': {error}; {remedy} --offload-folder", folder.display())
    };
    let make = || {
        std::fs::create_dir_all(folder)?;
        tempfile::tempfile_in(folder)
    };
    let map = |file: File| {
        reserve(&file, bytes)?;
        // SAFETY: the file is unnamed and this is its only handle, so no other process writes or truncates it.
        unsafe { MmapOptions::new().len(bytes).map_mut(&file) }
    };
    let file = make().map_err(|error| refused("cannot make a file in", error, "choose another"))?;
    map(file).map_err(|error| {
        let what = format!("no {bytes} bytes can be had in");
        refused(&what, error, "free space there or choose another")
    })
}

fn reserve(mut file: &File, bytes: usize) -> io::Result<()> {
    const ZEROS: [u8; 4096] = [0; 4096];
    match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, bytes as u64)) {
        // File systems without `fallocate` get the bytes written.
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => (0..bytes)
            .step_by(ZEROS.len())
            .try_for_each(|start| file.write_all(&ZEROS[..ZEROS.len().min(bytes - start)])),
        reserved => Ok(reserved?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_zero_and_leaves_no_name() -> Result<(), String> {
        let folder = tempfile::tempdir().unwrap();
        let mut memory = map_unnamed(&folder.path().join("inner"), 3 << 20)?;
        assert!(memory.iter().all(|&byte| byte == 0));
        memory[5] = 7;
        assert_eq!(memory[5], 7);
        assert_eq!(std::fs::read_dir(folder.path().join("inner")).unwrap().count(), 0);
        Ok(())
    }

    #[test]
    fn a_disk_without_room_is_one_line_that_names_folder_and_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let error = map_unnamed(folder.path(), 1 << 43).unwrap_err();
        let name = folder.path().display().to_string();
        for part in [&name, "8796093022208 bytes", "free space there", "--offload-folder"] {
            assert!(error.contains(part), "{part} is missing: {error}");
        }
        assert!(!error.contains('\n'), "{error}");
    }

    #[test]
    fn a_folder_that_cannot_be_is_no_matter_of_space() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        for place in [file.clone(), file.join("below")] {
            let error = map_unnamed(&place, 1).unwrap_err();
            assert!(error.contains("cannot make a file in") && error.contains("file"), "{error}");
            assert!(!error.contains("space"), "{error}");
        }
    }
}
