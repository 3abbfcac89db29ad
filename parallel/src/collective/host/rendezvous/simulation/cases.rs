//! Single things that go wrong: each names the rank that has caused it, in time.

use ferrotron_tensor::Result;
use std::time::Duration;
use tokio::time::sleep;

use super::faults::{Fault, Scenario, Stranger, When};
use super::job::{Outcome, run};
use super::rank::{Member, Rank};
use super::training::train;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs a program that ends on every rank with an error. Returns these, and the time of the last.
fn errors<P>(size: usize, program: P) -> (Vec<String>, Duration)
where
    P: AsyncFn(&mut Rank, Member) -> Result<()> + Clone + 'static,
{
    errors_of(&run(&Scenario::calm(size, TIMEOUT), program))
}

fn errors_of(outcome: &Outcome) -> (Vec<String>, Duration) {
    let ends = outcome.ends.iter().flatten();
    let errors = ends.clone().map(|end| end.result.clone().expect_err("it must end"));
    (errors.collect(), ends.map(|end| end.at).max().unwrap_or_default())
}

/// Every rank's error holds all of `words`.
fn check(errors: &[String], words: &[&str]) {
    for (rank, error) in errors.iter().enumerate() {
        for word in words {
            assert!(error.contains(word), "rank {rank} does not say '{word}': {error}");
        }
    }
}

#[test]
fn a_late_rank_is_named() {
    let (errors, took) = errors(4, async |rank, member| {
        let mut team = member.team("dp", &[0, 1, 2, 3]);
        team.sum(10).await?;
        team.sum(11).await?;
        if rank.rank == 3 {
            sleep(TIMEOUT * 2).await;
        }
        team.sum(1024).await
    });
    assert!((TIMEOUT * 2..TIMEOUT * 2 + Duration::from_secs(1)).contains(&took), "{took:?}");
    check(
        &errors,
        &[
            "all_reduce: rank 3 did not enter call 3 of group dp (all_reduce of 1024 x f32 at",
            "within 60s",
            "its last was all_reduce of 11 x f32",
            "(call 2)",
        ],
    );
}

/// Each rank waits in one group for what the other will do later: a deadlock.
#[test]
fn swapped_groups_are_named() {
    let (errors, took) = errors(2, async |rank, member| {
        let (mut a, mut b) = (member.team("a", &[0, 1]), member.team("b", &[0, 1]));
        (if rank.rank == 0 { &mut a } else { &mut b }).sum(5).await
    });
    // Each waits a little longer, since the other waits too.
    assert!(took > TIMEOUT * 9 / 8 && took < TIMEOUT * 5 / 4, "{took:?}");
    check(
        &errors,
        &[
            "did not enter call 1 of group",
            "called nothing in this group; it waits in all_reduce of 5 x f32",
            "(call 1) of group",
        ],
    );
}

#[test]
fn a_late_rank_of_many_is_named() {
    let (errors, _) = errors(100, async |rank, member| {
        let mut team = member.team("dp", &(0..100).collect::<Vec<_>>());
        team.sum(10).await?;
        if rank.rank == 77 {
            sleep(TIMEOUT * 2).await;
        }
        team.sum(1024).await
    });
    check(&errors, &["all_reduce: rank 77 did not enter call 2 of group dp"]);
}

#[test]
fn a_missing_message_is_named() {
    let (errors, _) = errors(3, async |rank, member| {
        let mut all = member.team("pp", &[0, 1, 2]);
        if rank.rank == 1 {
            return all.recv(2).await;
        }
        // The others wait elsewhere, and go on until rank 1 gives up.
        let mut pair = member.team("pair", &[0, 2]);
        loop {
            pair.sum(5).await?;
            sleep(TIMEOUT / 20).await;
        }
    });
    check(&errors, &["recv: rank 2 did not enter the send of message 1 of group pp", "6 x f32"]);
}

#[test]
fn a_rank_without_the_group_is_named() {
    let (errors, _) = errors(3, async |rank, member| match rank.rank {
        2 => member.team("other", &[2, 0]).sum(5).await,
        _ => member.team("cp", &[0, 1, 2]).sum(5).await,
    });
    check(&errors, &["rank", "group"]);
    assert!(errors.iter().any(|error| error.contains("has not made")), "{errors:?}");
}

/// Rank 0 waits for rank 1, and that one for rank 2, which computes for long.
#[test]
fn the_rank_is_named_for_which_a_missing_one_waits() {
    let (errors, _) = errors(3, async |rank, member| {
        if rank.rank == 0 {
            return member.team("column", &[0, 1]).sum(3).await; // it is the first to have waited too long
        }
        sleep(if rank.rank == 1 { TIMEOUT / 30 } else { TIMEOUT * 2 }).await;
        member.team("row", &[1, 2]).sum(4).await
    });
    check(&errors, &["rank 2 did not enter call 1 of group row (all_reduce of 4 x f32"]);
}

#[test]
fn missing_ranks_are_named() {
    let absent = [1, 3].map(|rank| (When::After(TIMEOUT * 9), Fault::Absent(rank))).to_vec();
    let scenario = Scenario { faults: absent, ..Scenario::calm(4, TIMEOUT) };
    let (errors, took) = errors_of(&run(&scenario, train));
    assert_eq!(errors.len(), 2);
    check(&errors, &["ranks [1, 3] of 4 did not come within 60s"]);
    assert!(took < TIMEOUT + Duration::from_secs(10), "{took:?}");
}

#[test]
fn ranks_without_rank_0_give_up() {
    let faults = vec![(When::After(TIMEOUT * 9), Fault::Absent(0))];
    let (errors, took) = errors_of(&run(&Scenario { faults, ..Scenario::calm(2, TIMEOUT) }, train));
    check(&errors, &["no connection to rank 0 at 127.0.0.1:29400: connection refused"]);
    assert!(took < TIMEOUT + Duration::from_secs(1), "{took:?}");
}

#[test]
fn who_was_turned_away_is_named_when_ranks_are_missing() {
    let faults = vec![
        (When::After(TIMEOUT * 9), Fault::Absent(1)),
        (When::After(TIMEOUT / 10), Fault::Stranger(0, Stranger::Secret)),
        (When::After(TIMEOUT / 5), Fault::Stranger(0, Stranger::Version)),
    ];
    let (errors, _) = errors_of(&run(&Scenario { faults, ..Scenario::calm(2, TIMEOUT) }, train));
    check(
        &errors,
        &[
            "ranks [1] of 2 did not come",
            "turned away: 10.9.9.9, it does not know the job's secret",
            "turned away: 10.9.9.9, it is of another version",
        ],
    );
}

/// The meeting and the end of the table in docs/collectives.md, with everything that a connection takes.
#[test]
fn a_meeting_and_an_end_take_what_the_table_says() {
    for size in [2, 5, 22, 85, 128] {
        let outcome = run(&Scenario::calm(size, TIMEOUT), async |_, _| Ok(()));
        assert!(outcome.ends.iter().flatten().all(|end| end.result.is_ok()), "{outcome:?}");
        let (others, sent) = (size as u64 - 1, outcome.volume);
        assert_eq!(sent.connections, 2 * others);
        assert!(sent.packets <= 16 * others && sent.bytes <= 730 * others, "{size}: {sent:?}");
    }
}
