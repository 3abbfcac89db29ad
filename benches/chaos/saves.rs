//! Saves under faults: a run that writes a checkpoint in the background after every step is killed with SIGKILL at a
//! random moment, or its writes fail with ENOSPC or EIO after a random number of bytes, and starts again by the same
//! command line. After each fault the latest checkpoint must load, with all checksums, and be no older than before.

use ferrotron::tensor::RandomKey;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::processes::{end, kill};
use super::write_faults::{self, INPUT_OUTPUT, NO_SPACE};

/// Longest that a run may take to end after its writes have failed.
const LIMIT: Duration = Duration::from_secs(120);
const FAULTS: [(&str, i32); 2] = [("ENOSPC", NO_SPACE), ("EIO", INPUT_OUTPUT)];

/// A model, and how often it is disturbed.
struct Case {
    name: &'static str,
    options: &'static [&'static str],
    layouts: &'static [&'static [&'static str]],
    /// Latest moment of a kill after the first save, and most bytes before a fault.
    span: Duration,
    bytes: f64,
}

const CASES: [Case; 2] = [
    Case {
        name: "small",
        options: &[
            "--num-layers",
            "2",
            "--hidden-size",
            "32",
            "--num-attention-heads",
            "2",
            "--seq-length",
            "16",
        ],
        layouts: &[
            &[],
            &["--nproc", "2"],
            &["--nproc", "2", "--zero-stage", "1"],
            &["--nproc", "2", "--pipeline-model-parallel-size", "2"],
        ],
        span: Duration::from_millis(1500),
        bytes: 1e7,
    },
    Case {
        name: "gpt2-124m",
        options: &["--preset", "gpt2-124m", "--tokenizer", "byte", "--seq-length", "16"],
        layouts: &[&[]],
        span: Duration::from_secs(20),
        bytes: 8e9,
    },
];

/// Goes on in `folder` until step `saves` is saved, or `seconds` have passed.
pub fn soak(name: &str, folder: &Path, saves: u64, seconds: u64) -> Result<(), String> {
    let case = CASES.iter().find(|case| case.name == name);
    let case = case.ok_or_else(|| format!("there is no '{name}': small or gpt2-124m"))?;
    let shim = write_faults::compile(folder);
    let key = RandomKey::new(std::process::id().into(), 0, "saves");
    let (started, mut number) = (Instant::now(), 0_u64);
    let mut counts = [0_u64; 3];
    while latest(folder) < saves && started.elapsed().as_secs() < seconds {
        let before = latest(folder);
        let draw = |what: u64| key.uniform(4 * number + what);
        let layout = case.layouts[(draw(0) * case.layouts.len() as f64) as usize];
        let kind = if shim.is_some() { (draw(1) * 3.0) as usize } else { 0 };
        let mut command = command(case, layout, folder);
        if let (Some(shim), 1..) = (&shim, kind) {
            write_faults::inject(&mut command, shim, draw(2) * case.bytes, FAULTS[kind - 1].1);
        }
        let mut child = command.spawn().expect("the program starts");
        let what = match kind {
            0 => {
                wait_for_a_save(&mut child, folder, before);
                sleep(case.span.mul_f64(draw(3)));
                kill(&mut child);
                "SIGKILL"
            }
            _ => FAULTS[kind - 1].0,
        };
        if !end(&mut child, LIMIT) {
            return Err(format!("after {what} it still runs, {LIMIT:?} later"));
        }
        counts[kind] += 1;
        number += 1;
        verify(folder)?;
        let after = latest(folder);
        println!("{number}: {what}, {layout:?}: step {before} to {after}");
        if after < before {
            return Err(format!("step {before} was saved, and now {after} is the last"));
        }
    }
    println!(
        "{name}: {} saves, {} kills, {} times ENOSPC, {} times EIO, in {:.0} s; the latest checkpoint always loaded",
        latest(folder),
        counts[0],
        counts[1],
        counts[2],
        started.elapsed().as_secs_f64()
    );
    Ok(())
}

fn command(case: &Case, layout: &[&str], folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrotron"));
    command.args(["train", "--async-save", "--save-interval", "1", "--train-iters", "1000000"]);
    command.args(["--micro-batch-size", "1", "--global-batch-size", "2", "--eval-interval", "0"]);
    command.args(["--sample-length", "0", "--transport", "tcp"]).args(case.options).args(layout);
    if !layout.contains(&"--nproc") {
        command.args(["--nproc", "1"]);
    }
    let run = folder.join("run");
    command.arg("--save").arg(&run).arg("--load").arg(&run);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// The step of the latest checkpoint.
fn latest(folder: &Path) -> u64 {
    let name = std::fs::read_to_string(folder.join("run/latest")).unwrap_or_default();
    name.trim().trim_start_matches("iter_").parse().unwrap_or(0)
}

fn verify(folder: &Path) -> Result<(), String> {
    if latest(folder) == 0 {
        return Ok(());
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrotron"));
    let output = command.args(["checkpoint", "verify"]).arg(folder.join("run")).output();
    let output = output.expect("the program starts");
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

fn wait_for_a_save(child: &mut Child, folder: &Path, before: u64) {
    let started = Instant::now();
    while latest(folder) == before && started.elapsed() < LIMIT {
        if child.try_wait().expect("it can be waited for").is_some() {
            return;
        }
        sleep(Duration::from_millis(5));
    }
}
