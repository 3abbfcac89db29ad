//! Steps of many rank processes on one machine: `cargo bench --bench many_ranks -- 1000 [FAULT]`, and options of a layout
//! behind it, such as `--pipeline-model-parallel-size 5`.
//!
//! Trains a tiny model for three steps. Prints the seconds after which each step was done, counted from the start of
//! the launcher, and the file descriptors and the share of memory of each rank. Then comes the fault, or SIGTERM without
//! one:
//!
//! | fault | prints |
//! |---|---|
//! | `kill` | seconds until the job has ended behind SIGKILL of a rank in the middle, and the line that names it |
//! | `stop` | the same behind SIGSTOP; the timeout is two minutes |
//! | `suspend` | whether the job goes on behind SIGSTOP of all ranks, and SIGCONT after 10 s |
//!
//! It fails if the first step takes over 60 s, or later ones over 120 s, if a rank has over 40 descriptors or 12 MB, and if the
//! job has not ended within the timeout behind `kill` and `stop`.
//! Results are in `docs/results/soak-results.md`.

use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Steps that are waited for.
const STEPS: usize = 3;

/// The exit code of a launcher that a signal has asked to end, and whose ranks have saved.
const SIGNALLED: i32 = 130;

/// The timeout of the job.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Longest time that all takes.
const LIMIT: Duration = Duration::from_secs(400);

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let usage = "give the number of ranks, then kill, stop or suspend if wanted, and options of `train` behind it";
    let Some((ranks, layout)) = words.split_first() else {
        println!("{usage}");
        return ExitCode::SUCCESS;
    };
    let (fault, layout) = match layout.split_first() {
        Some((word, layout)) if !word.starts_with('-') => (word.as_str(), layout),
        _ => ("none", layout),
    };
    if !["none", "kill", "stop", "suspend"].contains(&fault) {
        println!("'{fault}' is no fault: {usage}");
        return ExitCode::FAILURE;
    }
    let folder = std::env::temp_dir().join(format!("ferrotron-many-ranks-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("the folder can be made");
    let text = "the quick brown fox jumps over the lazy dog. ".repeat(2000);
    std::fs::write(folder.join("text.txt"), text).expect("the text can be written");
    let begun = Instant::now();
    let mut launcher = start(ranks, layout, &folder);
    let mut steps: Vec<Duration> = Vec::new();
    while steps.len() < STEPS && begun.elapsed() < LIMIT {
        let ended = launcher.try_wait().expect("the launcher can be waited for");
        steps.resize(steps_done(&folder), begun.elapsed());
        if ended.is_some() {
            break;
        }
        sleep(Duration::from_millis(50));
    }
    let seconds: Vec<String> = steps.iter().map(|at| format!("{:.1}", at.as_secs_f64())).collect();
    println!("{ranks} ranks {layout:?}: steps were done after {} s", seconds.join(", "));
    let ranks = children(launcher.id());
    let files = ranks
        .iter()
        .map(|rank| std::fs::read_dir(format!("/proc/{rank}/fd")).map_or(0, Iterator::count));
    let most_files = tell("file descriptors", files.map(|files| files as f64).collect());
    let memories = ranks.iter().map(|rank| memory(*rank)).collect();
    let most_memory = tell("share of memory in MiB", memories);
    let later = steps.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default();
    let is_small = most_files <= 40.0 && most_memory * 1.048_576 <= 12.0;
    let is_soon =
        steps.first().is_some_and(|first| first.as_secs_f64() <= 60.0) && later.as_secs() <= 120;
    if !is_small || !is_soon {
        println!("a limit is exceeded: 60 s, 120 s for each later step, 40 descriptors, 12 MB");
    }
    let middle = ranks.get(ranks.len() / 2).map(|rank| vec![*rank]).unwrap_or_default();
    let asked = Instant::now();
    let as_wished = match fault {
        "kill" | "stop" => {
            send(if fault == "kill" { "KILL" } else { "STOP" }, &middle);
            let status = ended(&mut launcher, LIMIT);
            let took = asked.elapsed();
            let told = std::fs::read_to_string(folder.join("stderr")).unwrap_or_default();
            let name = format!("rank {}", ranks.len() / 2);
            let line = told.lines().find(|line| line.contains(&name)).unwrap_or("no line names it");
            let seconds = took.as_secs_f64();
            println!("ended {seconds:.1} s after SIG{fault} of {name} with {status:?}");
            println!("{line}");
            status.is_some_and(|code| code != 0) && line.contains(&name) && took <= TIMEOUT
        }
        _ => {
            let goes_on = fault != "suspend" || {
                send("STOP", &ranks);
                let before = steps_done(&folder);
                sleep(Duration::from_secs(10));
                send("CONT", &ranks);
                let continued = Instant::now();
                while steps_done(&folder) < before + 3 && continued.elapsed() < LIMIT {
                    sleep(Duration::from_millis(50));
                }
                let seconds = continued.elapsed().as_secs_f64();
                println!("three more steps {seconds:.1} s after SIGCONT of all");
                steps_done(&folder) >= before + 3
            };
            let asked = Instant::now();
            send("TERM", &[launcher.id()]);
            let status = ended(&mut launcher, LIMIT);
            println!("ended {:.1} s after SIGTERM with {status:?}", asked.elapsed().as_secs_f64());
            goes_on && status == Some(SIGNALLED)
        }
    };
    let _ = std::fs::remove_dir_all(&folder);
    if steps.len() < STEPS || !as_wished || !is_small || !is_soon {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

/// Steps of which the run has written a line.
fn steps_done(folder: &Path) -> usize {
    std::fs::read_to_string(folder.join("run/metrics.jsonl")).map_or(0, |text| text.lines().count())
}

/// Sends a signal to processes.
fn send(signal: &str, processes: &[u32]) {
    let numbers = processes.iter().map(u32::to_string);
    let _ = Command::new("kill").arg(format!("-{signal}")).args(numbers).status();
}

/// Waits for the end of a process, and returns its exit code; none if it takes longer than `limit`, or a signal ends it.
fn ended(process: &mut Child, limit: Duration) -> Option<i32> {
    let begun = Instant::now();
    while begun.elapsed() < limit {
        if let Some(status) = process.try_wait().expect("it can be waited for") {
            return status.code();
        }
        sleep(Duration::from_millis(50));
    }
    let _ = process.kill();
    None
}

fn start(ranks: &str, layout: &[String], folder: &Path) -> Child {
    let of = |option: &str| {
        let at = layout.iter().position(|word| word == option);
        at.and_then(|at| layout.get(at + 1)?.parse::<usize>().ok()).unwrap_or(1)
    };
    let stages = of("--pipeline-model-parallel-size");
    let replicas = ranks.parse::<usize>().expect("a number of ranks")
        / (stages * of("--tensor-model-parallel-size") * of("--context-parallel-size"));
    Command::new(env!("CARGO_BIN_EXE_ferrotron"))
        .current_dir(folder)
        .args(["train", "--nproc", ranks, "--data", "text.txt", "--save", "run", "--threads", "1"])
        .args("--num-layers 5 --hidden-size 16 --num-attention-heads 4 --seq-length 16".split(' '))
        .args("--micro-batch-size 1 --sample-length 0 --eval-interval 0 --eval-iters 0".split(' '))
        .args("--train-iters 1000 --save-interval 0 --log-interval 1".split(' '))
        .args(["--distributed-timeout-minutes", &(TIMEOUT.as_secs() / 60).to_string()])
        .args(["--global-batch-size", &(replicas * stages).to_string()])
        .args(layout)
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(folder.join("stderr")).expect("a file for stderr"))
        .spawn()
        .expect("the program starts")
}

/// Prints the most and the mean. Returns the most.
fn tell(what: &str, of_ranks: Vec<f64>) -> f64 {
    let most = of_ranks.iter().copied().fold(0.0, f64::max);
    let mean = of_ranks.iter().sum::<f64>() / of_ranks.len().max(1) as f64;
    println!("{what}: at most {most:.1}, {mean:.1} in the mean of {} ranks", of_ranks.len());
    most
}

/// The share of memory of a process, in MiB: a page that others map too counts in part.
fn memory(process: u32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/smaps_rollup")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<f64>().ok());
    kib.unwrap_or(0.0) / 1024.0
}

/// The processes that `parent` started.
fn children(parent: u32) -> Vec<u32> {
    let tasks = format!("/proc/{parent}/task/{parent}/children");
    let list = std::fs::read_to_string(tasks).unwrap_or_default();
    list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}
