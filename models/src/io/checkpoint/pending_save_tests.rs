//! A save whose writers end when the test says so.

use super::folder::Staging;
use super::index::Index;
use super::pending_save::{PendingSave, Writes};
use super::*;
use ferrotron_parallel::collective::{Group, WorldConfig, run_threads};
use ferrotron_tensor::{DType, Device, Result, Tensor};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::channel;
use std::thread::sleep;
use std::time::Duration;

/// Begins step 1 of `world` in `dir`, with `write` for this rank's files.
fn begin(
    dir: &Path,
    world: &Group,
    write: impl FnOnce(&AtomicBool) -> std::result::Result<Index, String> + Send + 'static,
) -> Result<PendingSave> {
    let staging = (world.rank() == 0).then(|| Staging::begin(dir, 1).unwrap());
    world.barrier().wait()?;
    PendingSave::start((dir, 1), world, (staging, Vec::new()), Writes::InThread, write)
}

/// The flags of all ranks.
fn sums(pending: &mut PendingSave, world: &Group, host: &Device) -> Result<[f64; 2]> {
    let [unfinished, failed] = pending.flags();
    Ok([world.sum(host, unfinished)?, world.sum(host, failed)?])
}

#[test]
fn nothing_is_published_before_all_have_written() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let found = run_threads(3, &WorldConfig::default(), |world| {
        let (world, host) = (world.everyone()?, Device::cpu(1)?);
        let (go, gone) = channel::<()>();
        let last = world.rank() == 2;
        let mut pending = begin(dir, &world, move |_| {
            if last {
                gone.recv().unwrap();
            }
            Ok(Index::new())
        })?;
        while sums(&mut pending, &world, &host)?[0] > 1.0 {
            sleep(Duration::from_millis(1));
        }
        for _ in 0..5 {
            let sums = sums(&mut pending, &world, &host)?;
            assert_eq!(sums, [1.0, 0.0]);
            assert!(pending.advance(sums)?.is_none() && !dir.join("iter_0000001").exists());
        }
        if last {
            go.send(()).unwrap();
        }
        pending.wait()
    });
    for path in found {
        assert_eq!(path.unwrap(), dir.join("iter_0000001"));
    }
    assert!(dir.join("iter_0000001/index.json").exists() && dir.join("latest").exists());
}

#[test]
fn a_rank_that_fails_stops_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    for failing in 0..2 {
        let found = run_threads(2, &WorldConfig::default(), |world| {
            let world = world.everyone()?;
            let fails = world.rank() == failing;
            let pending = begin(dir, &world, move |cancelled| {
                while !fails && !cancelled.load(Relaxed) {
                    sleep(Duration::from_millis(1));
                }
                Err(if fails { "the disk is full" } else { "cancelled" }.to_string())
            })?;
            pending.wait()
        });
        for error in found {
            let error = error.unwrap_err().to_string();
            assert!(error.contains("step 1 was not saved: the disk is full; earlier"), "{error}");
        }
        assert_eq!(std::fs::read_dir(dir).unwrap().count(), 0, "rank {failing}");
    }
}

/// A disk that takes what it was given for longer than a call may take.
#[test]
fn nobody_gives_up_while_others_write() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let config = WorldConfig { timeout: Duration::from_millis(800) };
    for fails in [true, false] {
        let found = run_threads(2, &config, |world| {
            let world = world.everyone()?;
            let is_slow = world.rank() == 1;
            let pending = begin(dir, &world, move |_| {
                if is_slow {
                    sleep(Duration::from_millis(2500));
                }
                match fails {
                    true => Err(if is_slow { "cancelled" } else { "the disk is full" }.to_string()),
                    false => Ok(Index::new()),
                }
            })?;
            pending.wait()
        });
        for saved in found {
            match saved {
                Ok(path) => assert!(!fails && path == dir.join("iter_0000001")),
                Err(error) => {
                    let error = error.to_string();
                    let what = "step 1 was not saved: the disk is full; earlier";
                    assert!(fails && error.contains(what), "{error}");
                }
            }
        }
        assert_eq!(std::fs::read_dir(dir).unwrap().count() == 0, fails);
    }
}

#[test]
fn a_save_that_is_given_up_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let write = |cancelled: &AtomicBool| {
        while !cancelled.load(Relaxed) {
            sleep(Duration::from_millis(1));
        }
        Err("cancelled".to_string())
    };
    drop(begin(folder.path(), &Group::single(), write).unwrap());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn buffers_serve_one_save_at_a_time() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let tensor = Tensor::full(&Device::cpu(1)?, DType::F32, &[2, 3], 1.0)?;
    let place = || ferrotron_tensor::ShardSpec::unsharded(&[2, 3]);
    let shards = || vec![LocalShard { name: "w".into(), place: place(), tensor: tensor.clone() }];
    let buffers = allocate_buffers(shards(), None)?;
    let begin = |weights| {
        let snapshot = Snapshot {
            weights,
            moments: None,
            model: SavedModel::new("matrix", &())?,
            progress: &TrainState { step: 1, ..TrainState::default() },
            tokenizer: None,
            run: serde_json::Value::Null,
        };
        save_async(folder.path(), &Group::single(), snapshot, &buffers)
    };
    let in_use = buffers.copy(std::slice::from_ref(&tensor))?;
    let error = begin(shards()).err().expect("they are in use").to_string();
    assert!(error.contains("is still being written: wait for it first"), "{error}");
    drop(in_use);
    let error = begin(Vec::new()).err().expect("there is no tensor").to_string();
    assert!(error.contains("made for 1 tensors, 0 are to be copied"), "{error}");
    let saved = begin(shards())?.wait()?;
    assert_eq!(Checkpoint::open(&saved)?.progress().step, 1);
    begin(shards())?.wait().map(drop)
}
