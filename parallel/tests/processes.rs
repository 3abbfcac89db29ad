//! Ranks that are real processes: this program, started again as one of its own tests.

mod common;

use ferrotron_parallel::collective::{
    RankConfig, Reduction, Transport, World, WorldConfig, run_rank_process,
};
use ferrotron_tensor::{DType, Device, Result, Tensor};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Set in the environment of the processes that are ranks: what to do, rank, size, port, transport.
const ROLE: &str = "FERROTRON_TEST_ROLE";

const TIMEOUT: Duration = Duration::from_secs(60);

/// Long enough for ranks to come together on a busy machine, short enough to wait for.
const SHORT: Duration = Duration::from_secs(3);

/// Not a test but what the processes run; without its role it does nothing.
#[test]
fn rank() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let [task, rank, size, port, transport] = role.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{ROLE} is '{role}'");
    };
    let config = RankConfig {
        rank: rank.parse().unwrap(),
        size: size.parse().unwrap(),
        master: "localhost".to_string(),
        port: port.parse().unwrap(),
        secret: Some(format!("secret {port}")),
        transport: if transport == "tcp" { Transport::Tcp } else { Transport::Auto },
        world: WorldConfig { timeout: if task == "stop" { SHORT } else { TIMEOUT } },
    };
    let result = run_rank_process(&config, |world| match task {
        "sum" => sum(&world),
        "loop" | "stop" => sum_for_ever(&world),
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
    let port = common::free_port();
    let program = std::env::current_exe().unwrap();
    let rank = |rank| {
        let child = Command::new(&program)
            .args(["rank", "--exact", "--nocapture"])
            .env(ROLE, format!("{task} {rank} {size} {port} {transport}"))
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn();
        Rank(child.unwrap())
    };
    (0..size).map(rank).collect()
}

/// What a rank printed, when it has ended by itself.
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

/// Starts three ranks that call for ever and returns when `rank` has begun.
fn start_endless(task: &str, transport: &str, rank: usize) -> Vec<Rank> {
    let mut ranks = start(task, 3, transport);
    let mut lines = BufReader::new(ranks[rank].0.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "ready"), "rank {rank} did not start");
    ranks
}

#[test]
fn a_killed_rank_ends_the_others() {
    for (round, transport) in ["auto", "tcp", "auto", "tcp"].into_iter().enumerate() {
        let victim = [2, 0][round / 2];
        let mut ranks = start_endless("loop", transport, victim);
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

#[test]
fn only_the_stopped_rank_is_blamed() {
    std::thread::scope(|scope| {
        for victim in [0, 2] {
            scope.spawn(move || {
                let mut ranks = start_endless("stop", "auto", victim);
                let stopped = ranks.remove(victim);
                let pid = Pid::from_raw(stopped.0.id() as i32).unwrap();
                kill_process(pid, Signal::STOP).unwrap();
                for rank in ranks {
                    let text = finish(rank);
                    let (result, want) = (result(&text), format!("rank {victim} does not answer"));
                    assert!(result.contains(&want), "no '{want}' in '{result}'");
                    assert!(!result.contains("did not enter"), "{result}");
                }
            });
        }
    });
}
