//! A simulated rank: it meets the others, runs a program, and takes leave.

use ferrotron_tensor::{DType, Device, Error, Result, Tensor};
use std::collections::{BTreeMap, HashSet};
use std::panic::Location;
use std::sync::{Arc, LazyLock, Mutex};
use tokio::time::{Instant, sleep};

use super::dice::Dice;
use super::faults::Scenario;
use super::host::Host;
use crate::collective::host::WorldConfig;
use crate::collective::host::rendezvous::net_rendezvous::NetRendezvous;
use crate::collective::host::rendezvous::network::Network;
use crate::collective::host::rendezvous::{Encryption, RankConfig, Transport, leave, meet_in};
use crate::collective::host::runtime::group_task::GroupTask;
use crate::collective::host::runtime::world_health::WorldHealth;
use crate::collective::host::transport::peer_channels::PeerChannels;
use crate::collective::{Buffer, Call, Memory, Op, Reduction};

/// The port of rank 0.
const PORT: u16 = 29_400;

/// The device of all ranks: one of their own would cost more than all else.
static DEVICE: LazyLock<Device> = LazyLock::new(|| Device::cpu(1).expect("one thread"));

/// What the disk of the job holds.
#[derive(Debug, Clone, Default)]
pub struct Disk {
    /// Shares of a checkpoint, by rank: how often each was written.
    pub shares: BTreeMap<usize, usize>,
    /// Whether rank 0 has published the checkpoint, and how many shares there were then.
    pub published: Option<usize>,
}

/// One start of a rank.
pub struct Rank {
    /// Its number.
    pub rank: usize,
    /// Its process.
    pub host: Host,
    /// The job.
    pub scenario: Arc<Scenario>,
    /// The disk that all ranks share.
    pub disk: Arc<Mutex<Disk>>,
    /// Its random numbers.
    pub dice: Dice,
}

/// What a rank that has met the others makes groups of.
pub struct Member {
    shared: Arc<WorldHealth>,
    rendezvous: Arc<NetRendezvous>,
    config: RankConfig,
}

/// A group, whose calls wait for one another.
pub struct Team(GroupTask);

impl Rank {
    /// The configuration of a rank of the job.
    fn config(&self) -> RankConfig {
        let master = self.host.wires.state().processes[0].ip.to_string();
        RankConfig {
            rank: self.rank,
            size: self.scenario.size,
            master,
            port: PORT,
            secret: Some("sesame".to_string()),
            job_id: Some("A".to_string()),
            transport: Transport::Tcp,
            encryption: match self.scenario.is_sealed {
                true => Encryption::Always,
                false => Encryption::BetweenHosts,
            },
            world: WorldConfig { timeout: self.scenario.timeout },
        }
    }

    /// Runs the rank as a process does, and `program` when it has met the others.
    pub async fn run(
        &mut self,
        program: impl AsyncFnOnce(&mut Rank, Member) -> Result<()>,
    ) -> Result<()> {
        sleep(self.scenario.starts.mul_f64(self.dice.share())).await;
        let (shared, config) = (WorldHealth::new(), self.config());
        let network = Network::Simulated(self.host.clone());
        let (control, met) = meet_in(network, config.clone(), shared.clone()).await;
        let (result, rendezvous) = match met {
            Ok(rendezvous) => {
                self.host.wires.state().met.push(Instant::now());
                let (shared, rendezvous) = (shared.clone(), rendezvous.clone());
                let member = Member { shared, rendezvous: rendezvous.clone(), config };
                (program(self, member).await, Some(rendezvous))
            }
            Err(error) => (Err(error), None),
        };
        if let Err(error) = &result {
            shared.fail(&format!("rank {} ended with an error: {error}", self.rank));
        }
        leave(control, rendezvous, self.scenario.timeout).await;
        result
    }
}

impl Member {
    /// Forms a group.
    pub fn team(&self, name: &str, ranks: &[usize]) -> Team {
        let RankConfig { rank, world, .. } = &self.config;
        let own = ranks.iter().position(|member| member == rank).expect("a rank of its groups");
        let bytes = name.bytes().map(u64::from).chain([ranks[0] as u64, ranks.len() as u64]);
        let id = bytes.fold(7_u64, |id, byte| id.wrapping_mul(257).wrapping_add(byte));
        let ranks = Arc::<[usize]>::from(ranks);
        let task = GroupTask {
            name: Arc::from(name),
            id,
            links: PeerChannels::new(id, own, ranks.clone(), self.rendezvous.clone()),
            ranks,
            shared: self.shared.clone(),
            rendezvous: self.rendezvous.clone(),
            timeout: world.timeout,
            traffic: Arc::default(),
            familiar: HashSet::new(),
        };
        task.announce();
        Team(task)
    }
}

impl Team {
    #[track_caller]
    fn call(op: Op, len: usize) -> Call {
        Call { op, dtype: DType::F32, len, unit: 1, site: Location::caller() }
    }

    /// All-reduces `len` times this rank's number.
    pub async fn sum(&mut self, len: usize) -> Result<()> {
        let (rank, want): (_, usize) = (self.0.links.world_rank, self.0.ranks.iter().sum());
        let call = Team::call(Op::AllReduce(Reduction::Sum), len);
        let sums = self.carry_out(&call, rank as f32).await?;
        assert!(sums.iter().all(|&sum| sum == want as f32), "{sums:?} where {want} is right");
        Ok(())
    }

    /// Returns whether any of the ranks says so.
    pub async fn any(&mut self, own: bool) -> Result<bool> {
        let call = Team::call(Op::AllReduce(Reduction::Max), 1);
        Ok(self.carry_out(&call, f32::from(own)).await? != [0.0])
    }

    /// Waits for all.
    pub async fn all(&mut self) -> Result<()> {
        if self.0.ranks.len() == 1 {
            return Ok(());
        }
        self.0.carry_out(&Team::call(Op::Barrier, 0), &mut Memory::default()).await
    }

    /// Receives six numbers of a rank.
    pub async fn recv(&mut self, from: usize) -> Result<()> {
        self.carry_out(&Team::call(Op::Recv { from }, 6), 0.0).await.map(drop)
    }

    async fn carry_out(&mut self, call: &Call, value: f32) -> Result<Vec<f32>> {
        let x = Tensor::full(&DEVICE, DType::F32, &[call.len], f64::from(value))?;
        if self.0.ranks.len() == 1 {
            return x.to_vec();
        }
        let mut memory = Memory::in_place(Buffer::Tensor(x));
        self.0.carry_out(call, &mut memory).await?;
        match memory.output {
            Some(Buffer::Tensor(result)) => result.to_vec(),
            _ => Err(Error::communication("simulation", "the call has lost its memory")),
        }
    }
}
