//! Jobs of many ranks: few connections, little memory, and the one that is gone is named.

use ferrotron_parallel::collective::{Group, Reduction, World};
use ferrotron_tensor::{DType, Device, Result, Tensor};
use rustix::process::{Pid, Signal, getpid, kill_process};
use std::time::{Duration, Instant};

use super::{finish, result, start, wait_until_ready};

/// Long enough for many ranks to come together, and shorter than a stopped rank may take to be named.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// Time in which a silent rank is named, long enough for fifty ranks to come together on a busy machine.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(12);

/// Ranks of the largest job in these tests: `FERROTRON_TEST_RANKS`, or 200.
fn many_ranks() -> usize {
    std::env::var("FERROTRON_TEST_RANKS").map_or(200, |ranks| ranks.parse().unwrap())
}

/// Sums in a few groups, tells what that has taken, and goes on until rank `victim` stops or kills itself.
pub fn many(world: &World, victim: Option<usize>) -> Result<String> {
    let (rank, size) = (world.rank(), world.size());
    let all: Vec<usize> = (0..size).collect();
    let pairs: Vec<usize> = all.iter().copied().filter(|other| other / 2 == rank / 2).collect();
    let groups = [world.group("world", &all)?, world.group("pairs", &pairs)?];
    let met = met_after();
    let sum = |group: &Group| {
        let x = Tensor::full(&Device::cpu(1)?, DType::F32, &[100], 1.0)?;
        let sum = group.all_reduce(x, Reduction::Sum)?.wait()?.to_f64()?;
        assert!(sum.iter().all(|&ranks| ranks == group.size() as f64));
        group.barrier().wait()
    };
    for round in 0.. {
        groups.iter().try_for_each(sum)?;
        if round == 2 {
            let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
            let connections = world.control_traffic();
            let (control, pipes) = (connections.control_connections, connections.group_connections);
            println!("\ntaken: {met:.1} {open} {} {control} {pipes}", resident_kib());
        }
        match victim {
            None if round == 3 => break,
            Some(victim) if victim == rank && round == 5 => {
                let signal = if rank.is_multiple_of(2) { Signal::KILL } else { Signal::STOP };
                kill_process(getpid(), signal).unwrap();
            }
            _ => {}
        }
    }
    Ok("called".to_string())
}

/// Computes without any call, until another rank is known to have failed.
pub fn idle(world: &World, victim: Option<usize>) -> Result<String> {
    let group = world.group("world", &(0..world.size()).collect::<Vec<_>>())?;
    group.barrier().wait()?;
    if victim == Some(world.rank()) {
        kill_process(getpid(), Signal::STOP).unwrap();
    }
    loop {
        std::thread::sleep(Duration::from_millis(100));
        group.check()?;
    }
}

/// Calls again and again, until rank 0 finds that it was stopped for a while and has called since.
pub fn paused(world: &World) -> Result<String> {
    let group = world.group("world", &(0..world.size()).collect::<Vec<_>>())?;
    group.barrier().wait()?;
    println!("\nready");
    let (mut before, mut calls_since) = (Instant::now(), 0);
    loop {
        std::thread::sleep(Duration::from_millis(50));
        let x = Tensor::full(&Device::cpu(1)?, DType::F32, &[1], f64::from(calls_since))?;
        let most = group.all_reduce(x, Reduction::Max)?.wait()?.item()?;
        if most >= 20.0 {
            return Ok("went on".to_string());
        }
        let was_stopped = before.elapsed() > IDLE_TIMEOUT;
        calls_since += u32::from(calls_since > 0 || world.rank() == 0 && was_stopped);
        before = Instant::now();
    }
}

/// Seconds since this process has started.
fn met_after() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let started =
        stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(19)).map(str::parse::<f64>);
    let uptime = std::fs::read_to_string("/proc/uptime").unwrap_or_default();
    let now = uptime.split(' ').next().map(str::parse::<f64>);
    match (started, now) {
        (Some(Ok(ticks)), Some(Ok(now))) => now - ticks / 100.0,
        _ => f64::NAN,
    }
}

/// This process's share of memory, in KiB: a page that others map too counts in part.
fn resident_kib() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
    line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok()).unwrap_or(0)
}

