//! A rank that dies never leaves the others waiting. Jobs of four processes lose one to SIGKILL at a random moment,
//! from before the ranks have met to the middle of training.
//!
//! `cargo bench --bench kill [-- JOBS]` prints, for each job, who was killed when and how long the others took
//! to end, and fails if any of them takes longer than [`LIMIT`].
//!
//! `cargo bench --bench kill -- saves small|gpt2-124m FOLDER [SAVES] [SECONDS]` disturbs a run that saves after every step
//! (`kill/saves.rs`), until so many checkpoints are saved or so many seconds have passed. It goes on with what is in the
//! folder. Results are in `docs/results/soak-results.md`.

#[path = "kill/saves.rs"]
mod saves;

use ferrotron::tensor::RandomKey;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

const RANKS: usize = 4;
/// Latest moment of a kill.
const SPAN: Duration = Duration::from_millis(2500);
/// Maximum time in which a job may end.
const LIMIT: Duration = Duration::from_secs(20);
const LAYOUTS: [&[&str]; 4] = [
    &["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"],
    &["--zero-stage", "3"],
    &["--context-parallel-size", "2", "--transport", "tcp"],
    &["--pipeline-model-parallel-size", "4", "--pipeline-schedule", "zb-h1"],
];

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().filter(|word| !word.starts_with("--")).collect();
    if let [_, mode, name, folder, numbers @ ..] = &words[..]
        && mode == "saves"
    {
        let number = |at: usize| numbers.get(at).and_then(|word: &String| word.parse().ok());
        std::fs::create_dir_all(folder).expect("the folder can be made");
        let soaked = saves::soak(
            name,
            Path::new(folder),
            number(0).unwrap_or(500),
            number(1).unwrap_or(1200),
        );
        return match soaked {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                println!("{error}");
                ExitCode::FAILURE
            }
        };
    }
    let jobs = std::env::args().filter_map(|arg| arg.parse().ok()).next().unwrap_or(40);
    let key = RandomKey::new(std::process::id().into(), 0, "kill");
    let mut slowest = Duration::ZERO;
    for job in 0..jobs {
        let folder = std::env::temp_dir().join(format!("ferrotron-kill-{}", std::process::id()));
        let mut launcher = start(LAYOUTS[job as usize % LAYOUTS.len()], &folder);
        let moment = SPAN.mul_f64(key.uniform(2 * job));
        sleep(moment);
        let victims = children(launcher.id());
        let chosen = (key.uniform(2 * job + 1) * victims.len() as f64) as usize;
        if let Some(victim) = victims.get(chosen) {
            let killed = Command::new("kill").args(["-9", &victim.to_string()]).status();
            killed.expect("kill is there");
        }
        let ended = wait(&mut launcher);
        let _ = std::fs::remove_dir_all(&folder);
        let Some((code, took)) = ended else {
            println!(
                "job {job}: killed {moment:.1?} after its start, still running after {LIMIT:?}"
            );
            return ExitCode::FAILURE;
        };
        slowest = slowest.max(took);
        println!(
            "job {job}: {} of {RANKS} ranks were there after {moment:.1?}; ended {took:.1?} after the kill with {code:?}",
            victims.len()
        );
        if !victims.is_empty() && code == Some(0) {
            println!("job {job}: a rank was killed, and the job says that all is well");
            return ExitCode::FAILURE;
        }
    }
    println!("{jobs} jobs; the slowest took {slowest:.1?} to end");
    ExitCode::SUCCESS
}

fn start(layout: &[&str], folder: &Path) -> Child {
    Command::new(env!("CARGO_BIN_EXE_ferrotron"))
        .args(["train", "--nproc", &RANKS.to_string(), "--train-iters", "1000000"])
        .args(["--micro-batch-size", "1", "--global-batch-size", "8", "--save-interval", "20"])
        .arg("--save")
        .arg(folder)
        .args(layout)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the program starts")
}

/// The processes that `parent` started.
fn children(parent: u32) -> Vec<u32> {
    let tasks = format!("/proc/{parent}/task/{parent}/children");
    let list = std::fs::read_to_string(tasks).unwrap_or_default();
    list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// The exit code, and how long it took; nothing if it took too long.
fn wait(launcher: &mut Child) -> Option<(Option<i32>, Duration)> {
    let started = Instant::now();
    while started.elapsed() < LIMIT {
        if let Some(status) = launcher.try_wait().expect("the launcher can be waited for") {
            return Some((status.code(), started.elapsed()));
        }
        sleep(Duration::from_millis(10));
    }
    let _ = launcher.kill();
    None
}
