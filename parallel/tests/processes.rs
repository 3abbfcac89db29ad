//! Ranks that are real processes: this program, started again as one of its own tests.

mod common;
#[path = "processes/many_ranks.rs"]
mod many_ranks;

use ferrotron_parallel::collective::{
    Encryption, RankConfig, Reduction, Transport, World, WorldConfig, run_rank_process,
};
use ferrotron_tensor::{DType, Device, Result, Tensor};
use rustix::process::{Resource, Rlimit, Signal, getpid, getrlimit, kill_process, setrlimit};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Set in the environment of the processes that are ranks: what to do, rank, size, port, transport.
const ROLE: &str = "FERROTRON_TEST_ROLE";

/// Set where a rank's soft and hard limit of open files are lowered.
const LIMITS: &str = "FERROTRON_TEST_LIMITS";

const TIMEOUT: Duration = Duration::from_secs(60);

/// Long enough for ranks to come together on a busy machine, short enough to wait for.
const SHORT: Duration = Duration::from_secs(3);

/// The program that the processes run, no test: without its role it does nothing.
#[test]
fn rank() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let [task, rank, size, port, transport] = role.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{ROLE} is '{role}'");
    };
    if let Ok(limits) = std::env::var(LIMITS) {
        let mut limits = limits.split(' ').map(|limit| limit.parse().ok());
        let [current, maximum] = std::array::from_fn(|_| limits.next().flatten());
        setrlimit(Resource::Nofile, Rlimit { current, maximum }).unwrap();
    }
    // The rank that the task is about, if there is one.
    let (task, victim) = match task.rsplit_once('-') {
        Some((task, victim)) => (task, Some(victim.parse().unwrap())),
        None => (task, None),
    };
    let config = RankConfig {
        rank: rank.parse().unwrap(),
        size: size.parse().unwrap(),
        master: "localhost".to_string(),
        port: port.parse().unwrap(),
        secret: Some(format!("secret {port}")),
        job_id: None,
        transport: if transport == "tcp" { Transport::Tcp } else { Transport::Auto },
        encryption: Encryption::BetweenHosts,
        world: WorldConfig {
            timeout: match task {
                "many" if victim.is_some() => many_ranks::TIMEOUT,
                _ if task.starts_with("stop") => SHORT,
                "idle" | "paused" => many_ranks::IDLE_TIMEOUT,
                _ => TIMEOUT,
            },
        },
    };
    let result = run_rank_process(&config, |world| match task {
        "sum" => sum(&world),
        "loop" => sum_for_ever(&world),
        "stop" | "stop-early" => sum_in_pairs(&world, task == "stop-early", victim),
        "starve" => starve(&world, victim),
        "many" => many_ranks::many(&world, victim),
        "idle" => many_ranks::idle(&world, victim),
        "paused" => many_ranks::paused(&world),
        _ => panic!("no task {task}"),
    });
    println!("\nresult: {}", result.unwrap_or_else(|error| error.to_string()));
}

fn all_reduce(world: &World, len: usize) -> Result<f64> {
    let group = world.group("all", &(0..world.size()).collect::<Vec<_>>())?;
    let x = Tensor::full(&Device::cpu(1)?, DType::F32, &[len], world.rank() as f64 + 1.0)?;
    let sum = group.all_reduce(x, Reduction::Sum)?.wait()?.to_f64()?;
    assert!(sum.iter().all(|x| *x == sum[0]));
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    println!("\nshared memory: {}", maps.contains("ferrotron-ring"));
    Ok(sum[0])
}

fn sum(world: &World) -> Result<String> {
    Ok(format!("sum {}", all_reduce(world, 1_000_003)?))
}

fn sum_for_ever(world: &World) -> Result<String> {
    let group = world.group("dp", &(0..world.size()).collect::<Vec<_>>())?;
    println!("\nready");
    loop {
        for len in [1, 300_000, 1000] {
            let x = Tensor::zeros(&Device::cpu(1)?, DType::F32, &[len])?;
            group.all_reduce(x, Reduction::Sum)?.wait()?;
        }
    }
}

