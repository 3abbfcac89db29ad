//! A world whose ranks are processes, on one machine or on several.

mod auth;
mod config;
mod connect;
mod connection;
mod connections;
mod control;
mod frame;
pub mod fuzzing;
mod join;
mod listen;
mod net_rendezvous;
mod network;
mod pipes;
#[cfg(test)]
mod simulation;
mod welcome;

pub use config::{Encryption, RankConfig, Transport};

use ferrotron_tensor::{Error, Result};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tokio::task::spawn_local;
use tokio::time::sleep;

use super::runtime::progress::ProgressThread;
use super::runtime::run_rank::run_rank;
use super::runtime::world::World;
use super::runtime::world_health::WorldHealth;
use crate::descriptors;
use auth::Secret;
use connect::{Connector, PAUSE};
use control::Control;
use control::heartbeat::Heartbeat;
use join::{CONNECTING, Met};
use net_rendezvous::NetRendezvous;
use network::Network;

/// Runs `f` as one rank of a job of several processes, when all have come together. If `f` returns an error
/// or panics, the calls of all other ranks end.
///
/// ```
/// use ferrotron_parallel::collective::{Encryption, RankConfig, Transport, WorldConfig, run_rank_process};
/// let config = RankConfig {
///     rank: 0, // of one: there is no other rank to wait for
///     size: 1,
///     master: "127.0.0.1".into(),
///     port: 0,
///     secret: None,
///     job_id: None,
///     transport: Transport::Auto,
///     encryption: Encryption::BetweenHosts,
///     world: WorldConfig::default(),
/// };
/// run_rank_process(&config, |world| Ok(assert_eq!(world.size(), 1)))?;
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// The soft limit of open files is raised if the job may need more.
///
/// Errors, naming the ranks, if not all come within the timeout; and if the limit of open files is too low.
pub fn run_rank_process<T>(config: &RankConfig, f: impl FnOnce(World) -> Result<T>) -> Result<T> {
    let (mut f, mut result) = (Some(f), None);
    run_process(config, &mut |world| {
        let f = f.take().expect("a rank is run once");
        result = Some(f(world)?);
        Ok(())
    })?;
    Ok(result.expect("a rank without an error has left its result"))
}

/// [`run_rank_process`], compiled once for whatever the rank does and returns.
fn run_process(config: &RankConfig, f: &mut dyn FnMut(World) -> Result<()>) -> Result<()> {
    let RankConfig { rank, size, .. } = *config;
    if rank >= size {
        return Err(Error::config("rendezvous", format!("there is no rank {rank} of {size}")));
    }
    if size > 1 {
        descriptors::provide(size)?;
    }
    let shared = WorldHealth::new();
    let progress = Arc::new(ProgressThread::start(rank, shared.clone())?);
    let meeting = meet(config, &shared, &progress)?;
    let world = World::new(rank, size, &config.world, shared.clone(), progress.clone(), meeting);
    // `progress` outlives the world: what `f` returns is told to the others before this rank leaves.
    run_rank(rank, &shared, || f(world))
}

fn meet(
    config: &RankConfig,
    shared: &Arc<WorldHealth>,
    progress: &ProgressThread,
) -> Result<Arc<NetRendezvous>> {
    let (sender, receiver) = mpsc::channel();
    let (config, shared, timeout) = (config.clone(), shared.clone(), config.world.timeout);
    progress.serve(move || async move {
        let _ = sender.send(meet_in(Network::System, config, shared).await);
    });
    let gone = |_| Error::communication("rendezvous", "the progress thread has ended");
    let (control, met) = receiver.recv().map_err(gone)?;
    let rendezvous = met.as_ref().ok().cloned();
    progress.at_end(move || leave(control, rendezvous, timeout));
    met
}

/// Meets the others in a network. Returns the rank's messages, and its connections if all have met. Must be called on the
/// progress thread.
async fn meet_in(
    network: Network,
    config: RankConfig,
    shared: Arc<WorldHealth>,
) -> (Arc<Control>, Result<Arc<NetRendezvous>>) {
    let RankConfig { rank, size, .. } = config;
    let control = Control::start(rank, size, &shared);
    let secret = Secret::new(config.secret.as_deref(), config.encryption);
    let connector = Connector { network, secret };
    let met = join::meet(&config, CONNECTING, &connector, &shared, &control).await;
    match &met {
        Ok(_) => {
            spawn_local(control.clone().beat(Heartbeat::of(config.world.timeout)));
        }
        Err(error) => {
            shared.fail(&error.to_string()); // those who have come already wait for the others
            sleep(PAUSE).await; // they, and those who are being let in, hear it
        }
    }
    let rendezvous = met.map(|Met { first, connections }| {
        let (transport, job_id, control) = (config.transport, config.job_id, control.clone());
        Arc::new(NetRendezvous { rank, first, connector, job_id, transport, connections, control })
    });
    (control, rendezvous)
}

/// Leaves the others: closes connections that no call has taken, and says goodbye.
async fn leave(control: Arc<Control>, rendezvous: Option<Arc<NetRendezvous>>, timeout: Duration) {
    if let Some(rendezvous) = rendezvous {
        rendezvous.connections.close_all();
    }
    control.leave(timeout).await;
}
