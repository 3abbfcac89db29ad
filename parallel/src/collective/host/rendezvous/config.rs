//! Configuration of a rank process: its rank, the address of rank 0, and the transport.

use super::super::runtime::world::WorldConfig;

/// The transport of data between processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transport {
    /// Shared memory between processes of one machine, TCP between machines.
    #[default]
    Auto,
    /// TCP, always.
    Tcp,
}

/// The connections between ranks whose bytes nobody else can read or change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum Encryption {
    /// Those between machines.
    #[default]
    BetweenHosts,
    /// All, but for shared memory. One rank that wants it is enough.
    Always,
    /// None, if no rank wants otherwise: the network between machines must be trusted.
    Never,
}

/// The place of this process in its job.
#[derive(Debug, Clone)]
pub struct RankConfig {
    /// This rank's number, from 0.
    pub rank: usize,
    /// Number of ranks of the job.
    pub size: usize,
    /// Name or address of the machine of rank 0.
    pub master: String,
    /// Port at which rank 0 listens.
    pub port: u16,
    /// The secret that only the ranks of the job know. Without it, or if it is empty, ranks use only the loopback
    /// interface and trust every process that can connect there.
    pub secret: Option<String>,
    /// The job's id, if it has one: a rank of another job, at the same port by mistake, is refused.
    pub job_id: Option<String>,
    /// The transport of data.
    pub transport: Transport,
    /// The connections that are encrypted, by keys that follow from the secret and random numbers.
    pub encryption: Encryption,
    /// The configuration that all ranks have alike. Its timeout also bounds the rendezvous.
    pub world: WorldConfig,
}
