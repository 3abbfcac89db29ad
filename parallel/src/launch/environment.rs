//! Finds the rank of a process in the environment variables of its launcher.

use ferrotron_tensor::Result;
use std::collections::BTreeMap;
use std::time::Duration;

use super::JOB_SECRET;
use super::job_id::{self, NamesJobs};
use super::ports::first_connection_port;
use super::slurm;
use super::variables::{Variables, refuse};
use crate::collective::{Encryption, RankConfig, Transport, WorldConfig};

/// The rank of a process, and its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankEnvironment {
    /// This rank's number, from 0.
    pub rank: usize,
    /// Number of ranks of the job.
    pub world_size: usize,
    /// Its number among the ranks of this machine. A rank alone, or whose launcher does not tell, has 0.
    pub local_rank: usize,
    /// Number of ranks on this machine, if the launcher tells.
    pub local_size: Option<usize>,
    /// Name or address of rank 0's machine.
    pub master_addr: String,
    /// `MASTER_PORT`: torchrun's own store listens there.
    pub master_port: Option<u16>,
    /// The job's id, by its launcher or its secret, if there is either. It is the same on all ranks, and no other job
    /// that runs at the same time has it.
    pub job_id: Option<String>,
}

/// The variables of one launcher, each by its names in order of preference.
struct Launcher {
    rank: &'static [&'static str],
    world_size: &'static [&'static str],
    local_rank: &'static [&'static str],
    local_size: &'static [&'static str],
    job: NamesJobs,
}

