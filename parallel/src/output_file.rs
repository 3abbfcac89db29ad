//! Files that a run writes beside its checkpoints, where something may be already: metrics, traces, pictures.
//!
//! A path that a user typed may name anything. So a file is opened without being changed, only if it is a regular
//! one, and never in a way that waits for another process; the caller then looks whether its content is the program's
//! own before it changes anything.

use ferrotron_tensor::{Error, Result};
use std::fs::{File, FileType, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Opens `path` to read and to append, and makes an empty file where there is none. `/dev/null` is allowed as well.
///
/// # Errors
/// [`Config`](ferrotron_tensor::ErrorKind::Config) for anything but a regular file, in one line that says what it is;
/// [`Io`](ferrotron_tensor::ErrorKind::Io) if the file cannot be opened. `operation` begins both.
pub fn open(operation: &'static str, path: &Path) -> Result<File> {
    // Before it is opened: with some devices that alone does something.
    if let Ok(found) = std::fs::metadata(path) {
        check_type(operation, path, &found)?;
    }
    let mut options = OpenOptions::new();
    options.read(true).append(true).create(true);
    // A FIFO that has come in between does not block.
    options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    let opened = options.open(path).and_then(|file| Ok((file.metadata()?, file)));
    let (found, file) = opened.map_err(|error| unwritable(operation, path, &error))?;
    check_type(operation, path, &found)?;
    Ok(file)
}

/// Opens `path` to read if it exists, and changes nothing.
///
/// # Errors
/// The errors of [`open`]; also a file that may not be written.
pub fn open_existing(operation: &'static str, path: &Path) -> Result<Option<File>> {
    match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        _ => open(operation, path).map(Some),
    }
}

/// The error of a file that cannot be written.
pub fn unwritable(operation: &'static str, path: &Path, error: &io::Error) -> Error {
    Error::io(operation, format!("cannot write {}: {error}", path.display()))
}

/// The refusal of a file that holds something else than `what` of this program.
pub fn not_own(operation: &'static str, path: &Path, what: &str) -> Error {
    let message = format!(
        "{} holds something else than {what} of this program and is left as it is: move it away or name another file",
        path.display()
    );
    Error::config(operation, message)
}

/// The first bytes of a file, at most `count`.
pub fn beginning(file: &mut File, count: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(count).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Shortens a file to `length` bytes; one that is no longer is left alone.
pub fn truncate(file: &File, length: u64) -> io::Result<()> {
    if file.metadata()?.len() > length { file.set_len(length) } else { Ok(()) }
}

fn check_type(operation: &'static str, path: &Path, found: &Metadata) -> Result<()> {
    let kind = found.file_type();
    if kind.is_file() || is_null(found) {
        return Ok(());
    }
    let message =
        format!("cannot write {}: it is {}, not a regular file", path.display(), name(kind));
    Err(Error::config(operation, message))
}

/// Whether it is the null device.
fn is_null(found: &Metadata) -> bool {
    let null = std::fs::metadata("/dev/null");
    found.file_type().is_char_device() && null.is_ok_and(|null| null.rdev() == found.rdev())
}

fn name(kind: FileType) -> &'static str {
    match kind {
        kind if kind.is_dir() => "a folder",
        kind if kind.is_fifo() => "a pipe",
        kind if kind.is_socket() => "a socket",
        _ => "a device",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;
    use std::process::Command;

    fn refusal(path: &Path) -> String {
        open("test", path).unwrap_err().to_string()
    }

    #[test]
    fn only_regular_files_are_opened_and_nothing_waits() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        assert!(Command::new("mkfifo").arg(at("pipe")).status().unwrap().success());
        let _socket = UnixListener::bind(at("socket")).unwrap();
        std::os::unix::fs::symlink("/dev/full", at("link")).unwrap();
        for (name, what) in
            [("pipe", "a pipe"), ("socket", "a socket"), ("link", "a device"), ("", "a folder")]
        {
            let refused = refusal(&at(name));
            assert!(refused.contains(&format!("it is {what}, not a regular file")), "{refused}");
            assert!(open_existing("test", &at(name)).is_err());
        }
        assert!(refusal(&at("absent/file")).contains("absent/file: No such file"));
        assert!(open_existing("test", &at("absent")).unwrap().is_none());
        assert!(!at("absent").exists());
        let mut null = open("test", Path::new("/dev/null")).unwrap();
        null.write_all(b"anything").unwrap();
        truncate(&null, 0).unwrap();
        assert_eq!(beginning(&mut null, 9).unwrap(), b"");
    }

    #[test]
    fn a_file_keeps_its_content_permissions_and_name() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("file"), folder.path().join("link"));
        std::fs::write(&path, "before\n").unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let mut file = open("test", &link).unwrap();
        assert_eq!(beginning(&mut file, 3).unwrap(), b"bef");
        file.write_all(b"after\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "before\nafter\n");
        truncate(&file, 100).unwrap();
        truncate(&file, 7).unwrap();
        assert_eq!(std::fs::read_to_string(&link).unwrap(), "before\n");
        assert!(link.is_symlink());
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o640);
    }
}
