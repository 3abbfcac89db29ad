//! Faults that only another process can show: killed while it saves, and a disk that takes no more.
//!
//! The test program starts itself again as the child: `child` does nothing unless it is told to.
#![cfg(unix)]

use ferrotron_models::checkpoint::{Checkpoint, Held, Progress, Snapshot, save};
use ferrotron_models::gpt::{Gpt, GptConfig};
use ferrotron_nn::{Module, Scope};
use ferrotron_parallel::collective::Group;
use ferrotron_tensor::{DType, Device, Result};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const FOLDER: &str = "FERROTRON_TEST_SAVE";

fn save_step(dir: &Path, step: u64) -> Result<PathBuf> {
    let config = GptConfig::gpt2(64, 2, 32, 2, 16);
    let gpt = Gpt::new(&Scope::new(&Device::cpu(1)?, DType::F32, step), &config)?;
    let progress = Progress { step, ..Progress::default() };
    let run = serde_json::Value::Null;
    let snapshot = Snapshot {
        weights: Held::params(&gpt.params())?,
        moments: None,
        config: &config,
        progress: &progress,
        tokenizer: None,
        run,
    };
    save(dir, &Group::single(), snapshot)
}

#[test]
fn child() {
    let Some(dir) = std::env::var_os(FOLDER) else { return };
    // The same two steps again and again: folders are made, replaced and removed.
    for i in 0.. {
        if let Err(error) = save_step(Path::new(&dir), 2 + i % 2) {
            println!("{error}");
            std::process::exit(1);
        }
    }
}

fn as_child(mut command: Command, dir: &Path) -> Command {
    command.env(FOLDER, dir).stdout(Stdio::piped()).stderr(Stdio::null());
    command
}

#[test]
fn killed_at_any_time_the_latest_checkpoint_loads() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    save_step(dir.path(), 1)?;
    for round in 0..40_u64 {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["child", "--exact", "--nocapture"]);
        let mut child = as_child(command, dir.path()).spawn().unwrap();
        std::thread::sleep(Duration::from_micros(20_000 + 3_701 * round % 50_000));
        child.kill().unwrap();
        child.wait().unwrap();
        Checkpoint::open(dir.path())?;
    }
    let saved = Checkpoint::open(dir.path())?.progress().step;
    assert!(saved > 1, "no child lived long enough to save");
    save_step(dir.path(), 4)?;
    let left = std::fs::read_dir(dir.path()).unwrap().filter(|entry| {
        let name = entry.as_ref().unwrap().file_name().into_string().unwrap();
        name.ends_with(".tmp") || name.ends_with(".old")
    });
    assert_eq!(left.count(), 0);
    Ok(())
}

#[test]
fn a_full_disk_leaves_earlier_checkpoints_and_no_rubbish() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let first = save_step(dir.path(), 1)?;
    // A limit on the size of files stands for a full disk: the write fails in the same place. Its
    // signal must be ignored, or the child would die of it.
    let script = "trap '' XFSZ; ulimit -f 8; exec \"$0\" child --exact --nocapture";
    let mut command = Command::new("sh");
    command.arg("-c").arg(script).arg(std::env::current_exe().unwrap());
    let start = Instant::now();
    let output = as_child(command, dir.path()).output().unwrap();
    assert!(start.elapsed() < Duration::from_secs(60));
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find(|line| line.contains("checkpoint:")).unwrap_or_default();
    assert!(line.contains("step 2 was not saved: cannot write '"), "{text}");
    assert!(line.contains("model.safetensors") && line.contains("File too large"), "{line}");
    assert!(line.ends_with("free space there or choose another --save"), "{line}");
    let mut left: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["iter_0000001", "latest"]);
    assert_eq!(Checkpoint::open(dir.path())?.folder(), first);
    Ok(())
}
