//! File descriptors: how many a rank needs, and a clear error where the limit is too low.

use ferrotron_tensor::{Error, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::{self, ErrorKind};

/// Descriptors of the program itself: its streams, data, checkpoints, threads and a GPU.
const PROGRAM: usize = 64;

/// Descriptors for each rank of the job. They are a control connection, connections in the three groups that all ranks
/// may be in, and, while one of these forms, two files of shared memory.
const PER_RANK: usize = 6;

/// Returns how many descriptors a rank of a job of `ranks` ranks may need.
pub fn needed(ranks: usize) -> usize {
    PROGRAM + PER_RANK * ranks
}

/// Raises the soft limit of this process to the hard one if a rank of `ranks` may need more than it allows.
///
/// Errors if the hard limit does not allow them either.
pub fn provide(ranks: usize) -> Result<()> {
    let needed = needed(ranks);
    let allows = |limit: Option<u64>| limit.is_none_or(|limit| limit >= needed as u64);
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if allows(current) {
        return Ok(());
    }
    if allows(maximum) && setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok()
    {
        return Ok(());
    }
    let limit = maximum.or(current).unwrap_or(0);
    Err(Error::config(
        "open files",
        format!(
            "a rank of {ranks} needs {needed} file descriptors ({PROGRAM} + {PER_RANK} for each rank), and the limit \
             is {limit}: raise it before the job starts (ulimit -n {needed})"
        ),
    ))
}

/// Replaces an error that says that there are no descriptors by one of kind [`ErrorKind::QuotaExceeded`] that names
/// limit and remedy. Returns others as they are.
pub fn explained(error: io::Error) -> io::Error {
    let what = match error.raw_os_error() {
        Some(libc::EMFILE) => {
            let limit = getrlimit(Resource::Nofile).current;
            let limit = limit.map_or("unknown".to_string(), |limit| limit.to_string());
            format!(
                "too many open files: this process may have {limit} (ulimit -n), and a job needs {PROGRAM} + \
                 {PER_RANK} for each of its ranks on every rank: raise the limit"
            )
        }
        Some(libc::ENFILE) => {
            "too many open files on this machine: raise its limit (sysctl fs.file-max)".to_string()
        }
        _ => return error,
    };
    io::Error::new(ErrorKind::QuotaExceeded, what)
}
