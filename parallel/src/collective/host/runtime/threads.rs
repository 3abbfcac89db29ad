//! A world whose ranks are threads of this process.

use ferrotron_tensor::{Error, Result};
use std::collections::HashMap;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::collective::host::recent::Recent;
use crate::collective::host::runtime::census::{Census, Query};
use crate::collective::host::runtime::progress::ProgressThread;
use crate::collective::host::runtime::rendezvous::Rendezvous;
use crate::collective::host::runtime::run_rank::{panicked, run_rank};
use crate::collective::host::runtime::world::{World, WorldConfig};
use crate::collective::host::runtime::world_health::{Entry, Reply, WorldHealth};
use crate::collective::host::transport::channel::{RecvChannelKind, SendChannelKind};
use crate::collective::host::transport::connect::{Connect, GroupId, Pipes};
use crate::collective::host::transport::local::{self, LocalReader, LocalWriter};
use crate::collective::host::transport::piece::ChannelResult;

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
        Arc::new(ThreadRendezvous { shared: shared.clone(), parked: Mutex::default() });
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

/// Hands pipes from thread to thread: the first of two ranks that asks makes both ends.
struct ThreadRendezvous {
    shared: Arc<WorldHealth>,
    parked: Mutex<Parked>,
}

/// The ends of pipes that their ranks have not taken.
#[derive(Default)]
struct Parked {
    /// By group, rank, and the rank at the other end.
    ends: HashMap<(GroupId, usize, usize), (LocalWriter, LocalReader)>,
    /// Ranks that have left groups, of the last few thousand times that one did.
    closed: Recent<(GroupId, usize)>,
}

impl Parked {
    fn take(&mut self, group: GroupId, own: usize, peer: usize) -> (LocalWriter, LocalReader) {
        if let Some(ends) = self.ends.remove(&(group, own, peer)) {
            return ends;
        }
        let ((to, from_own), (to_own, from)) = (local::pipe(), local::pipe());
        // Dropped, they tell that the other has left.
        if !self.closed.contains(&(group, peer)) {
            self.ends.insert((group, peer, own), (to_own, from_own));
        }
        (to, from)
    }
}

impl ThreadRendezvous {
    fn parked(&self) -> MutexGuard<'_, Parked> {
        self.parked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Connect for ThreadRendezvous {
    fn connect(
        &self,
        group: GroupId,
        own: usize,
        peer: usize,
    ) -> Pin<Box<dyn Future<Output = ChannelResult<Pipes>> + '_>> {
        let (writer, reader) = self.parked().take(group, own, peer);
        let pipes = (SendChannelKind::Local(writer), RecvChannelKind::Local(reader));
        Box::pin(ready(Ok(pipes)))
    }

    fn close(&self, group: GroupId, own: usize) {
        let parked = &mut *self.parked();
        parked.closed.add((group, own));
        parked.ends.retain(|&(id, rank, _), _| (id, rank) != (group, own));
    }
}

