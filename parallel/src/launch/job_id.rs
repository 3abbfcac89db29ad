//! The job that a rank belongs to, by what its launcher tells, and the port that follows from it.
//!
//! Two jobs that run at the same time have different ids, and all ranks of a job have the same one.

use sha2::{Digest, Sha256};
use std::ops::Range;

use super::JOB_SECRET;
use super::variables::Variables;

/// Ports that follow from job ids. They are above those of most services, and below MASTER_PORT's default of torchrun
/// (29500), Kubernetes' node ports (30000) and those that Linux gives to connections (32768).
const PORTS: Range<u16> = 20_000..29_000;

/// A launcher's way to name its jobs.
#[derive(Clone, Copy)]
pub enum NamesJobs {
    /// torchrun, by its rendezvous. `launch`, and ranks that are started by hand, have a secret instead.
    Torchrun,
    /// The first of these variables that is set.
    By(&'static str, &'static [&'static str]),
    /// Slurm, by job and step.
    Slurm,
}

impl NamesJobs {
    /// Returns the id of the job: the launcher's, else one made of the secret, if there is either.
    pub fn job_id(self, variables: &Variables) -> Option<String> {
        let named = match self {
            NamesJobs::Torchrun => torchrun(variables),
            NamesJobs::By(launcher, names) => {
                variables.value(names).map(|id| format!("{launcher} {id}"))
            }
            NamesJobs::Slurm => slurm(variables),
        };
        named.or_else(|| {
            let secret = variables.value(&[JOB_SECRET])?;
            let digest = hash("job of secret", secret);
            Some(format!("of secret {:08x}", digest >> 32))
        })
    }
}

/// The number of restarts counts where one agent starts all ranks. Agents of several machines count the failures of
/// their own ranks, so in one and the same round they may have different numbers.
fn torchrun(variables: &Variables) -> Option<String> {
    let id = variables.value(&["TORCHELASTIC_RUN_ID"])?;
    let restart = variables
        .value(&["TORCHELASTIC_RESTART_COUNT"])
        .filter(|_| variables.value(&["GROUP_WORLD_SIZE"]) == Some("1"));
    Some(match restart {
        Some(restart) => format!("torchrun {id} restart {restart}"),
        None => format!("torchrun {id}"),
    })
}

fn slurm(variables: &Variables) -> Option<String> {
    let job = variables.value(&["SLURM_JOB_ID", "SLURM_JOBID"])?;
    let step = variables.value(&["SLURM_STEP_ID", "SLURM_STEPID"])?;
    let array = variables.value(&["SLURM_ARRAY_JOB_ID"]);
    Some(match (array, variables.value(&["SLURM_ARRAY_TASK_ID"])) {
        (Some(array), Some(task)) => format!("Slurm {job}.{step} ({array}_{task})"),
        _ => format!("Slurm {job}.{step}"),
    })
}

/// Returns the default port of rank 0 of a job. It is 20000 + the first 8 bytes of the id's SHA-256, as a big-endian
/// number, modulo 9000.
pub fn port(job_id: &str) -> u16 {
    PORTS.start + (hash("", job_id) % PORTS.len() as u64) as u16
}

fn hash(purpose: &str, text: &str) -> u64 {
    let digest = Sha256::new().chain_update(purpose).chain_update(text).finalize();
    digest[..8].iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn ports_are_spread_over_their_range() {
        let ports: BTreeSet<u16> = (0..2000)
            .map(|job| port(&format!("Slurm {job}.0")))
            .inspect(|p| assert!(PORTS.contains(p)))
            .collect();
        // Of 2000 draws among 9000 about 9000 (1 - exp(-2 / 9)) = 1793 are different.
        assert!(ports.len() > 1700, "{}", ports.len());
    }

    /// `printf 'Slurm 1234.0' | sha256sum`
    #[test]
    fn a_port_can_be_computed_by_hand() {
        assert_eq!(port("Slurm 1234.0"), 22371);
    }
}
