//! Faults that only another process can show: killed while it saves, and a disk that takes no more, with one
//! rank and with several.
//!
//! The test program starts itself again as the child: `child` and its like do nothing unless they are told to.
#![cfg(unix)]

use ferrotron_models::checkpoint::{
    Checkpoint, LocalShard, SavedModel, Snapshot, TrainState, save,
};
use ferrotron_models::gpt::{Gpt, GptConfig};
use ferrotron_nn::{Module, Scope};
use ferrotron_parallel::collective::{
    Encryption, Group, RankConfig, Transport, WorldConfig, run_rank_process, run_threads,
};
use ferrotron_tensor::{DType, Device, Result, ShardSpec, Tensor};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const FOLDER: &str = "FERROTRON_TEST_SAVE";

/// Number of the rank that a child is, and where the ranks meet.
const RANK: &str = "FERROTRON_TEST_RANK";
const PORT: &str = "FERROTRON_TEST_PORT";

const RANKS: usize = 3;

fn save_step(dir: &Path, step: u64) -> Result<PathBuf> {
    save_model(dir, step, &GptConfig::gpt2(64, 2, 32, 2, 16))
}

fn save_model(dir: &Path, step: u64, config: &GptConfig) -> Result<PathBuf> {
    let gpt = Gpt::new(&Scope::new(&Device::cpu(1)?, DType::F32, step), config)?;
    let progress = TrainState { step, ..TrainState::default() };
    let run = serde_json::Value::Null;
    let snapshot = Snapshot {
        weights: LocalShard::params(&gpt.params())?,
        moments: None,
        model: SavedModel::new("gpt", config)?,
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

/// A model whose file begins with a header of more than 100 kB.
#[test]
fn child_of_many_layers() {
    let Some(dir) = std::env::var_os(FOLDER) else { return };
    let error = save_model(Path::new(&dir), 2, &GptConfig::gpt2(13, 100, 8, 2, 8));
    println!("{}", error.expect_err("a limit on files"));
    std::process::exit(1);
}

/// A matrix that the ranks share: of `large` elements that of rank 2, of 8 that of each other one.
fn save_shares(dir: &Path, world: &Group, step: u64, large: usize) -> Result<PathBuf> {
    let lengths = [8, 8, large];
    let (rank, whole) = (world.rank(), lengths.iter().sum());
    let start: usize = lengths[..rank].iter().sum();
    let value = (step * 10) as f64 + rank as f64;
    let tensor = Tensor::full(&Device::cpu(1)?, DType::F32, &[lengths[rank]], value)?;
    let place = ShardSpec::new(&[whole], &[&[(start, lengths[rank])]])?;
    let snapshot = Snapshot {
        weights: vec![LocalShard { name: "w".into(), place, tensor }],
        moments: None,
        model: SavedModel::new("gpt", &GptConfig::gpt2(64, 2, 32, 2, 16))?,
        progress: &TrainState { step, ..TrainState::default() },
        tokenizer: None,
        run: serde_json::Value::Null,
    };
    save(dir, world, snapshot)
}

fn save_shares_in_threads(dir: &Path, step: u64, large: usize) -> Vec<Result<PathBuf>> {
    let config = WorldConfig { timeout: Duration::from_secs(30) };
    run_threads(RANKS, &config, |world| {
        save_shares(dir, &world.group("world", &[0, 1, 2])?, step, large)
    })
}

#[test]
fn child_of_threads() {
    let Some(dir) = std::env::var_os(FOLDER) else { return };
    for (rank, saved) in save_shares_in_threads(Path::new(&dir), 2, 40_000).iter().enumerate() {
        let error = saved.as_ref().expect_err("a limit on files");
        println!("rank {rank}: {error}");
    }
}

#[test]
fn child_rank() {
    let Some(dir) = std::env::var_os(FOLDER) else { return };
    let number = |name| std::env::var(name).unwrap().parse::<u16>().unwrap();
    let config = RankConfig {
        rank: number(RANK) as usize,
        size: RANKS,
        master: "127.0.0.1".to_string(),
        port: number(PORT),
        secret: None,
        job_id: None,
        transport: Transport::Tcp,
        encryption: Encryption::BetweenHosts,
        world: WorldConfig { timeout: Duration::from_secs(30) },
    };
    let ended = run_rank_process(&config, |world| {
        let world = world.group("world", &[0, 1, 2])?;
        for i in 0.. {
            save_shares(Path::new(&dir), &world, 2 + i % 2, 40_000)?;
        }
        Ok(())
    });
    println!("{}", ended.unwrap_err());
    std::process::exit(1);
}

/// The names of a folder's entries.
fn entries(dir: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.unwrap().file_name().into_string().unwrap()
    };
    let mut left: Vec<String> = std::fs::read_dir(dir).unwrap().map(name).collect();
    left.sort();
    left
}

fn assert_no_rubbish(dir: &Path) {
    let rubbish = |name: &String| name.ends_with(".tmp") || name.ends_with(".old");
    assert!(!entries(dir).iter().any(rubbish), "{:?}", entries(dir));
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
    assert_no_rubbish(dir.path());
    Ok(())
}

#[test]
fn when_one_rank_of_a_job_is_killed_the_others_end_and_the_latest_checkpoint_loads() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    for saved in save_shares_in_threads(dir.path(), 1, 40_000) {
        saved?;
    }
    let mut last = 1;
    for round in 0..9_u64 {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let start = |rank: usize| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["child_rank", "--exact", "--nocapture"]);
            command.env(RANK, rank.to_string()).env(PORT, port.to_string());
            as_child(command, dir.path()).spawn().unwrap()
        };
        let mut ranks: Vec<Child> = (0..RANKS).map(start).collect();
        let killed = round as usize % RANKS;
        std::thread::sleep(Duration::from_micros(150_000 + 37_001 * round % 100_000));
        ranks[killed].kill().unwrap();
        ranks[killed].wait().unwrap();
        let started = Instant::now();
        for (rank, child) in ranks.into_iter().enumerate().filter(|&(rank, _)| rank != killed) {
            let output = child.wait_with_output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            assert_eq!(output.status.code(), Some(1), "rank {rank}: {text}");
            assert!(text.contains(&format!("rank {killed}")), "rank {rank}: {text}");
        }
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
        let checkpoint = Checkpoint::open(dir.path())?;
        last = checkpoint.progress().step.max(last);
    }
    assert!(last > 1, "no job lived long enough to save");
    for saved in save_shares_in_threads(dir.path(), 4, 40_000) {
        saved?;
    }
    assert_no_rubbish(dir.path());
    Ok(())
}

