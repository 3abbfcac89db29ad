//! The control plane of 10,000 ranks in one process, over links in memory: messages and bytes.

use super::heartbeat::Heartbeat;
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
        Simulated::of(RANKS, absent)
    }

    fn of(size: usize, absent: Option<usize>) -> Simulated {
        let start = |rank| Control::start(rank, size, &WorldHealth::new());
        let mut simulated =
            Simulated { ranks: (0..size).map(start).collect(), _absent: Vec::new() };
        for child in 1..size {
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

/// Runs a test in simulated time.
fn run(test: impl Future<Output = ()>) {
    let builder = &mut tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_time().start_paused(true).build().unwrap();
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

/// The reason for which a rank's world has failed.
fn reason(rank: &Control) -> String {
    rank.shared.check().expect_err("the world has failed").to_string()
}

#[test]
fn a_rank_that_is_stopped_while_no_call_waits_is_named_by_heartbeats() {
    run(async {
        let (size, stopped) = (1000, 7);
        let world = Simulated::of(size, Some(stopped));
        let heartbeat =
            Heartbeat { period: Duration::from_millis(500), limit: Duration::from_millis(2500) };
        let begun = Instant::now();
        let end = world.each(Some(stopped), |rank| async move {
            rank.clone().beat(heartbeat).await;
            reason(&rank)
        });
        let reasons = end.await;
        let took = begun.elapsed();
        assert!(took >= heartbeat.limit && took < 2 * heartbeat.limit, "{took:?}");
        let want = "rank 7 does not answer: look for a process that is stopped or stuck; rank ";
        for reason in reasons {
            assert!(reason.starts_with(want), "{reason}");
        }
        let periods = 1 + took.as_millis() / heartbeat.period.as_millis();
        for rank in &world.ranks {
            let sent = rank.traffic().heartbeats;
            assert!(u128::from(sent) <= 5 * periods, "rank {} sent {sent}", rank.rank);
        }
        let [messages, _] = world.sent().await;
        assert!(messages <= 2 * (size as u64 - 1), "each tells its neighbours once: {messages}");
    });
}

#[test]
fn a_pause_of_all_ranks_and_one_that_takes_leave_end_nothing() {
    run(async {
        let world = Simulated::of(50, None);
        let heartbeat =
            Heartbeat { period: Duration::from_millis(100), limit: Duration::from_millis(500) };
        for rank in &world.ranks {
            spawn_local(rank.clone().beat(heartbeat));
        }
        tokio::time::sleep(2 * heartbeat.period).await;
        world.ranks[49].leave(Duration::ZERO).await;
        tokio::time::advance(3 * heartbeat.limit).await; // as if the process was stopped
        tokio::time::sleep(2 * heartbeat.limit).await;
        for rank in &world.ranks[..49] {
            rank.shared.check().unwrap();
        }
        assert!(world.ranks[0].traffic().heartbeats >= 4 * 5);
    });
}

#[test]
fn the_rhythm_of_heartbeats_is_that_of_the_timeout() {
    for (timeout, period, limit) in [(600, 30, 540), (10, 1, 8), (1, 1, 5)] {
        let heartbeat = Heartbeat::of(Duration::from_secs(timeout));
        let seconds = [heartbeat.period, heartbeat.limit].map(|time| time.as_secs());
        assert_eq!(seconds, [period, limit], "{timeout} s");
    }
    let _ = Instant::now() + Heartbeat::of(Duration::MAX).limit;
}

#[test]
fn a_question_that_cannot_be_answered_has_an_error() {
    run(async {
        let world = Simulated::of(6, None);
        let asks = async |rank: usize| {
            let asked = world.ranks[rank].ask_place(3);
            let answer = timeout(Duration::from_secs(20), asked).await;
            let error = answer.expect("there is an answer").unwrap_err().to_string();
            assert_eq!(error, "rank 0 does not tell where rank 3 listens");
        };
        asks(5).await; // rank 0 does not know it
        lock(&world.ranks[1].departed).insert(0);
        asks(5).await; // rank 1 cannot pass the question on
        asks(1).await;
        lock(&world.ranks[2].outgoing).clear();
        asks(2).await;
        // Nobody waits for an answer any more.
        tokio::select! {
            biased;
            answer = world.ranks[4].ask_place(3) => panic!("nobody has answered: {answer:?}"),
            () = std::future::ready(()) => {} // it is given up
        }
        for rank in &world.ranks {
            assert!(lock(&rank.questions).is_empty(), "rank {}", rank.rank);
        }
    });
}

#[test]
fn a_reason_that_is_too_long_for_a_message_is_told_all_the_same() {
    run(async {
        let world = Simulated::of(22, None);
        world.ranks[21].shared.fail(&"\u{e9}\u{1}".repeat(1 << 20));
        let told = world.each(Some(21), |rank| async move {
            rank.shared.failed().await;
            reason(&rank)
        });
        let told = timeout(Duration::from_secs(20), told).await.expect("all are told");
        for reason in told {
            assert!(reason.starts_with("\u{e9}\u{1}\u{e9}") && reason.len() < 70_000);
        }
    });
}

#[test]
fn messages_that_no_rank_writes_end_the_world() {
    let query = |members| Query { group: 1, members, entry: Entry { kind: Kind::Call, number: 1 } };
    let endless = || Members::Strided { first: 0, step: 1, count: usize::MAX };
    for (from, to, body, want) in [
        (1, 0, Body::Count { query: Some(query(endless())) }, "beyond the 22 ranks"),
        (1, 0, Body::Count { query: Some(query(Members::Listed(vec![22]))) }, "beyond the 22"),
        (5, 0, Body::Complete, "none of its"),
        (1, 0, Body::Welcome, "none of its"),
        (5, 2, Body::Bye, "none of its"),
        (2, 0, Body::Alive, "another's name"),
        (0, 1, Body::Alive, "another's name"),
        (1, 22, Body::Alive, "another's name"),
    ] {
        run(async {
            let control = Control::start(0, 22, &WorldHealth::new());
            control.take(1, ControlMessage { from, to, body });
            let reason = reason(&control);
            assert!(reason.starts_with("rank 1 wrote") && reason.contains(want), "{reason}");
        });
    }
    run(async {
        let control = Control::start(0, 22, &WorldHealth::new());
        let query = query(Members::new(&[3, 7, 11]));
        control
            .take(1, ControlMessage { from: 1, to: 0, body: Body::Count { query: Some(query) } });
        control.take(1, ControlMessage { from: 1, to: 0, body: Body::Complete });
        control.shared.check().unwrap();
    });
}
