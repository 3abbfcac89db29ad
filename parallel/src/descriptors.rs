//! File descriptors: how many a rank needs, and a clear error where the limit is too low.

use ferrotron_tensor::{Error, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::{self, ErrorKind};

/// Descriptors of the program itself: its streams, data, checkpoints, threads and a GPU.
const PROGRAM: usize = 64;

/// Descriptors for each rank of a small job: a control connection, connections in the groups that all ranks may be in,
/// and, while one of these forms, two files of shared memory.
const PER_RANK: usize = 6;

/// Ranks with which a rank has connections at most: in a group where it sums 16-bit numbers, on rank 0 while ranks wait for
/// their parents, and, twice as many, where processes come that have not proved yet to belong to the job.
const MOST_PEERS: usize = 64;

/// Returns how many descriptors a rank of a job of `ranks` ranks may need.
pub fn needed(ranks: usize) -> usize {
    PROGRAM + PER_RANK * ranks.min(MOST_PEERS)
}

/// Returns how many descriptors the soft limit allows beyond those that a rank of `ranks` may need.
pub fn spare(ranks: usize) -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    let limit = limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
    limit.saturating_sub(needed(ranks))
}

/// Raises the soft limit of this process to the hard one if a rank of `ranks` may need more than it allows.
///
/// Errors if the hard limit does not allow them either.
pub fn provide(ranks: usize) -> Result<()> {
    let why = format!("{PROGRAM} + {PER_RANK} for each of at most {MOST_PEERS} ranks");
    raise(needed(ranks), &format!("a rank of {ranks}"), &why)
}

/// Raises the limit as [`provide`] does, for ranks that inherit it and for their launcher, which reads two streams of each.
///
/// Errors as [`provide`].
pub fn provide_launcher(ranks: usize) -> Result<()> {
    provide(ranks)?;
    let why = format!("{PROGRAM} + 2 for each rank");
    raise(PROGRAM + 2 * ranks, &format!("the launcher of {ranks} ranks"), &why)
}

fn raise(needed: usize, process: &str, why: &str) -> Result<()> {
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
            "{process} needs {needed} file descriptors ({why}), and the limit is {limit}: raise it before the job \
             starts (ulimit -n {needed})"
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
                 {PER_RANK} for each of at most {MOST_PEERS} ranks on every rank: raise the limit"
            )
        }
        Some(libc::ENFILE) => {
            "too many open files on this machine: raise its limit (sysctl fs.file-max)".to_string()
        }
        _ => return error,
    };
    io::Error::new(ErrorKind::QuotaExceeded, what)
}
