//! The world: all ranks of a job, and how they come to form groups.

use ferrotron_tensor::{Error, Result};
use sha2::{Digest, Sha256};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use crate::collective::host::runtime::group_task::GroupTask;
use crate::collective::host::runtime::progress::ProgressThread;
use crate::collective::host::runtime::queue::HostCollective;
use crate::collective::host::runtime::rendezvous::Rendezvous;
use crate::collective::host::runtime::world_health::WorldHealth;
use crate::collective::host::transport::connect::GroupId;
use crate::collective::host::transport::peer_channels::PeerChannels;
use crate::collective::{ControlVolume, Group};

/// The configuration that all ranks of a world have alike.
#[derive(Debug, Clone)]
pub struct WorldConfig {
    /// Time limit of a call, from when it is the first in its group's queue. A call that exceeds it is an error that
    /// names the missing ranks.
    pub timeout: Duration,
}

impl Default for WorldConfig {
    /// 10 minutes, as Megatron-LM's `--distributed-timeout-minutes`.
    fn default() -> WorldConfig {
        WorldConfig { timeout: Duration::from_secs(600) }
    }
}

/// One rank's view of all ranks of a job: its number, their number, and how it forms groups with others.
///
/// When one rank fails, all do: every pending and every later call on every rank returns an error with the
/// same reason, and says which call it was.
/// Dropping a world and its groups waits until this rank's calls have ended.
pub struct World {
    rank: usize,
    size: usize,
    config: WorldConfig,
    shared: Arc<WorldHealth>,
    rendezvous: Arc<dyn Rendezvous>,
    progress: Arc<ProgressThread>,
    /// Number of this rank's groups so far, by a digest of name and ranks.
    made: Mutex<HashMap<[u8; 32], u64>>,
    everyone: OnceLock<Group>,
}

impl World {
    pub(in crate::collective::host) fn new(
        rank: usize,
        size: usize,
        config: &WorldConfig,
        shared: Arc<WorldHealth>,
        progress: Arc<ProgressThread>,
        meeting: Arc<dyn Rendezvous>,
    ) -> World {
        let config = config.clone();
        World {
            rank,
            size,
            config,
            shared,
            rendezvous: meeting,
            progress,
            made: Mutex::default(),
            everyone: OnceLock::new(),
        }
    }

    /// This rank's number in the job.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Counts this rank's connections, and its messages that belong to no call: none between threads.
    pub fn control_traffic(&self) -> ControlVolume {
        self.rendezvous.traffic()
    }

    /// Number of ranks of the job.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the group of all ranks, "world", which the first call forms: all ranks make that one together.
    ///
    /// # Errors
    /// Those of [`World::group`].
    pub fn everyone(&self) -> Result<Group> {
        if let Some(group) = self.everyone.get() {
            return Ok(group.clone());
        }
        let group = self.group("world", &(0..self.size).collect::<Vec<_>>())?;
        Ok(self.everyone.get_or_init(|| group).clone())
    }

    /// Forms the group of `ranks` with the others in it, who call this with the same arguments. Numbers
    /// within the group follow the order of `ranks`. `name` stands in error messages.
    ///
    /// Returns at once: members connect when a call needs them to. The world remembers each different name with ranks, in
    /// 40 bytes, for as long as it lives: a name need not be new for each group.
    ///
    /// Errors if this rank is not among `ranks`, or if they are not different ranks of the world.
    pub fn group(&self, name: &str, ranks: &[usize]) -> Result<Group> {
        let invalid = |what: String| {
            Err(Error::config("group", format!("group {name} of ranks {ranks:?}: {what}")))
        };
        let mut seen = vec![false; self.size];
        for &rank in ranks {
            match seen.get_mut(rank) {
                None => return invalid(format!("there are only {} ranks", self.size)),
                Some(true) => return invalid(format!("rank {rank} occurs twice")),
                Some(seen) => *seen = true,
            }
        }
        let Some(own) = ranks.iter().position(|&rank| rank == self.rank) else {
            return invalid(format!("rank {} is not among them", self.rank));
        };
        if ranks.len() == 1 {
            return Ok(Group::single());
        }
        self.shared.check().map_err(|reason| {
            let what = format!("{reason}; rank {} was making group {name}", self.rank);
            Error::communication("", what)
        })?;
        let (id, ranks) = (self.id(name, ranks), Arc::<[usize]>::from(ranks));
        let member = GroupTask {
            name: Arc::from(name),
            id,
            links: PeerChannels::new(id, own, ranks.clone(), self.rendezvous.clone()),
            ranks,
            shared: self.shared.clone(),
            rendezvous: self.rendezvous.clone(),
            timeout: self.config.timeout,
            traffic: Arc::default(),
            familiar: HashSet::new(),
        };
        member.announce();
        Ok(Group::new(Arc::new(HostCollective::new(member, &self.progress))))
    }

    /// The number of a group, different from those of all others, also of earlier ones of the same name and ranks.
    fn id(&self, name: &str, ranks: &[usize]) -> GroupId {
        let mut hash = Sha256::new_with_prefix(name);
        ranks.iter().for_each(|&rank| hash.update((rank as u64).to_le_bytes()));
        let key = <[u8; 32]>::from(hash.clone().finalize());
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let count: &mut u64 = made.entry(key).or_default();
        *count += 1;
        hash.update(count.to_le_bytes());
        let digest = <[u8; 32]>::from(hash.finalize());
        GroupId::from_le_bytes(std::array::from_fn(|index| digest[index]))
    }
}
