//! Which checkpoints stay, and which of them is the newest.

use super::*;
use ferrotron_parallel::collective::Group;
use ferrotron_tensor::Result;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// A checkpoint without tensors.
fn save(dir: &Path, step: u64) -> Result<PathBuf> {
    let snapshot = Snapshot {
        weights: Vec::new(),
        moments: None,
        model: SavedModel::new("none", &())?,
        progress: &TrainState { step, ..TrainState::default() },
        tokenizer: None,
        run: serde_json::Value::Null,
    };
    super::save(dir, &Group::single(), snapshot)
}

fn left(dir: &Path) -> Vec<u64> {
    list(dir).unwrap().iter().map(|entry| entry.step).collect()
}

/// In the order of writing: 300 is from before the run went back.
const STEPS: [u64; 5] = [300, 100, 101, 102, 102];

#[test]
fn the_newest_are_kept_and_the_same_step_replaced() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    STEPS.into_iter().try_for_each(|step| save(dir.path(), step).map(drop))?;
    assert_eq!(left(dir.path()), [300, 100, 101, 102]);
    let plan = Retention { last: 2, interval: None }.apply(dir.path())?;
    assert_eq!(plan.newest, Some(dir.path().join("iter_0000102")));
    assert_eq!(left(dir.path()), [101, 102]);
    Retention { last: 0, interval: None }.apply(dir.path())?;
    assert_eq!(Checkpoint::open(dir.path())?.progress().step, 102);
    Ok(())
}

/// Times of files are those of a copy, and checkpoints of earlier versions record none.
#[test]
fn a_recorded_time_says_what_is_newest_and_else_the_step() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let (now, mut ago) = (SystemTime::now(), Duration::ZERO);
    for step in STEPS {
        let folder = save(dir.path(), step)?;
        ago += Duration::from_secs(100);
        File::open(folder.join("index.json")).unwrap().set_modified(now - ago).unwrap();
    }
    assert_eq!(left(dir.path()), [300, 100, 101, 102]);
    let last = Retention { last: 1, interval: None };
    assert_eq!(last.plan(dir.path()).newest, Some(dir.path().join("iter_0000102")));

    let shown: Vec<SystemTime> = list(dir.path())?.iter().map(|entry| entry.written).collect();
    assert!(shown.is_sorted() && shown[0].duration_since(now).is_ok(), "{shown:?}");
    for step in [300, 101] {
        forget_time(&dir.path().join(folder_name(step)));
    }
    assert_eq!(left(dir.path()), [101, 300, 100, 102]);
    Ok(())
}

/// Makes a checkpoint one of an earlier version.
fn forget_time(folder: &Path) {
    let json = |name: &str| -> serde_json::Value {
        serde_json::from_slice(&fs::read(folder.join(name)).unwrap()).unwrap()
    };
    let (mut config, mut index) = (json(CONFIG), json("index.json"));
    assert!(config.as_object_mut().unwrap().remove(SAVED).is_some_and(|time| time.is_f64()));
    let config = config.to_string();
    let crc32 = crc32fast::hash(config.as_bytes());
    index["files"][CONFIG] = serde_json::json!({"bytes": config.len(), "crc32": crc32});
    fs::write(folder.join(CONFIG), config).unwrap();
    fs::write(folder.join("index.json"), index.to_string()).unwrap();
}

#[test]
fn what_cannot_be_opened_is_neither_counted_nor_deleted() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    (1..=5).try_for_each(|step| save(dir.path(), step).map(drop))?;
    for (step, file) in [(2, "index.json"), (3, "config.json"), (5, "progress.json")] {
        let path = dir.path().join(folder_name(step)).join(file);
        let half = fs::metadata(&path).unwrap().len() / 2;
        File::options().write(true).open(&path).unwrap().set_len(half).unwrap();
    }
    let plan = Retention { last: 1, interval: None }.apply(dir.path())?;
    assert_eq!(plan.superseded, [dir.path().join("iter_0000001")]);
    let mut stay = left(dir.path());
    stay.sort();
    assert_eq!(stay, [2, 3, 4, 5]);
    assert_eq!(plan.damaged.len(), 3, "{:?}", plan.damaged);
    let line = &plan.damaged[0];
    assert!(line.contains("iter_0000005' is neither counted nor deleted"), "{line}");
    assert!(line.contains("progress.json' is truncated"), "{line}");
    Ok(())
}

/// A run that saves meanwhile deletes what was listed.
#[test]
fn a_checkpoint_that_vanishes_is_no_damage() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 0)?;
    std::thread::scope(|scope| {
        let saving = scope.spawn(|| {
            (1..200).try_for_each(|step| {
                save(dir.path(), step)?;
                Retention { last: 1, interval: None }.apply(dir.path()).map(drop)
            })
        });
        while !saving.is_finished() {
            for entry in list(dir.path())? {
                let incomplete = entry.folder.extension().is_some();
                assert!(incomplete || entry.contents.is_ok(), "{:?}", entry.contents);
            }
        }
        saving.join().unwrap()
    })
}
