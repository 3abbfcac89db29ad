//! A world whose ranks are threads of this process.

use ferrotron_tensor::{Error, Result};
use std::collections::HashMap;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use crate::collective::host::runtime::progress::ProgressThread;
use crate::collective::host::runtime::rendezvous::Rendezvous;
use crate::collective::host::runtime::run_rank::{panicked, run_rank};
use crate::collective::host::runtime::world::{World, WorldConfig};
use crate::collective::host::runtime::world_health::{Entry, Reply, WorldHealth};
use crate::collective::host::transport::channel::{
    RecvChannel, RecvChannelKind, SendChannel, SendChannelKind,
};
use crate::collective::host::transport::local;
use crate::collective::host::transport::peer_channels::PeerChannels;

/// Runs `f` once for each of `size` ranks, each on a thread of its own, and returns what they return, in
/// order. A rank that returns an error or panics ends the calls of all others.
///
/// ```
/// use ferrotron_parallel::collective::{Reduction, WorldConfig, run_threads};
/// use ferrotron_tensor::{Device, Tensor};
/// let sums = run_threads(3, &WorldConfig::default(), |world| {
///     let group = world.group("all", &[0, 1, 2])?;
///     let x = Tensor::full(&Device::cpu(1)?, ferrotron_tensor::DType::F32, &[2], world.rank() as f64)?;
///     group.all_reduce(x, Reduction::Sum)?.wait()?.to_vec::<f32>()
/// });
/// for sum in sums {
///     assert_eq!(sum?, [3.0, 3.0]);
/// }
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn run_threads<T: Send>(
    size: usize,
    config: &WorldConfig,
    f: impl Fn(World) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let results: Vec<Mutex<Option<T>>> = (0..size).map(|_| Mutex::new(None)).collect();
    let ended = run_each(size, config, &|world| {
        let slot = &results[world.rank()];
        let result = f(world)?;
        *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        Ok(())
    });
    let result = |slot: Mutex<Option<T>>| {
        let slot = slot.into_inner().unwrap_or_else(PoisonError::into_inner);
        slot.expect("a rank without an error has left its result")
    };
    ended.into_iter().zip(results).map(|(ended, slot)| ended.map(|()| result(slot))).collect()
}

/// [`run_threads`], compiled once for whatever ranks do and return.
fn run_each(
    size: usize,
    config: &WorldConfig,
    f: &(dyn Fn(World) -> Result<()> + Sync),
) -> Vec<Result<()>> {
    let shared = WorldHealth::new();
    let meeting: Arc<dyn Rendezvous> =
        Arc::new(ThreadRendezvous { shared: shared.clone(), groups: Mutex::default() });
    let rank_body = |rank| {
        // Outlives the world: how `f` ends is told to the others before calls under way are waited for.
        let mut progress = None;
        run_rank(rank, &shared, || {
            let started = Arc::new(ProgressThread::start(rank, shared.clone())?);
            let progress = progress.insert(started).clone();
            f(World::new(rank, size, config, shared.clone(), progress, meeting.clone()))
        })
    };
    std::thread::scope(|scope| {
        let rank_body = &rank_body;
        let spawn = |rank| {
            let thread = std::thread::Builder::new().name(format!("rank {rank}"));
            thread.spawn_scoped(scope, move || rank_body(rank)).map_err(|error| {
                let what = format!("rank {rank}'s thread cannot be started: {error}");
                shared.fail(&what); // no rank shall wait for it
                Error::communication("run_threads", what)
            })
        };
        let threads: Vec<_> = (0..size).map(spawn).collect();
        let join = |thread: Result<std::thread::ScopedJoinHandle<'_, Result<()>>>| {
            thread?.join().unwrap_or_else(|panic| Err(Error::communication("", panicked(panic))))
        };
        threads.into_iter().map(join).collect()
    })
}

/// Hands channels from thread to thread: the first rank that asks for a group makes those of all.
struct ThreadRendezvous {
    shared: Arc<WorldHealth>,
    groups: Mutex<HashMap<Arc<str>, Vec<Option<PeerChannels>>>>,
}

impl Rendezvous for ThreadRendezvous {
    fn links(
        &self,
        _progress: &ProgressThread,
        id: &Arc<str>,
        own: usize,
        ranks: &[usize],
    ) -> Result<PeerChannels> {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let links = groups.entry(id.clone()).or_insert_with(|| make_links(ranks));
        let taken = links[own].take();
        if links.iter().all(Option::is_none) {
            groups.remove(id);
        }
        taken.ok_or_else(|| Error::communication("group", format!("{id} is made already")))
    }

    fn ask<'a>(
        &'a self,
        group: &'a Arc<str>,
        questions: &'a [(usize, Entry)],
    ) -> Pin<Box<dyn Future<Output = Vec<Reply>> + 'a>> {
        let answer = |&(rank, entry)| Ok(self.shared.answer(group, rank, entry));
        Box::pin(ready(questions.iter().map(answer).collect()))
    }

    fn silent(&self) -> Pin<Box<dyn Future<Output = Vec<usize>> + '_>> {
        Box::pin(ready(Vec::new())) // threads are not stopped one by one
    }
}

/// The pipes of every rank of a group.
fn make_links(ranks: &[usize]) -> Vec<Option<PeerChannels>> {
    let n = ranks.len();
    let empty = |rank| PeerChannels::empty(rank, ranks);
    let mut ends: Vec<_> = (0..n).map(empty).collect();
    for from in 0..n {
        for to in (0..n).filter(|&to| to != from) {
            let (writer, reader) = local::pipe();
            ends[from].outgoing[to] =
                Some(SendChannel::new(ranks[to], SendChannelKind::Local(writer)));
            ends[to].incoming[from] =
                Some(RecvChannel::new(ranks[from], RecvChannelKind::Local(reader)));
        }
    }
    ends.into_iter().map(Some).collect()
}
