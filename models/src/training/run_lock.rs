//! The lock of a run's folder: two runs in one folder would replace each other's checkpoints.
//!
//! The first rank holds an advisory lock (`flock`) on `run.lock` in the folder for the life of the run. The kernel
//! releases it when the process ends, however it ends, so the file stays and means nothing by itself. Readers of
//! checkpoints take no lock.
//!
//! On one machine `flock` works on local file systems. Between machines it needs one that passes locks on: NFS version 4,
//! version 3 with its lock service and without the mount options `nolock` and `local_lock`, Lustre mounted with `flock`.
//! Where locks are local to a machine, runs on two machines do not see each other. Where the file system refuses locks,
//! the run continues without one and says so.

use ferrotron_tensor::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fs::{File, TryLockError};
use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

/// Name of the file in the folder of a run.
const LOCK: &str = "run.lock";

/// Longest wait for a lock: a process that was killed holds it until the kernel has freed its memory.
const PATIENCE: Duration = Duration::from_secs(2);

/// Time between two tries.
const PAUSE: Duration = Duration::from_millis(50);

/// The exclusive use of a run's folder, until it is dropped or the process ends.
///
/// ```
/// use ferrotron_models::run_lock::RunLock;
/// # let temporary = tempfile::tempdir().unwrap();
/// # let folder = temporary.path();
/// let lock = RunLock::acquire(folder)?;
/// assert!(RunLock::check(folder).unwrap_err().to_string().contains("is used by another run"));
/// drop(lock);
/// RunLock::check(folder)?;
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug)]
pub struct RunLock {
    /// Open for as long as the lock is held.
    _file: File,
    refused: Option<String>,
}

/// The description of the lock's holder in the file.
#[derive(Serialize, Deserialize)]
struct Holder {
    host: String,
    process: u32,
    /// Seconds since 1970.
    started: u64,
}

impl RunLock {
    /// Locks `folder`, which is made if need be. Call it before anything else in the folder is written or deleted.
    ///
    /// # Errors
    /// Another run in the folder, with its host, process and start; a folder that cannot be written.
    pub fn acquire(folder: &Path) -> Result<RunLock> {
        let path = folder.join(LOCK);
        let fail =
            |error| Error::io("train", format!("cannot write '{}': {error}", path.display()));
        std::fs::create_dir_all(folder).map_err(fail)?;
        let mut options = File::options();
        let mut file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(fail)?;
        let refused = lock(folder, &mut file, File::try_lock)?;
        let holder = Holder {
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            process: std::process::id(),
            started: since_1970(),
        };
        let text = serde_json::to_string(&holder).unwrap_or_default() + "\n";
        file.set_len(0).and_then(|()| file.write_all(text.as_bytes())).map_err(fail)?;
        Ok(RunLock { _file: file, refused })
    }

    /// Looks whether a run holds the lock of `folder`, without writing anything.
    ///
    /// # Errors
    /// Another run in the folder, with its host, process and start.
    pub fn check(folder: &Path) -> Result<()> {
        match File::open(folder.join(LOCK)) {
            Ok(mut file) => lock(folder, &mut file, File::try_lock_shared).map(drop),
            // No run has been here, or `acquire` will say why it cannot be read.
            Err(_) => Ok(()),
        }
    }

    /// Looks whether `folder` is free for a new run.
    ///
    /// # Errors
    /// A run that is there already, in use or not, which the new one would replace.
    pub fn check_new(folder: &Path) -> Result<()> {
        if !folder.join("latest").exists() {
            return Ok(());
        }
        let folder = folder.display();
        let message =
            format!("{folder} holds a run: go on with --load {folder}, or choose another folder");
        Err(Error::config("--save", message))
    }

    /// One line that says why the file system could not lock the folder, if it could not.
    pub fn warning(&self) -> Option<&str> {
        self.refused.as_deref()
    }
}

/// Locks the lock file of `folder`; returns why the file system cannot, if it cannot.
fn lock(
    folder: &Path,
    file: &mut File,
    try_lock: fn(&File) -> std::result::Result<(), TryLockError>,
) -> Result<Option<String>> {
    match try_for_a_moment(file, try_lock) {
        Ok(()) => Ok(None),
        Err(TryLockError::WouldBlock) => Err(used(folder, file)),
        Err(TryLockError::Error(error)) => Ok(Some(format!(
            "'{}' cannot be locked ({error}): make sure that no other run uses it",
            folder.display()
        ))),
    }
}

/// Locks `file` within [`PATIENCE`].
pub(super) fn try_for_a_moment(
    file: &File,
    try_lock: fn(&File) -> std::result::Result<(), TryLockError>,
) -> std::result::Result<(), TryLockError> {
    let start = Instant::now();
    loop {
        match try_lock(file) {
            Err(TryLockError::WouldBlock) if start.elapsed() < PATIENCE => {
                std::thread::sleep(PAUSE)
            }
            other => return other,
        }
    }
}

/// Seconds since 1970, by the clock of this machine.
fn since_1970() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// The error that names who holds the lock.
fn used(folder: &Path, file: &mut File) -> Error {
    let mut text = String::new();
    let read = file.take(4096).read_to_string(&mut text).is_ok();
    let holder = match serde_json::from_str::<Holder>(&text) {
        Ok(Holder { host, process, started }) if read => {
            let ago = Duration::from_secs(since_1970().saturating_sub(started));
            format!("process {process} on {host:?}, started {ago:?} ago")
        }
        _ => "it has not written yet who it is".to_string(),
    };
    Error::config(
        "train",
        format!(
            "'{}' is used by another run ({holder}): wait until it ends or stop it, or choose another --save",
            folder.display()
        ),
    )
}
