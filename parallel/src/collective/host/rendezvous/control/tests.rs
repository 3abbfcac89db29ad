//! The control plane of 10,000 ranks in one process, over links in memory: messages and bytes.

use super::*;
use crate::collective::host::runtime::census::Members;
use crate::collective::host::runtime::world_health::Kind;
use tokio::io::{DuplexStream, duplex, split};
use tokio::task::{JoinSet, LocalSet};

const RANKS: usize = 10_000;

/// Levels of the tree below rank 0.
const LEVELS: u64 = 7;

/// The ranks of a world, and the open ends of `absent`, whose process is stopped.
struct Simulated {
    ranks: Vec<Arc<Control>>,
    _absent: Vec<DuplexStream>,
}

impl Simulated {
    fn new(absent: Option<usize>) -> Simulated {
        let start = |rank| Control::start(rank, RANKS, &WorldHealth::new());
        let mut simulated =
            Simulated { ranks: (0..RANKS).map(start).collect(), _absent: Vec::new() };
        for child in 1..RANKS {
            let parent = tree::parent(child).unwrap();
            let (up, down) = duplex(1024);
            for (rank, peer, end) in [(child, parent, up), (parent, child, down)] {
                if absent == Some(rank) {
                    simulated._absent.push(end);
                    continue;
                }
                let (reader, writer) = split(end);
                simulated.ranks[rank].attach_halves(peer, reader, writer).unwrap();
            }
        }
        simulated
    }

    /// Lets each rank but `without` do its work, all at the same time. Returns the results by rank.
    async fn each<T: 'static, F: Future<Output = T> + 'static>(
        &self,
        without: Option<usize>,
        work: impl Fn(Arc<Control>) -> F,
    ) -> Vec<T> {
        let mut tasks = JoinSet::new();
        for (rank, control) in
            self.ranks.iter().enumerate().filter(|(rank, _)| Some(*rank) != without)
        {
            let done = work(control.clone());
            tasks.spawn_local(async move { (rank, done.await) });
        }
        let mut done = tasks.join_all().await;
        done.sort_by_key(|(rank, _)| *rank);
        done.into_iter().map(|(_, value)| value).collect()
    }

    /// Messages and bytes of all ranks, when none is under way.
    async fn sent(&self) -> [u64; 2] {
        let sum = |of: fn(ControlVolume) -> u64| -> u64 {
            self.ranks.iter().map(|rank| of(rank.traffic())).sum()
        };
        let mut before = None;
        loop {
            let now = [sum(|volume| volume.messages), sum(|volume| volume.bytes)];
            if before == Some(now) {
                return now;
            }
            before = Some(now);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    LocalSet::new().block_on(&runtime, test);
}

#[test]
fn ten_thousand_ranks_meet_find_one_another_fail_and_leave() {
    run(async {
        let world = Simulated::new(None);
        let deadline = Instant::now() + Duration::from_secs(60);
        let met = world.each(None, |rank| async move { rank.meet_all(deadline).await }).await;
        assert!(met.iter().all(Result::is_ok));
        let others = RANKS as u64 - 1;
        let [messages, bytes] = world.sent().await;
        assert_eq!(messages, 2 * others);
        assert!(bytes <= 50 * messages, "{bytes} bytes");

        // Every rank asks where the next one listens.
        for rank in 0..RANKS {
            world.ranks[0].know(rank, SocketAddr::from(([127, 0, 0, 1], 1 + rank as u16)));
        }
        let asked = world.each(None, |rank| async move {
            let next = (rank.rank + 1) % RANKS;
            match rank.rank {
                0 => rank.place(next).unwrap(),
                _ => rank.ask_place(next).await.unwrap(),
            }
        });
        for (rank, address) in asked.await.into_iter().enumerate() {
            assert_eq!(address.port(), 1 + ((rank + 1) % RANKS) as u16);
        }
        let [after, _] = world.sent().await;
        let hops: u64 = (0..RANKS).map(|rank| tree::depth(rank + 1) as u64).sum();
        assert!(hops <= LEVELS * others);
        assert_eq!(after - messages, 2 * hops);

        world.ranks[RANKS - 1].shared.fail("rank 9999 ended with an error: no");
        let told = world.each(None, |rank| async move { rank.shared.failed().await });
        told.await;
        let [failed, _] = world.sent().await;
        assert_eq!(failed - after, 2 * others, "each tells its neighbours once");
        world.each(None, |rank| async move { rank.leave(Duration::from_secs(60)).await }).await;
        let [left, _] = world.sent().await;
        let goodbyes = left - failed;
        assert!((others..=2 * others).contains(&goodbyes), "{goodbyes} messages, no failure again");
        let reasons = world.ranks.iter().map(|rank| rank.shared.check().unwrap_err().to_string());
        assert!(reasons.into_iter().all(|reason| reason == "rank 9999 ended with an error: no"));
    });
}

#[test]
fn ten_thousand_ranks_leave_their_parents_with_one_message() {
    run(async {
        let world = Simulated::new(None);
        world.each(None, |rank| async move { rank.leave(Duration::from_secs(60)).await }).await;
        let [messages, bytes] = world.sent().await;
        assert_eq!(messages, RANKS as u64 - 1);
        assert!(bytes <= 50 * messages, "{bytes} bytes");
    });
}

#[test]
fn ten_thousand_ranks_name_the_one_that_is_stopped_in_four_messages_a_rank() {
    run(async {
        let stopped = RANKS - 1;
        let world = Simulated::new(Some(stopped));
        let query = || Query {
            group: 1,
            members: Members::new(&[4, 5]),
            entry: Entry { kind: Kind::Call, number: 1 },
        };
        let counted =
            world.each(Some(stopped), |rank| async move { rank.census(Some(query())).await });
        for census in counted.await {
            assert_eq!(census.silent, [stopped]);
            assert_eq!(census.missing.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), [4, 5]);
        }
        let [messages, bytes] = world.sent().await;
        assert!(messages <= 4 * (RANKS as u64 - 1), "{messages} messages");
        assert!(bytes <= 300 * messages, "{bytes} bytes");
    });
}
