//! Configuration of a rank process: its rank, the address of rank 0, and the transport.

use std::fmt;

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
#[derive(Clone)]
pub struct RankConfig {
    /// This rank's number, from 0.
    pub rank: usize,
    /// Number of ranks of the job.
    pub size: usize,
    /// Name or address of the machine of rank 0.
    pub master: String,
    /// Port at which rank 0 listens.
    pub port: u16,
    /// The secret that only the ranks of the job know: at least 128 random bits, since a secret that can be guessed can be
    /// tried out. Without it, or if it is empty, ranks use only the loopback interface and trust every process that can
    /// connect there.
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

/// Everything but the secret, which must not come into logs.
impl fmt::Debug for RankConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RankConfig { rank, size, master, port, secret, job_id, transport, encryption, world } =
            self;
        f.debug_struct("RankConfig")
            .field("rank", rank)
            .field("size", size)
            .field("master", master)
            .field("port", port)
            .field("secret", &secret.as_ref().map(|_| "..."))
            .field("job_id", job_id)
            .field("transport", transport)
            .field("encryption", encryption)
            .field("world", world)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_does_not_have_the_secret() {
        let config = RankConfig {
            rank: 1,
            size: 2,
            master: "localhost".to_string(),
            port: 21000,
            secret: Some("sesame".to_string()),
            job_id: None,
            transport: Transport::Auto,
            encryption: Encryption::Always,
            world: WorldConfig::default(),
        };
        let text = format!("{config:?}");
        assert!(text.contains(r#"secret: Some("...")"#) && !text.contains("sesame"), "{text}");
    }
}