/// Ranks 0 and 1 call, and then ranks 1 and 2, again and again, until rank `victim` stops. One of the others does not
/// wait for it but for the third.
fn sum_in_pairs(world: &World, early: bool, victim: Option<usize>) -> Result<String> {
    let stop = || {
        if victim == Some(world.rank()) {
            kill_process(getpid(), Signal::STOP).unwrap();
        }
    };
    if early {
        stop();
    }
    let pairs = [("ab", [0, 1]), ("bc", [1, 2])];
    let own = pairs.iter().filter(|(_, ranks)| ranks.contains(&world.rank()));
    let groups: Vec<_> =
        own.map(|(name, ranks)| world.group(name, ranks)).collect::<Result<_>>()?;
    for round in 0.. {
        for group in &groups {
            let x = Tensor::zeros(&Device::cpu(1)?, DType::F32, &[300_000])?;
            group.all_reduce(x, Reduction::Sum)?.wait()?;
        }
        if round == 20 {
            stop();
        }
    }
    unreachable!("a call fails")
}

/// Makes a group, for which rank `victim` may open no more files.
fn starve(world: &World, victim: Option<usize>) -> Result<String> {
    // While the limit falls, no rank connects to the victim, which would take the connection below it.
    let together = world.group("before", &[0, 1, 2])?;
    together.barrier().wait()?;
    if victim == Some(world.rank()) {
        // The three streams of the process have the numbers below.
        let maximum = getrlimit(Resource::Nofile).maximum;
        setrlimit(Resource::Nofile, Rlimit { current: Some(3), maximum }).unwrap();
    }
    together.barrier().wait()?;
    // A rank that needs nothing of the victim has made its part.
    world.group("dp", &[0, 1, 2])?.barrier().wait()?;
    Ok("called".to_string())
}

/// A rank, which does not outlive the test, also if it fails.
struct Rank(Child);

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.0.kill(); // SIGKILL
        let _ = self.0.wait();
    }
}

/// Starts the ranks of a job.
fn start(task: &str, size: usize, transport: &str) -> Vec<Rank> {
    start_with(task, size, transport, &[])
}

fn start_with(task: &str, size: usize, transport: &str, variables: &[(&str, &str)]) -> Vec<Rank> {
    let port = common::free_port();
    let program = std::env::current_exe().unwrap();
    let rank = |rank| {
        let child = Command::new(&program)
            .args(["rank", "--exact", "--nocapture"])
            .envs(variables.iter().copied())
            .env(ROLE, format!("{task} {rank} {size} {port} {transport}"))
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn();
        Rank(child.unwrap())
    };
    (0..size).map(rank).collect()
}

/// The output of a rank that has ended by itself.
fn finish(mut rank: Rank) -> String {
    let start = Instant::now();
    while rank.0.try_wait().unwrap().is_none() {
        assert!(start.elapsed() < TIMEOUT, "a rank hangs");
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut text = String::new();
    rank.0.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    text
}

fn result(text: &str) -> &str {
    text.lines().find_map(|line| line.strip_prefix("result: ")).unwrap_or("none")
}

#[test]
fn processes_share_memory_unless_told_otherwise() {
    for (transport, shares) in [("auto", true), ("tcp", false)] {
        for child in start("sum", 3, transport) {
            let text = finish(child);
            assert_eq!(result(&text), "sum 6", "{transport}: {text}");
            assert!(text.contains(&format!("shared memory: {shares}")), "{transport}: {text}");
        }
    }
}

/// Waits until a rank has begun. It must have nothing more to say.
fn wait_until_ready(rank: &mut Rank) {
    let mut lines = BufReader::new(rank.0.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "ready"), "it did not start");
}

/// Starts three ranks that call for ever and returns when `rank` has begun.
fn start_endless(transport: &str, rank: usize) -> Vec<Rank> {
    let mut ranks = start("loop", 3, transport);
    wait_until_ready(&mut ranks[rank]);
    ranks
}

