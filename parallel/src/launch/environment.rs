//! Which rank a process is, from the environment variables of whoever has started it.

use ferrotron_tensor::{Error, Result};
use std::collections::BTreeMap;

use super::slurm;

/// Where rank 0 listens if nothing says where: the port behind torchrun's default for `MASTER_PORT`, 29500.
pub const DEFAULT_PORT: u16 = 29501;

/// Which rank of which job a process is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankEnvironment {
    /// This rank's number, from 0.
    pub rank: usize,
    /// How many ranks the job has.
    pub world_size: usize,
    /// Its number among the ranks of this machine. A rank alone, or whose launcher does not tell, has 0.
    pub local_rank: usize,
    /// How many ranks this machine has, if the launcher tells.
    pub local_size: Option<usize>,
    /// Name or address of rank 0's machine.
    pub master_addr: String,
    /// `MASTER_PORT`: torchrun's own store listens there.
    pub master_port: Option<u16>,
}

/// The variables of one launcher, each by its names in order of preference.
struct Launcher {
    rank: &'static [&'static str],
    world_size: &'static [&'static str],
    local_rank: &'static [&'static str],
    local_size: &'static [&'static str],
}

/// In order of precedence. Slurm comes last: where mpirun runs in a job of Slurm, the ranks inherit the
/// variables of the task that started them.
const LAUNCHERS: &[Launcher] = &[
    // torchrun and `launch`.
    Launcher {
        rank: &["RANK"],
        world_size: &["WORLD_SIZE"],
        local_rank: &["LOCAL_RANK"],
        local_size: &["LOCAL_WORLD_SIZE"],
    },
    // Open MPI.
    Launcher {
        rank: &["OMPI_COMM_WORLD_RANK"],
        world_size: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
    },
    // MPICH, Intel MPI, Cray PALS.
    Launcher {
        rank: &["PMI_RANK", "PMIX_RANK"],
        world_size: &["PMI_SIZE"],
        local_rank: &["MPI_LOCALRANKID", "PALS_LOCAL_RANKID"],
        local_size: &["MPI_LOCALNRANKS"],
    },
    // srun. In an interactive step SLURM_NTASKS is that of the allocation.
    Launcher {
        rank: &["SLURM_PROCID"],
        world_size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_rank: &["SLURM_LOCALID"],
        local_size: &[],
    },
];

/// Set by srun for the tasks of a step.
const STEP: &[&str] = &["SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"];

/// Variables, of which empty ones do not count.
struct Variables<'a>(&'a BTreeMap<String, String>);

