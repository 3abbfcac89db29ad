//! What a process is told of its job: which rank it is, where the others are, and what carries data.

use super::super::runtime::world::WorldConfig;

/// What carries data between processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transport {
    /// Shared memory between processes of one machine, TCP between machines.
    #[default]
    Auto,
    /// TCP, always.
    Tcp,
}

/// Which rank of which job this process is.
#[derive(Debug, Clone)]
pub struct RankConfig {
    /// This rank's number, from 0.
    pub rank: usize,
    /// How many ranks the job has.
    pub size: usize,
    /// Name or address of the machine of rank 0.
    pub master: String,
    /// Where rank 0 listens.
    pub port: u16,
    /// What all ranks of the job know and nobody else does. Without it, or if it is empty, only the loopback
    /// interface is used, and whoever can connect there is trusted.
    pub secret: Option<String>,
    /// The job's id, if it has one: a rank of another job, at the same port by mistake, is refused.
    pub job_id: Option<String>,
    /// What carries data.
    pub transport: Transport,
    /// What all ranks agree on. Its timeout also holds for ranks to come together.
    pub world: WorldConfig,
}
