//! Whole jobs of simulated processes, in a simulated network and in simulated time: a seed decides about everything.
//!
//! Each rank runs the code that a process runs, from the meeting to the last goodbye, on a runtime whose clock is paused and
//! goes on when nobody has anything to do. Only the system is replaced: connections ([`wire`], [`stream`], [`exchange`]), those who listen
//! and processes that are stopped or killed ([`host`]), and the state of all that ([`network`]). [`faults`] draws what goes
//! wrong, [`job`] runs it with [`training`] on each rank, and [`verdict`] says whether the ranks did what they must.
//! [`cases`] are single things that went wrong, or might have.
//!
//! ```text
//!  seed --> scenario --> job: ranks and strangers --> outcome --> verdict
//!                         |  connections, clock
//!                         +--> network: packets that are late or lost, processes that end
//! ```

mod cases;
mod dice;
mod exchange;
mod faults;
mod host;
mod job;
mod network;
mod rank;
mod stranger;
mod stream;
mod tests;
mod training;
mod verdict;
mod wire;

pub use exchange::resolver;
pub use host::{Host, SimulatedListener};
pub use stream::SimulatedStream;

use super::network::Network;
use dice::Dice;
use faults::Scenario;
use network::Wires;
use std::time::Duration;
use tokio::task::LocalSet;

/// Runs a test in simulated time, with as many processes of one machine as networks are asked for.
pub fn in_calm_networks<const N: usize>(test: impl AsyncFnOnce([Network; N])) {
    let builder = &mut tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_time().start_paused(true).build().unwrap();
    LocalSet::new().block_on(&runtime, async {
        let weather = Scenario::calm(N, Duration::ZERO).weather;
        let ips = [[127, 0, 0, 1].into(); N].into_iter();
        let wires = Wires::new(Dice::new(0), weather, ips, Vec::new());
        let first = Host::first(wires);
        test(std::array::from_fn(|process| Network::Simulated(first.other(process)))).await;
    });
}
