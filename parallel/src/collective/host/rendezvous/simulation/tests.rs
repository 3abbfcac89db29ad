//! Seeds that are tried with every change, and as many more as one asks for.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use super::faults::Scenario;
use super::job::{End, Outcome, run};
use super::training::train;
use super::verdict::broken_rule;

/// Tries a seed. Returns what is wrong.
fn tried(seed: u64) -> Option<String> {
    let scenario = Scenario::of(seed);
    let outcome = run(&scenario, train);
    let rule = broken_rule(&scenario, &outcome)?;
    let Outcome { ends, happened, met, disk, .. } = outcome;
    let mut report =
        format!("seed {seed}: {rule}\n{scenario:?}\n{happened:?}, all met at {met:?}, {disk:?}\n");
    for (process, end) in ends.into_iter().enumerate() {
        report += &match end {
            Some(End { result, at }) => format!("  {process} at {at:?}: {result:?}\n"),
            None => format!("  {process} did not end\n"),
        };
    }
    Some(report)
}

/// Seeds that have broken a rule, which was a fault of the protocol. 61069: a rank that had ended its program took leave at the
/// moment when the calls of those below it were over, so that these could not find the rank that was stopped. 90844: packets were
/// lost, and ranks took a neighbour that was still asking for the rank that was stopped.
const BROKEN_ONCE: [u64; 2] = [61069, 90844];

/// Seeds of a run: `FERROTRON_SEEDS=FIRST..END`, or a few.
fn seeds() -> Vec<u64> {
    let Ok(text) = std::env::var("FERROTRON_SEEDS") else {
        return (0..300).chain(BROKEN_ONCE).collect();
    };
    let (first, end) = text.split_once("..").expect("FERROTRON_SEEDS=FIRST..END");
    (first.parse().expect("a number")..end.parse().expect("a number")).collect()
}

#[test]
fn ranks_keep_all_rules_whatever_goes_wrong() {
    let (seeds, threads) = (seeds(), std::thread::available_parallelism().map_or(1, |n| n.get()));
    let (next, is_broken) = (AtomicUsize::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while !is_broken.load(Relaxed) {
                    let Some(&seed) = seeds.get(next.fetch_add(1, Relaxed)) else { return };
                    if let Some(what) = tried(seed) {
                        eprintln!("{what}");
                        is_broken.store(true, Relaxed);
                    }
                }
            });
        }
    });
    assert!(!is_broken.into_inner(), "a rule is broken");
}

#[test]
fn a_seed_runs_twice_alike() {
    for seed in 0..20 {
        let scenario = Scenario::of(seed);
        assert_eq!(run(&scenario, train).digest, run(&scenario, train).digest, "seed {seed}");
    }
}
