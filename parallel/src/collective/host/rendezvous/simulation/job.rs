//! Runs a scenario.

use ferrotron_tensor::Result;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::task::{LocalSet, spawn_local};
use tokio::time::{Instant, sleep, timeout};

use super::dice::Dice;
use super::faults::{Fault, Scenario, When};
use super::host::{Host, Running};
use super::network::{Life, Volume, Wires};
use super::rank::{Disk, Member, Rank};
use super::stranger;

/// How one process has ended.
#[derive(Debug, Clone)]
pub struct End {
    /// Without an error, or with this one.
    pub result: std::result::Result<(), String>,
    /// The time since the start of the job.
    pub at: Duration,
}

/// How a job has ended.
#[derive(Debug, Default)]
pub struct Outcome {
    /// By rank, and then by second starts of ranks. Those that were killed have none.
    pub ends: Vec<Option<End>>,
    /// Processes that were killed, stopped for ever, or whose machine is off.
    pub victims: Vec<bool>,
    /// Ranks that do not go on though nothing stops them.
    pub stuck: Vec<usize>,
    /// The moments of the faults that have happened.
    pub happened: Vec<(Fault, Duration)>,
    /// The moment at which the last rank has met the others, if all have.
    pub met: Option<Duration>,
    /// The connections and writes of all processes.
    pub volume: Volume,
    /// What is on the disk.
    pub disk: Disk,
    /// Equal for two runs in which the same has happened.
    pub digest: u64,
}

/// The processes of a job while it runs.
struct Job {
    scenario: Arc<Scenario>,
    /// Its first process.
    first: Host,
    disk: Arc<Mutex<Disk>>,
    ends: Arc<Mutex<Vec<Option<End>>>>,
    changed: Arc<Notify>,
    begun: Instant,
}

/// Runs a scenario to its end, with `program` on each rank.
pub fn run<P>(scenario: &Scenario, program: P) -> Outcome
where
    P: AsyncFn(&mut Rank, Member) -> Result<()> + Clone + 'static,
{
    let builder = &mut tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_time().start_paused(true).build().unwrap();
    LocalSet::new().block_on(&runtime, Job::run(Arc::new(scenario.clone()), program))
}

impl Job {
    async fn run<P>(scenario: Arc<Scenario>, program: P) -> Outcome
    where
        P: AsyncFn(&mut Rank, Member) -> Result<()> + Clone + 'static,
    {
        let twins: Vec<_> = scenario.faults.iter().filter_map(|(_, fault)| twin(fault)).collect();
        let ranks: Vec<_> = (0..scenario.size).chain(twins).collect();
        // Strangers share a machine of their own.
        let ips = ranks.iter().map(|rank| scenario.ip(*rank)).chain([[10, 9, 9, 9].into()]);
        let dice = Dice::new(scenario.seed.wrapping_mul(31).wrapping_add(7));
        let packets = scenario.faults.iter().filter(|(when, _)| matches!(when, When::Packet(..)));
        let wires = Wires::new(dice, scenario.weather, ips, packets.cloned().collect());
        let job = Job {
            first: Host::first(wires),
            disk: Arc::default(),
            ends: Arc::new(Mutex::new(vec![None; ranks.len()])),
            changed: Arc::default(),
            begun: Instant::now(),
            scenario,
        };
        for (process, &rank) in ranks.iter().enumerate() {
            job.start(process, rank, program.clone());
        }
        for (when, fault) in &job.scenario.faults {
            if let When::After(time) = *when {
                let (host, fault) = (job.first.other(ranks.len()), fault.clone());
                spawn_local(async move {
                    sleep(time).await;
                    host.wires.state().happen(&fault);
                    if let Fault::Stranger(rank, kind) = fault {
                        stranger::visit(host, rank, kind).await;
                    }
                });
            }
        }
        let limit = 4 * job.scenario.timeout + Duration::from_secs(400);
        let _ = timeout(limit, job.ended(ranks.len())).await;
        job.outcome(ranks.len())
    }

    fn start<P>(&self, process: usize, rank: usize, program: P)
    where
        P: AsyncFn(&mut Rank, Member) -> Result<()> + 'static,
    {
        let is_absent = |fault: &Fault| matches!(fault, Fault::Absent(absent) if *absent == rank);
        let host = self.first.other(process);
        if process < self.scenario.size && self.scenario.has(is_absent) {
            self.first.wires.state().processes[process].life = Life::Killed;
            return;
        }
        let seed = self.scenario.seed ^ ((process as u64 + 1) << 32);
        let mut rank = Rank {
            rank,
            host: host.clone(),
            scenario: self.scenario.clone(),
            disk: self.disk.clone(),
            dice: Dice::new(seed),
        };
        let main = async move { LocalSet::new().run_until(rank.run(program)).await };
        let (ends, changed, begun) = (self.ends.clone(), self.changed.clone(), self.begun);
        let busy = self.scenario.busy;
        spawn_local(async move {
            let running = spawn_local(Running::new(host, busy, main)).await;
            let result = match running {
                Ok(result) => result.map(|result| result.map_err(|error| error.to_string())),
                Err(panic) => Some(Err(format!("panicked: {panic}"))),
            };
            let at = begun.elapsed();
            ends.lock().unwrap()[process] = result.map(|result| End { result, at });
            changed.notify_one();
        });
    }

    /// Waits until all processes have ended but those that are stopped for ever.
    async fn ended(&self, processes: usize) {
        while !self.waited_for(processes).is_empty() {
            self.changed.notified().await;
        }
    }

    /// Processes that have not ended.
    fn waited_for(&self, processes: usize) -> Vec<usize> {
        let ends = self.ends.lock().unwrap();
        let state = self.first.wires.state();
        let is_victim = |process: &usize| is_victim(state.processes[*process].life);
        (0..processes).filter(|process| ends[*process].is_none() && !is_victim(process)).collect()
    }

    fn outcome(self, processes: usize) -> Outcome {
        let stuck = self.waited_for(processes);
        let state = self.first.wires.state();
        let since = |at: Instant| at.duration_since(self.begun);
        Outcome {
            ends: self.ends.lock().unwrap().clone(),
            victims: state.processes.iter().map(|process| is_victim(process.life)).collect(),
            stuck,
            happened: state
                .happened
                .iter()
                .map(|(fault, at)| (fault.clone(), since(*at)))
                .collect(),
            met: state
                .met
                .iter()
                .max()
                .filter(|_| state.met.len() == self.scenario.size)
                .map(|at| since(*at)),
            volume: state.volume,
            disk: self.disk.lock().unwrap().clone(),
            digest: state.digest,
        }
    }
}

impl Scenario {
    /// The address of a rank's machine.
    fn ip(&self, rank: usize) -> IpAddr {
        match self.per_machine >= self.size {
            true => [127, 0, 0, 1].into(),
            false => [10, 0, 0, 1 + (rank / self.per_machine) as u8].into(),
        }
    }
}

fn is_victim(life: Life) -> bool {
    matches!(life, Life::Killed | Life::Off(_) | Life::Stopped(None))
}

/// The rank that a fault starts twice.
pub fn twin(fault: &Fault) -> Option<usize> {
    match *fault {
        Fault::Twice(rank) => Some(rank),
        _ => None,
    }
}