#[test]
fn a_disk_that_is_full_for_one_rank_ends_all_of_them() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    for saved in save_shares_in_threads(dir.path(), 1, 8) {
        saved?;
    }
    // The files of ranks 0 and 1 are below the limit.
    let script = "trap '' XFSZ; ulimit -f 8; exec \"$0\" child_of_threads --exact --nocapture";
    let mut command = Command::new("sh");
    command.arg("-c").arg(script).arg(std::env::current_exe().unwrap());
    let output = as_child(command, dir.path()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let cause = "step 2 was not saved: cannot write '";
    for rank in 0..RANKS {
        let start = format!("rank {rank}: ");
        let line = text.lines().find_map(|line| line.strip_prefix(&start)).unwrap_or_default();
        assert!(line.contains(cause) && line.contains("model-00003-of-00003"), "{text}");
        assert!(rank == 2 || line.contains("rank 2 ended with an error"), "{text}");
    }
    assert_eq!(entries(dir.path()), ["iter_0000001", "latest"]);
    assert_eq!(Checkpoint::open(dir.path())?.progress().step, 1);
    Ok(())
}

/// Tensors that are held twice, or by no rank, or as different things are not published: the checkpoint could not be
/// loaded.
#[test]
fn tensors_that_do_not_fit_together_are_not_published() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let config = WorldConfig { timeout: Duration::from_secs(30) };
    let save_rows = |step: u64, starts: [usize; 2], rows: [usize; 2]| {
        run_threads(2, &config, |world| {
            let world = world.group("world", &[0, 1])?;
            let rank = world.rank();
            let place = ShardSpec::new(&[rows[rank]], &[&[(starts[rank], 2)]])?;
            let tensor = Tensor::full(&Device::cpu(1)?, DType::F32, &[2], 0.0)?;
            let snapshot = Snapshot {
                weights: vec![LocalShard { name: "w".into(), place, tensor }],
                moments: None,
                model: SavedModel::new("gpt", &GptConfig::gpt2(64, 2, 32, 2, 16))?,
                progress: &TrainState { step, ..TrainState::default() },
                tokenizer: None,
                run: serde_json::Value::Null,
            };
            save(dir.path(), &world, snapshot)
        })
    };
    for saved in save_rows(1, [0, 2], [4, 4]) {
        saved?;
    }
    for (starts, rows, part) in [
        ([0, 1], [4, 4], "'w' hold 4 of its 4 elements"),
        ([0, 2], [5, 5], "'w' hold 4 of its 5 elements"),
        ([0, 2], [4, 5], "ranks disagree about 'w': f32 [4], f32 [5]"),
    ] {
        for (rank, saved) in save_rows(2, starts, rows).into_iter().enumerate() {
            let error = saved.expect_err(part).to_string();
            assert!(error.contains(part), "rank {rank}: {error}");
        }
        assert_eq!(entries(dir.path()), ["iter_0000001", "latest"]);
    }
    Ok(())
}

#[test]
fn a_full_disk_leaves_earlier_checkpoints_and_no_rubbish() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let first = save_step(dir.path(), 1)?;
    // A limit on the size of files stands for a full disk: the write fails in the same place, of the second
    // child within a header. Its signal must be ignored, or the child would die of it.
    for child in ["child", "child_of_many_layers"] {
        let script = format!("trap '' XFSZ; ulimit -f 8; exec \"$0\" {child} --exact --nocapture");
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
        assert_eq!(entries(dir.path()), ["iter_0000001", "latest"]);
        assert_eq!(Checkpoint::open(dir.path())?.folder(), first);
    }
    Ok(())
}
