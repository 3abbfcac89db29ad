//! Where a run leaves its files.

use ferrotron::models::checkpoint::Checkpoint;
use ferrotron::models::run::check_metrics;
use ferrotron::parallel::collective::Group;
use ferrotron::parallel::trace::check_target;
use ferrotron::{Device, Error, Result, Tensor};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use super::train_args::TrainArgs;

/// Errors if the folder that was asked for holds another run.
pub fn check(args: &TrainArgs, resumed: Option<&Checkpoint>) -> Result<()> {
    asked_for(args, resumed).map(drop)
}

/// Errors if the metrics or the trace would replace what is no metrics or no trace.
pub fn check_files(args: &TrainArgs, resumed: Option<&Checkpoint>) -> Result<()> {
    // A folder that is still to be made is empty.
    let folder = asked_for(args, resumed)?;
    let metrics = match &args.run.metrics {
        Some(file) => Some(file.clone()),
        None => folder.map(|folder| metrics(args, &folder)),
    };
    metrics.as_deref().map_or(Ok(()), check_metrics)?;
    args.run.trace.as_deref().map_or(Ok(()), check_target)
}

/// Where the metrics go.
pub fn metrics(args: &TrainArgs, folder: &Path) -> PathBuf {
    args.run.metrics.clone().unwrap_or_else(|| folder.join("metrics.jsonl"))
}

/// The folder of the run: as asked for, that of the checkpoint, or the next free number. The first rank of
/// `world` chooses.
pub fn make(
    args: &TrainArgs,
    resumed: Option<&Checkpoint>,
    world: &Group,
    device: &Device,
) -> Result<PathBuf> {
    let folder = match world.rank() {
        0 => asked_for(args, resumed)?.map_or_else(new_run, Ok)?,
        _ => PathBuf::new(),
    };
    if world.size() == 1 {
        return Ok(folder);
    }
    let bytes = folder.into_os_string().into_vec();
    let length = Tensor::from_slice(device, &[bytes.len() as i64], &[1])?;
    let length = world.broadcast(length, 0)?.wait()?.to_vec::<i64>()?[0] as usize;
    // What the others have only says how long it is.
    let own = if world.rank() == 0 { bytes } else { vec![0_u8; length] };
    let name = Tensor::from_slice(device, &own, &[length])?;
    let name = world.broadcast(name, 0)?.wait()?.to_vec::<u8>()?;
    Ok(OsString::from_vec(name).into())
}

fn asked_for(args: &TrainArgs, resumed: Option<&Checkpoint>) -> Result<Option<PathBuf>> {
    let loaded = resumed.and_then(|checkpoint| checkpoint.folder().parent());
    match (&args.run.save, loaded) {
        (Some(folder), _) if loaded == Some(folder) => Ok(Some(folder.clone())),
        (Some(folder), _) if folder.join("latest").exists() => Err(Error::config(
            "--save",
            format!(
                "{0} holds a run: go on with --load {0}, or choose another folder",
                folder.display()
            ),
        )),
        (Some(folder), _) => Ok(Some(folder.clone())),
        (None, loaded) => Ok(loaded.map(Path::to_path_buf)),
    }
}

/// Makes the next free `runs/NNNN`; two programs that start at once get different ones.
fn new_run() -> Result<PathBuf> {
    let fail = |error: std::io::Error| {
        Error::io("train", format!("cannot make a folder in runs/: {error}"))
    };
    std::fs::create_dir_all("runs").map_err(fail)?;
    loop {
        let number = newest_run().map_or(1, |(number, _)| number + 1);
        let folder = Path::new("runs").join(format!("{number:04}"));
        match std::fs::create_dir(&folder) {
            Ok(()) => return Ok(folder),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(fail(error)),
        }
    }
}

/// The run folder `runs/NNNN` with the largest number.
pub fn newest_run() -> Option<(u64, PathBuf)> {
    let numbered = std::fs::read_dir("runs").ok()?.filter_map(|entry| {
        let path = entry.ok()?.path();
        Some((path.file_name()?.to_str()?.parse::<u64>().ok()?, path))
    });
    numbered.max()
}