/// The numbers behind "taken: " of a rank: seconds, descriptors, KiB, connections of control and of groups.
fn taken(text: &str) -> [f64; 5] {
    let line = text.lines().find_map(|line| line.strip_prefix("taken: "));
    let numbers =
        line.unwrap_or_else(|| panic!("{text}")).split(' ').map(|number| number.parse().unwrap());
    let numbers: Vec<f64> = numbers.collect();
    numbers.try_into().unwrap()
}

/// Returns whether `rank` is among those to which a result ascribes one of the fates. A machine that is busy may add an
/// innocent one.
fn names(result: &str, rank: usize, fates: [&str; 2]) -> bool {
    let before = fates.iter().filter_map(|fate| result.split_once(fate)).map(|(before, _)| before);
    let named = before.filter_map(|before| before.rsplit("rank").next());
    named
        .flat_map(|named| named.split(|c: char| !c.is_ascii_digit()))
        .any(|number| number.parse() == Ok(rank))
}

#[test]
fn many_ranks_meet_with_few_connections_and_little_memory() {
    let size = many_ranks();
    let begun = Instant::now();
    let texts: Vec<String> = start("many", size, "auto").into_iter().map(finish).collect();
    let took = begun.elapsed();
    let ranks: Vec<[f64; 5]> = texts.iter().map(|text| taken(text)).collect();
    let most: [f64; 5] =
        std::array::from_fn(|at| ranks.iter().map(|rank| rank[at]).fold(0.0, f64::max));
    println!(
        "{size} ranks took {took:?}; at most seconds, descriptors, KiB, connections: {most:?}"
    );
    assert!(texts.iter().all(|text| result(text) == "called"));
    assert!(took < Duration::from_secs(60), "{took:?}");
    assert!(most[1] <= 40.0 && most[2] <= 12.0 * 1024.0, "{most:?}");
    let all: [f64; 5] = std::array::from_fn(|at| ranks.iter().map(|rank| rank[at]).sum());
    // Each connection has two ends. A rank of the ring of all is connected with the next, and with its children in the
    // tree. Rank 1 is both for rank 0. Pairs have one connection.
    let size = size as f64;
    assert_eq!(all[3], 2.0 * (size - 1.0), "of control");
    assert_eq!(all[4], 2.0 * (size + (size - 1.0) - 1.0 + size / 2.0), "of groups");
}

#[test]
fn one_of_many_that_is_killed_or_stopped_is_named_by_all() {
    for victim in [6, 7] {
        let size = many_ranks() / 4;
        let mut ranks = start(&format!("many-{victim}"), size, "auto");
        let gone = ranks.remove(victim);
        let begun = Instant::now();
        for rank in ranks {
            let text = finish(rank);
            let result = result(&text);
            let fates =
                if victim == 6 { ["is gone"; 2] } else { ["does not answer", "do not answer"] };
            assert!(names(result, victim, fates), "no rank {victim} {fates:?} in '{result}'");
        }
        drop(gone);
        assert!(begun.elapsed() < TIMEOUT * 2, "{:?}", begun.elapsed());
    }
}

#[test]
fn one_of_many_that_is_stopped_while_none_calls_is_named_by_all() {
    let victim = 7;
    let mut ranks = start(&format!("idle-{victim}"), many_ranks() / 4, "auto");
    let stopped = ranks.remove(victim);
    let begun = Instant::now();
    for rank in ranks {
        let text = finish(rank);
        let want = format!("rank {victim} does not answer");
        assert!(result(&text).contains(&want), "no '{want}' in '{}'", result(&text));
    }
    drop(stopped);
    assert!(begun.elapsed() < IDLE_TIMEOUT * 4, "{:?}", begun.elapsed());
}

/// As a scheduler does that suspends jobs.
#[test]
fn a_job_that_is_stopped_for_longer_than_its_timeout_goes_on() {
    let mut ranks = start("paused", many_ranks() / 4, "auto");
    wait_until_ready(&mut ranks[0]);
    let signal_all = |signal| {
        for rank in &ranks {
            kill_process(Pid::from_child(&rank.0), signal).unwrap();
        }
    };
    std::thread::sleep(Duration::from_secs(2));
    signal_all(Signal::STOP);
    std::thread::sleep(IDLE_TIMEOUT + Duration::from_secs(3));
    signal_all(Signal::CONT);
    let _first = ranks.remove(0); // its output was read by nobody
    for rank in ranks {
        let text = finish(rank);
        assert_eq!(result(&text), "went on", "{text}");
    }
}
