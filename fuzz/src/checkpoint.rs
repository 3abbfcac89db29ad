//! A file of a checkpoint, behind a byte with its number.

use crate::folder::{path, write};
use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron_models::checkpoint::Checkpoint;
use ferrotron_models::gpt::{Gpt, GptConfig};
use ferrotron_models::trainer::{Trainer, TrainerConfig};
use ferrotron_nn::Scope;
use ferrotron_nn::schedule::LrSchedule;
use ferrotron_tensor::{DType, Device, Result};
use std::path::PathBuf;

fn trainer() -> Result<Trainer<Gpt>> {
    let batch_size = BatchSize::new(BatchSizeConfig::default())?;
    let config = TrainerConfig::new(1, LrSchedule::constant(1e-3)?, batch_size);
    let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1);
    Trainer::new(&scope, &GptConfig::gpt2(5, 1, 4, 2, 3), config)
}

/// The files of a small checkpoint, by name, and their whole contents.
fn files() -> Vec<(PathBuf, Vec<u8>)> {
    let folder = path("saved");
    if !folder.exists() {
        let trainer = trainer().expect("the model is small");
        trainer.save(&folder, None, serde_json::json!({"a": 1})).expect("it can be saved");
    }
    let mut paths = vec![folder.join("latest")];
    let step =
        std::fs::read_dir(&folder).expect("it was saved").map(|entry| entry.expect("it is there"));
    let step = step.map(|entry| entry.path()).find(|path| path.is_dir()).expect("a step");
    paths.extend(
        std::fs::read_dir(step)
            .expect("it was saved")
            .map(|entry| entry.expect("it is there").path()),
    );
    paths.sort();
    let contents = |path: PathBuf| {
        let bytes = std::fs::read(&path).expect("it can be read");
        (path, bytes)
    };
    paths.into_iter().map(contents).collect()
}

pub fn seeds() -> Vec<Vec<u8>> {
    let numbered = files().into_iter().enumerate();
    numbered.map(|(number, (_, bytes))| [vec![number as u8], bytes].concat()).collect()
}

pub fn read(bytes: &[u8]) -> bool {
    thread_local! {
        static FILES: Vec<(PathBuf, Vec<u8>)> = files();
    }
    let Some((&number, bytes)) = bytes.split_first() else { return false };
    FILES.with(|files| {
        let Some((path, whole)) = files.get(usize::from(number)) else { return false };
        write(path, bytes);
        let taken = load().is_ok();
        write(path, whole);
        taken
    })
}

fn load() -> Result<()> {
    let folder = path("saved");
    let checkpoint = Checkpoint::peek(&folder)?;
    checkpoint.config_as::<GptConfig>("gpt")?;
    checkpoint.dtype()?;
    checkpoint.kept_in_fp32()?;
    trainer()?.load(&checkpoint)?;
    Checkpoint::open(&folder).map(drop)
}