#[test]
fn a_killed_rank_ends_the_others() {
    for (round, transport) in ["auto", "tcp", "auto", "tcp"].into_iter().enumerate() {
        let victim = [2, 0][round / 2];
        let mut ranks = start_endless(transport, victim);
        std::thread::sleep(Duration::from_millis([0, 3, 17, 40][round]));
        drop(ranks.remove(victim));
        let start = Instant::now();
        let others = (0..3).filter(|&rank| rank != victim);
        for (number, rank) in others.zip(ranks) {
            let text = finish(rank);
            // It is a call that ends, unless the group was still being made.
            let call = format!("; rank {number} was in call ");
            let in_call = [call.as_str(), " of group dp (all_reduce of ", "processes.rs:"];
            let mut want = vec![format!("rank {victim} is gone")];
            if text.contains("ready") {
                want.extend(in_call.map(str::to_string));
            }
            for want in want {
                let result = result(&text);
                assert!(result.contains(&want), "{transport}: no '{want}' in '{result}'");
            }
        }
        assert!(start.elapsed() < Duration::from_secs(20), "{transport}: {:?}", start.elapsed());
    }
}

/// Every rank but the stopped one says that it does not answer, and blames no other.
fn only_the_stopped_rank_is_blamed(task: &str, transport: &str, victim: usize) {
    let what = format!("{task}, {transport}, rank {victim}");
    let begun = Instant::now();
    let mut ranks = start(&format!("{task}-{victim}"), 3, transport);
    let _stopped = ranks.remove(victim);
    for rank in ranks {
        let text = finish(rank);
        let (result, want) = (result(&text), format!("rank {victim} does not answer"));
        assert!(result.contains(&want), "{what}: no '{want}' in '{result}'");
        for blame in ["did not enter", "has not made"] {
            assert!(!result.contains(blame), "{what}: {result}");
        }
    }
    assert!(begun.elapsed() < SHORT * 8, "{what}: {:?}", begun.elapsed());
}

#[test]
fn a_rank_that_is_stopped_is_blamed_by_all() {
    for transport in ["auto", "tcp"] {
        std::thread::scope(|scope| {
            for victim in 0..3 {
                scope.spawn(move || only_the_stopped_rank_is_blamed("stop", transport, victim));
            }
        });
    }
}

#[test]
fn a_rank_that_is_stopped_before_it_makes_groups_is_blamed_by_all() {
    std::thread::scope(|scope| {
        for victim in [0, 2] {
            scope.spawn(move || only_the_stopped_rank_is_blamed("stop-early", "auto", victim));
        }
    });
}

/// Starts ranks whose limits of open files are these, the soft and the hard one.
fn start_limited(task: &str, size: usize, [soft, hard]: [u64; 2]) -> Vec<Rank> {
    start_with(task, size, "auto", &[(LIMITS, &format!("{soft} {hard}"))])
}

#[test]
fn the_limit_of_open_files_is_raised_where_that_helps() {
    // A rank of 5 needs 64 + 6 * 5 = 94.
    for rank in start_limited("sum", 5, [20, 94]) {
        let text = finish(rank);
        assert_eq!(result(&text), "sum 15", "{text}");
    }
    for rank in start_limited("sum", 5, [20, 93]) {
        let begun = Instant::now();
        let text = finish(rank);
        let result = result(&text);
        for part in ["a rank of 5 needs 94", "the limit is 93", "ulimit -n 94"] {
            assert!(result.contains(part), "no '{part}' in '{result}'");
        }
        assert!(begun.elapsed() < TIMEOUT / 2, "{:?}", begun.elapsed());
    }
}

#[test]
fn a_rank_that_runs_out_of_open_files_is_named_at_once() {
    for (victim, transport) in [(0, "auto"), (2, "auto"), (0, "tcp"), (2, "tcp")] {
        let begun = Instant::now();
        for rank in start(&format!("starve-{victim}"), 3, transport) {
            let text = finish(rank);
            let result = result(&text);
            let named = format!("rank {victim} ");
            for part in [&named, "too many open files", "ulimit -n"] {
                assert!(result.contains(part), "{transport}: no '{part}' in '{result}'");
            }
        }
        assert!(begun.elapsed() < TIMEOUT / 2, "{:?}", begun.elapsed());
    }
}
