//! Starts the processes of a job and tells each its rank.
//!
//! [`launch`] starts ranks on one machine and watches over them. Ranks that it, torchrun, srun or mpirun has
//! started find out with [`RankEnvironment`] who they are and where to meet.
//!
//! | variable | made by [`launch`] | meaning |
//! |---|---|---|
//! | `RANK`, `WORLD_SIZE` | yes | number of this rank, and of all |
//! | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | yes | the same on this machine |
//! | `MASTER_ADDR`, `MASTER_PORT` | yes | where rank 0 is; it listens on the port behind `MASTER_PORT` |
//! | `FERROTRON_JOB_SECRET` | yes | what only the ranks of the job know; needed where they are on several machines |

mod environment;
mod job_id;
mod launcher;
mod lines;
mod ports;
mod rank_process;
mod signals;
mod slurm;
mod stopped_ranks;
mod variables;

pub use environment::RankEnvironment;
pub use launcher::{JobEnd, LaunchConfig, launch};
pub use signals::{SignalFlags, stop_signals};

use ferrotron_tensor::{Error, Result};
use std::time::Duration;

/// The environment variable that holds the job's secret.
pub const JOB_SECRET: &str = "FERROTRON_JOB_SECRET";

/// Exit code of a rank whose calls could not be carried out, mostly since another rank is gone. [`launch`]
/// looks for the cause elsewhere first.
pub const COMMUNICATION_FAILED: u8 = 3;

/// Exit code of a process that was asked to stop and has, as shells report SIGINT.
pub const INTERRUPTED: u8 = 130;

/// Time behind a first Ctrl-C within which another one is the same request: `timeout -s INT` sends SIGINT to its child and
/// again to the process group.
pub const SAME_INTERRUPT: Duration = Duration::from_secs(1);

/// `N` bytes that nobody can foresee.
fn random_bytes<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::io("launch", format!("the system has no random bytes: {error}")))?;
    Ok(bytes)
}