/// Launchers in order of precedence. Slurm comes last: where mpirun runs in a job of Slurm, the ranks inherit the
/// variables of the task that started them.
const LAUNCHERS: &[Launcher] = &[
    // torchrun and `launch`.
    Launcher {
        rank: &["RANK"],
        world_size: &["WORLD_SIZE"],
        local_rank: &["LOCAL_RANK"],
        local_size: &["LOCAL_WORLD_SIZE"],
        job: NamesJobs::Torchrun,
    },
    // Open MPI.
    Launcher {
        rank: &["OMPI_COMM_WORLD_RANK"],
        world_size: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        job: NamesJobs::By("Open MPI", &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"]),
    },
    // MPICH, Intel MPI, Cray PALS.
    Launcher {
        rank: &["PMI_RANK", "PMIX_RANK"],
        world_size: &["PMI_SIZE"],
        local_rank: &["MPI_LOCALRANKID", "PALS_LOCAL_RANKID"],
        local_size: &["MPI_LOCALNRANKS"],
        // PALS; Intel MPI; plugins of srun. MPICH's Hydra has none.
        job: NamesJobs::By(
            "MPI",
            &["PALS_APID", "I_MPI_HYDRA_UUID", "PMIX_NAMESPACE", "PMI_JOBID"],
        ),
    },
    // srun. In an interactive step SLURM_NTASKS is that of the allocation.
    Launcher {
        rank: &["SLURM_PROCID"],
        world_size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_rank: &["SLURM_LOCALID"],
        local_size: &[],
        job: NamesJobs::Slurm,
    },
];

impl RankEnvironment {
    /// The rank of the process with these environment variables; `None` if no launcher has started it.
    ///
    /// Each fact comes from the first of these that states it:
    ///
    /// | | rank | ranks | rank and ranks of this machine |
    /// |---|---|---|---|
    /// | torchrun, [`launch`](super::launch) | `RANK` | `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` |
    /// | Open MPI | `OMPI_COMM_WORLD_RANK` | `.._SIZE` | `.._LOCAL_RANK`, `.._LOCAL_SIZE` |
    /// | MPICH, Intel MPI, PALS | `PMI_RANK`, `PMIX_RANK` | `PMI_SIZE` | `MPI_LOCALRANKID` or `PALS_LOCAL_RANKID`, `MPI_LOCALNRANKS` |
    /// | srun | `SLURM_PROCID` | `SLURM_STEP_NUM_TASKS`, `SLURM_NTASKS` | `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` |
    ///
    /// Slurm's count in a step only. A batch script is no rank, though it has `SLURM_PROCID` 0.
    ///
    /// The address of rank 0 is 127.0.0.1 if all ranks are on one machine, else `MASTER_ADDR`, else the
    /// first host of `SLURM_STEP_NODELIST` or `SLURM_JOB_NODELIST`.
    ///
    /// ```
    /// use ferrotron_parallel::launch::RankEnvironment;
    /// let variables = [("SLURM_PROCID", "5"), ("SLURM_NTASKS", "8"), ("SLURM_STEP_NODELIST", "node[07-10]")];
    /// let variables = variables.map(|(name, value)| (name.to_string(), value.to_string()));
    /// let found = RankEnvironment::from_variables(&variables.into())?.unwrap();
    /// assert_eq!((found.rank, found.world_size, &*found.master_addr), (5, 8, "node07"));
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    ///
    /// The job's id is torchrun's `TORCHELASTIC_RUN_ID`, Open MPI's `PMIX_NAMESPACE`, `PALS_APID`, Intel MPI's
    /// `I_MPI_HYDRA_UUID`, or Slurm's `SLURM_JOB_ID` with `SLURM_STEP_ID`, by the launcher that has numbered the ranks;
    /// where it has none, one made of `FERROTRON_JOB_SECRET`.
    ///
    /// Errors if what is needed is missing, is no number, or contradicts itself.
    pub fn from_variables(variables: &BTreeMap<String, String>) -> Result<Option<RankEnvironment>> {
        let variables = Variables(variables);
        let known = match variables.slurm_counts() {
            true => LAUNCHERS,
            false => &LAUNCHERS[..LAUNCHERS.len() - 1],
        };
        let first = |names: fn(&Launcher) -> &'static [&'static str]| {
            known
                .iter()
                .find_map(|launcher| variables.number(names(launcher)).transpose())
                .transpose()
        };
        let Some((rank_name, rank)) = first(|launcher| launcher.rank)? else {
            return match variables.number(&["WORLD_SIZE"])? {
                Some((name, size)) if size > 1 => Err(refuse(format!(
                    "{name} is {size}, but no variable says which rank this is: set RANK"
                ))),
                _ => Ok(None),
            };
        };
        let Some((size_name, world_size)) = first(|launcher| launcher.world_size)? else {
            return Err(refuse(format!(
                "{rank_name} is {rank}, but no variable says how many ranks there are: set WORLD_SIZE"
            )));
        };
        if rank >= world_size {
            return Err(refuse(format!("{rank_name} is {rank}, but {size_name} is {world_size}")));
        }
        // The number of a rank and another launcher's number of ranks may belong to different jobs.
        let own = known.iter().find(|launcher| launcher.rank.contains(&rank_name));
        if let Some((own_name, own)) =
            own.map(|own| variables.number(own.world_size)).transpose()?.flatten()
            && own != world_size
        {
            return Err(refuse(format!(
                "{size_name} is {world_size}, but {own_name}, which comes with {rank_name}, is {own}"
            )));
        }
        let local_size = match first(|launcher| launcher.local_size)? {
            None if variables.slurm_counts() => slurm_local_size(&variables)?,
            found => found,
        };
        let local_rank = first(|launcher| launcher.local_rank)?;
        let (local_name, local_rank) =
            local_rank.unwrap_or(("the number of the rank on its machine", 0));
        if let Some((name, size)) = local_size {
            if local_rank >= size {
                return Err(refuse(format!("{local_name} is {local_rank}, but {name} is {size}")));
            }
            if size > world_size {
                return Err(refuse(format!("{name} is {size}, but {size_name} is {world_size}")));
            }
        }
        let local_size = if world_size == 1 { Some(1) } else { local_size.map(|(_, size)| size) };
        let master_port = match variables.first(&["MASTER_PORT"]) {
            Some((name, port)) => {
                Some(port.parse().map_err(|_| refuse(format!("{name} '{port}' is no port")))?)
            }
            None => None,
        };
        let master_addr = master_address(&variables, local_size == Some(world_size))?;
        let job_id = own.and_then(|own| own.job.job_id(&variables));
        Ok(Some(RankEnvironment {
            rank,
            world_size,
            local_rank,
            local_size,
            master_addr,
            master_port,
            job_id,
        }))
    }

    /// The configuration by which this rank meets the others, at [`RankEnvironment::rendezvous_port`] and with this timeout:
    /// without a secret, and with the transport and the encryption that are the defaults.
    ///
    /// Errors as the port does.
    pub fn rank_config(&self, port: Option<u16>, timeout: Duration) -> Result<RankConfig> {
        Ok(RankConfig {
            rank: self.rank,
            size: self.world_size,
            master: self.master_addr.clone(),
            port: self.rendezvous_port(port)?,
            secret: None,
            job_id: self.job_id.clone(),
            transport: Transport::default(),
            encryption: Encryption::default(),
            world: WorldConfig { timeout },
        })
    }

    /// Returns the port at which rank 0 listens: `asked`, else the port after `MASTER_PORT`, else one from the job's
    /// id. That is 20000 + the first 8 bytes of its SHA-256, as a big-endian number, modulo 9000.
    ///
    /// If all ranks are on this machine, and the system may give the port after `MASTER_PORT` to any connection (as
    /// behind the port that `torchrun --standalone` finds), the port is the one of the job's id and `MASTER_PORT`, with a
    /// blank between them.
    ///
    /// Errors if none of these is there, or is no port.
    pub fn rendezvous_port(&self, asked: Option<u16>) -> Result<u16> {
        let one_machine = self.local_size == Some(self.world_size);
        let of_connections = |port| one_machine && port >= first_connection_port() - 1;
        match (asked, self.master_port, &self.job_id) {
            (Some(0), ..) => Err(refuse("--rendezvous-port must be positive, got 0".to_string())),
            (Some(port), ..) => Ok(port),
            (None, Some(port), Some(job_id)) if of_connections(port) => {
                Ok(job_id::port(&format!("{job_id} {port}")))
            }
            (None, Some(port), _) => port.checked_add(1).ok_or_else(|| {
                refuse(format!(
                    "there is no port behind MASTER_PORT {port}: give --rendezvous-port"
                ))
            }),
            (None, None, Some(job_id)) => Ok(job_id::port(job_id)),
            (None, None, None) => Err(refuse(format!(
                "rank {} of {} has no port to meet the others at, and no job id to choose one by: give all ranks \
                 --rendezvous-port PORT, MASTER_PORT or {JOB_SECRET}, others than other jobs have",
                self.rank, self.world_size
            ))),
        }
    }
}

fn slurm_local_size(variables: &Variables) -> Result<Option<(&'static str, usize)>> {
    let list = variables.first(&["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"]);
    let (Some((name, list)), Some((_, node))) = (list, variables.number(&["SLURM_NODEID"])?) else {
        return Ok(None);
    };
    Ok(slurm::tasks_on_node(list, node).map(|tasks| (name, tasks)))
}

fn master_address(variables: &Variables, one_machine: bool) -> Result<String> {
    if one_machine {
        return Ok("127.0.0.1".to_string()); // nothing else on the network can then reach the job
    }
    if let Some((_, address)) = variables.first(&["MASTER_ADDR"]) {
        return Ok(address.to_string());
    }
    match variables.first(&["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"]) {
        Some((name, list)) => slurm::first_host(list)
            .ok_or_else(|| refuse(format!("{name} '{list}' is no list of hosts: set MASTER_ADDR"))),
        None => Err(refuse(
            "the ranks may be on several machines, and no variable says where rank 0 is: set MASTER_ADDR"
                .to_string(),
        )),
    }
}

#[cfg(test)]
mod tests;