impl Variables<'_> {
    /// The first of `names` that is set.
    fn first(&self, names: &[&'static str]) -> Option<(&'static str, &str)> {
        names.iter().find_map(|&name| {
            let value = self.0.get(name)?.trim();
            (!value.is_empty()).then_some((name, value))
        })
    }

    fn number(&self, names: &[&'static str]) -> Result<Option<(&'static str, usize)>> {
        let Some((name, value)) = self.first(names) else { return Ok(None) };
        let number = value.parse().map_err(|_| refuse(format!("{name} '{value}' is no number")))?;
        Ok(Some((name, number)))
    }

    /// Whether Slurm's variables speak of this process: a batch script has them too, but is no rank.
    fn slurm_counts(&self) -> bool {
        let task = self.first(&["SLURM_PROCID"]);
        task.is_some_and(|(_, task)| task != "0")
            || self.first(STEP).is_some()
            || self.first(&["MASTER_ADDR"]).is_some()
    }
}

impl RankEnvironment {
    /// Which rank the process with these environment variables is; `None` if no launcher has started it.
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
        Ok(Some(RankEnvironment {
            rank,
            world_size,
            local_rank,
            local_size,
            master_addr,
            master_port,
        }))
    }

    /// Where rank 0 listens: `asked`, else the port behind `MASTER_PORT`, else [`DEFAULT_PORT`].
    ///
    /// Errors if there is no port behind `MASTER_PORT`.
    pub fn rendezvous_port(&self, asked: Option<u16>) -> Result<u16> {
        match (asked, self.master_port) {
            (Some(port), _) => Ok(port),
            (None, Some(port)) => port.checked_add(1).ok_or_else(|| {
                refuse(format!(
                    "there is no port behind MASTER_PORT {port}: give --rendezvous-port"
                ))
            }),
            (None, None) => Ok(DEFAULT_PORT),
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

fn refuse(why: String) -> Error {
    Error::config("environment", why)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &str) -> Result<Option<RankEnvironment>> {
        let pair = |word: &str| {
            let (name, value) = word.split_once('=').unwrap();
            (name.to_string(), value.to_string())
        };
        RankEnvironment::from_variables(&variables.split_whitespace().map(pair).collect())
    }

    /// rank/size, local rank/local size, address, port to meet at.
    fn text(found: &RankEnvironment) -> String {
        let RankEnvironment { rank, world_size, local_rank, local_size, master_addr, .. } = found;
        let local = local_size.map_or("?".to_string(), |size| size.to_string());
        let port = found.rendezvous_port(None).unwrap();
        format!("{rank}/{world_size} {local_rank}/{local} {master_addr}:{port}")
    }

    #[test]
    fn ranks_of_every_launcher() {
        for (variables, want) in [
            (
                "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=node7 MASTER_PORT=29500",
                "5/8 1/4 node7:29501",
            ),
            // On one machine, what torchrun calls it does not matter.
            (
                "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=box.lan MASTER_PORT=4000",
                "1/2 1/2 127.0.0.1:4001",
            ),
            ("RANK=0 WORLD_SIZE=1", "0/1 0/1 127.0.0.1:29501"),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1", "0/2 0/? 10.0.0.1:29501"),
            // mpirun on one machine, and on two.
            (
                "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3 \
                 OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_RANK=3",
                "3/4 3/4 127.0.0.1:29501",
            ),
            (
                "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 \
                 OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=7000",
                "3/4 1/2 node1:7001",
            ),
            // mpirun in a job of Slurm: the tasks that start the ranks have numbers of their own.
            (
                "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 \
                 OMPI_COMM_WORLD_LOCAL_SIZE=2 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-2]",
                "3/4 1/2 n1:29501",
            ),
            (
                "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2",
                "1/2 1/2 127.0.0.1:29501",
            ),
            ("PMI_RANK=6 PMI_SIZE=8 PALS_LOCAL_RANKID=2 MASTER_ADDR=x1000", "6/8 2/? x1000:29501"),
            ("PMIX_RANK=1 PMI_SIZE=2 MASTER_ADDR=a", "1/2 0/? a:29501"),
            // srun over four nodes, on one, and with its pmix plugin.
            (
                "SLURM_PROCID=5 SLURM_NTASKS=7 SLURM_LOCALID=1 SLURM_NODEID=2 \
                 SLURM_STEP_TASKS_PER_NODE=2(x3),1 SLURM_STEP_NODELIST=node[01-04,7]",
                "5/7 1/2 node01:29501",
            ),
            (
                "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_NODEID=0 \
                 SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=node3",
                "1/2 1/2 127.0.0.1:29501",
            ),
            (
                "PMIX_RANK=1 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_STEP_NODELIST=a,b",
                "1/2 0/? a:29501",
            ),
            // A script that says some of it in torchrun's names and lets srun count.
            (
                "WORLD_SIZE=4 MASTER_ADDR=head MASTER_PORT=1234 SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_LOCALID=1",
                "3/4 1/? head:1235",
            ),
            // RANK goes before SLURM_PROCID, as in Megatron-LM.
            (
                "RANK=2 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=head \
                 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_ID=0",
                "2/4 0/2 head:29501",
            ),
            // One task in an interactive step of an allocation for four.
            ("SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=1", "0/1 0/1 127.0.0.1:29501"),
        ] {
            let found = read(variables).unwrap_or_else(|error| panic!("{variables}: {error}"));
            assert_eq!(found.map(|found| text(&found)).as_deref(), Some(want), "{variables}");
        }
    }

    #[test]
    fn a_process_that_nobody_has_started_as_a_rank() {
        for variables in [
            "",
            "WORLD_SIZE=1",
            "RANK= WORLD_SIZE=",
            "MASTER_ADDR=a MASTER_PORT=1",
            "SLURM_NTASKS=4 SLURM_JOB_NODELIST=n[1-2]",
            // The batch script itself.
            "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_JOB_NODELIST=gnode[10,20]",
        ] {
            assert_eq!(read(variables).unwrap(), None, "{variables}");
        }
    }

    #[test]
    fn what_is_missing_or_contradicts_itself_is_named() {
        for (variables, named) in [
            ("WORLD_SIZE=4", &["WORLD_SIZE is 4", "set RANK"][..]),
            ("RANK=1", &["RANK is 1", "set WORLD_SIZE"]),
            ("PMIX_RANK=1", &["PMIX_RANK is 1", "set WORLD_SIZE"]),
            ("RANK=4 WORLD_SIZE=4", &["RANK is 4", "WORLD_SIZE is 4"]),
            ("RANK=-1 WORLD_SIZE=4", &["RANK '-1'"]),
            ("RANK=0 WORLD_SIZE=four", &["WORLD_SIZE 'four'"]),
            ("RANK=0 WORLD_SIZE=0", &["RANK is 0", "WORLD_SIZE is 0"]),
            ("RANK=0 WORLD_SIZE=2", &["set MASTER_ADDR"]),
            (
                "RANK=0 WORLD_SIZE=2 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2",
                &["LOCAL_RANK is 2", "LOCAL_WORLD_SIZE is 2"],
            ),
            (
                "RANK=0 WORLD_SIZE=2 LOCAL_RANK=2 LOCAL_WORLD_SIZE=4",
                &["LOCAL_WORLD_SIZE is 4", "WORLD_SIZE is 2"],
            ),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=http", &["MASTER_PORT 'http'"]),
            (
                "WORLD_SIZE=8 MASTER_ADDR=a SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_STEP_ID=0",
                &["WORLD_SIZE is 8", "SLURM_NTASKS", "SLURM_PROCID", "is 4"],
            ),
            ("SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_NODELIST=n[", &["SLURM_STEP_NODELIST 'n['"]),
            ("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2", &["set MASTER_ADDR"]),
        ] {
            let error = read(variables).unwrap_err().to_string();
            assert!(!error.contains('\n'), "{error}");
            for part in named {
                assert!(error.contains(part), "{variables}: {part} is missing in: {error}");
            }
        }
    }

    #[test]
    fn the_port_is_the_one_asked_for_or_behind_torchruns() {
        let last = read("RANK=0 WORLD_SIZE=1 MASTER_PORT=65535").unwrap().unwrap();
        assert_eq!(last.rendezvous_port(Some(77)).unwrap(), 77);
        let error = last.rendezvous_port(None).unwrap_err().to_string();
        assert!(error.contains("65535") && error.contains("--rendezvous-port"), "{error}");
    }
}