impl Rendezvous for ThreadRendezvous {
    fn ask<'a>(
        &'a self,
        group: GroupId,
        questions: &'a [(usize, Entry)],
    ) -> Pin<Box<dyn Future<Output = Vec<Reply>> + 'a>> {
        let answer = |&(rank, entry)| Some(self.shared.answer(group, rank, entry));
        Box::pin(ready(questions.iter().map(answer).collect()))
    }

    fn census(&self, query: Option<Query>) -> Pin<Box<dyn Future<Output = Census> + '_>> {
        let mut census = Census::default(); // threads are not stopped one by one
        if let Some(Query { group, members, entry }) = &query {
            for rank in members.ranks() {
                census.join(Census::of(rank, self.shared.answer(*group, rank, *entry)));
            }
        }
        Box::pin(ready(census))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::host::runtime::group_task::GroupTask;
    use crate::collective::host::runtime::run::{Locked, run};
    use crate::collective::host::transport::header::Header;
    use crate::collective::host::transport::peer_channels::PeerChannels;
    use crate::collective::routes::all_reduced;
    use crate::collective::{Buffer, Call, Memory, Op, Reduction, partition_range};
    use ferrotron_tensor::{DType, Device, Tensor, bf16};
    use std::collections::HashSet;
    use std::future::poll_fn;
    use std::panic::Location;
    use std::pin::pin;
    use std::time::Duration;
    use tokio::runtime::Builder;
    use tokio::task::LocalSet;

    /// The number of times that each of eight ranks runs until all have ended `op` of a small buffer, if they take turns.
    fn turns(op: Op) -> Vec<usize> {
        let (ranks, numel) = ([0, 1, 2, 3, 4, 5, 6, 7], 800);
        let call = Call { op, dtype: DType::F32, len: numel, unit: 1, site: Location::caller() };
        let one = |mut links: PeerChannels| async move {
            let tensor = Tensor::full(&Device::cpu(1).unwrap(), DType::F32, &[numel], 1.0).unwrap();
            let mut memory = Memory::in_place(Buffer::Tensor(tensor));
            let (headers, mut locked) = ([Header::new(&call, 1)], Locked::default());
            let mut all = pin!(run(&mut links, &call, &headers, &mut memory, &mut locked));
            let mut polls = 0;
            let ended = poll_fn(|context| {
                polls += 1;
                all.as_mut().poll(context)
            });
            ended.await.unwrap();
            polls
        };
        let tasks = LocalSet::new();
        let meeting: Arc<dyn Connect> =
            Arc::new(ThreadRendezvous { shared: WorldHealth::new(), parked: Mutex::default() });
        let links = |rank| PeerChannels::new(7, rank, Arc::from(ranks), meeting.clone());
        let ends = ranks.map(|rank| tasks.spawn_local(one(links(rank))));
        let runtime = Builder::new_current_thread().build().unwrap();
        tasks.block_on(&runtime, async {
            let mut polls = Vec::new();
            for end in ends {
                polls.push(end.await.unwrap());
            }
            polls
        })
    }

    #[test]
    fn a_call_is_near_when_one_of_its_kind_has_made_the_pipes() {
        let shared = WorldHealth::new();
        let meeting =
            Arc::new(ThreadRendezvous { shared: shared.clone(), parked: Mutex::default() });
        let ranks: Arc<[usize]> = Arc::from([0, 1, 2, 3, 4]);
        let member = |rank| GroupTask {
            name: Arc::from("tp"),
            id: 7,
            links: PeerChannels::new(7, rank, ranks.clone(), meeting.clone()),
            ranks: ranks.clone(),
            shared: shared.clone(),
            rendezvous: meeting.clone(),
            timeout: Duration::from_secs(60),
            traffic: Arc::default(),
            familiar: HashSet::new(),
        };
        let call = |op, len| Call { op, dtype: DType::F32, len, unit: 1, site: Location::caller() };
        let sum = Op::AllReduce(Reduction::Sum);
        let (ring, same, small) = (call(sum, 100_000), call(sum, 200_000), call(sum, 10));
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        let tasks = LocalSet::new();
        let ends = [0, 1, 2, 3, 4].map(|rank| {
            let mut member = member(rank);
            tasks.spawn_local(async move {
                assert!(!member.is_near(&ring));
                let x = Tensor::full(&Device::cpu(1).unwrap(), DType::F32, &[ring.len], 1.0);
                let mut memory = Memory::in_place(Buffer::Tensor(x.unwrap()));
                member.carry_out(&ring, &mut memory).await.unwrap();
                assert!(member.is_near(&ring) && member.is_near(&same));
                assert!(!member.is_near(&small), "it needs all others, not two of them");
            })
        });
        tasks.block_on(&runtime, async {
            for end in ends {
                end.await.unwrap();
            }
        });
    }

    #[test]
    fn ranks_that_take_turns_wait_once_for_each_half_of_a_small_call() {
        for (op, halves) in [
            (Op::AllReduce(Reduction::Sum), 2),
            (Op::ReduceScatter(Reduction::Max), 1),
            (Op::AllGather, 1),
        ] {
            let turns = turns(op);
            assert!(turns.iter().all(|&turns| turns <= 1 + halves), "{op}: {turns:?}");
        }
    }

    /// A number whose sum depends on the order of its terms.
    fn rough(rank: usize, index: usize) -> f32 {
        let bits = (rank as u32 * 7919 + index as u32 + 1).wrapping_mul(0x9E37_79B9);
        let number = ((bits >> 8) as f32 / 8_388_608.0 - 1.0) * 4.0_f32.powi((bits % 9) as i32);
        bf16::from_f32(number).to_f32()
    }

    /// Sums are cut, since tests let a rank hold few: they have the bits of those in f32, rounded once.
    #[test]
    fn sums_of_16_bits_over_many_ranks_are_those_of_f32_piece_by_piece() {
        const RANKS: usize = 66;
        // Along the tree and, in parts that are not of whole rows, round the ring; and by rows round the ring.
        let (tree, ring, by_rows) = ([30, 2000], [7, 14_287], [140, 800]);
        let tensor = |dims: [usize; 2], value: &dyn Fn(usize) -> f32| {
            let values = (0..dims[0] * dims[1]).map(|i| bf16::from_f32(value(i)));
            Tensor::from_slice(&Device::cpu(1)?, &values.collect::<Vec<_>>(), &dims)
        };
        let sums = run_threads(RANKS, &WorldConfig::default(), |world| {
            let rank = world.rank();
            let group = world.group("dp", &(0..RANKS).collect::<Vec<_>>())?;
            let mine = |dims| tensor(dims, &|i| rough(rank, i));
            let mut sent = 0;
            let mut whole = |x: Tensor| {
                let len = x.numel();
                let sum = group.all_reduce(x, Reduction::Sum)?.wait()?.to_f64()?;
                sent += all_reduced(RANKS, rank, len, 2) as u64;
                assert_eq!(group.traffic().calls_and_bytes("all_reduce").1, sent, "{len}");
                Result::Ok(sum)
            };
            let few = whole(tensor(tree, &|i| ((rank + i) % 3) as f32)?)?;
            assert!(few.iter().all(|&sum| sum == 66.0));
            let all = whole(mine(ring)?)?;
            let part = group.reduce_scatter(mine(by_rows)?, Reduction::Sum)?.wait()?.to_f64()?;
            let root = group.reduce(mine(ring)?, 4, Reduction::Sum)?.wait()?.to_f64()?;
            if rank != 4 {
                assert_eq!(root, mine(ring)?.to_f64()?);
            }
            Ok((all, part, root))
        });
        let sums: Vec<_> = sums.into_iter().map(Result::unwrap).collect();
        // From the rank behind `last` round the ring to `last`.
        let sum = |last: usize, i: usize| {
            let terms = (1..=RANKS).map(|steps| rough((last + steps) % RANKS, i));
            bf16::from_f32(terms.reduce(|a, b| a + b).unwrap()).to_f64()
        };
        let len = ring[0] * ring[1];
        for owner in 0..RANKS {
            for i in partition_range(len, RANKS, owner) {
                let want = sum(owner, i);
                assert!(sums.iter().all(|(all, ..)| all[i] == want), "element {i}");
            }
            let rows = partition_range(by_rows[0], RANKS, owner);
            let own = (rows.start * by_rows[1]..rows.end * by_rows[1]).map(|i| sum(owner, i));
            assert!(own.eq(sums[owner].1.iter().copied()), "part of rank {owner}");
        }
        assert!((0..len).all(|i| sums[4].2[i] == sum(4, i)), "at the root");
    }
}
