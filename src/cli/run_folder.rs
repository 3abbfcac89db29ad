//! The folders and files of a run.

use ferrotron::models::checkpoint::Checkpoint;
use ferrotron::models::run::check_metrics;
use ferrotron::models::run_lock::RunLock;
use ferrotron::parallel::agreement::broadcast_bytes;
use ferrotron::parallel::collective::Group;
use ferrotron::parallel::trace::check_target;
use ferrotron::{Error, Result};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use super::args::train::TrainArgs;
use super::job::ProcessRole;
use super::output;

/// Errors if the requested folder holds another run or is in use, or if files in it are of another kind. The first rank or
/// the launcher of `job` checks for all.
pub fn check(args: &TrainArgs, resumed: Option<&Checkpoint>, job: &ProcessRole) -> Result<()> {
    if matches!(job, ProcessRole::Rank(rank) if rank.rank > 0) {
        return Ok(());
    }
    if let Some(save) = args.run.save.as_deref().filter(|save| save.exists() && !save.is_dir()) {
        let message = format!("'{}' is a file: name the folder of a run", save.display());
        return Err(Error::config("--save", message));
    }
    let loaded = resumed.map(run_of);
    if let Some(folder) = args.run.save.as_deref().or(loaded) {
        RunLock::check(folder)?;
    }
    check_files(args, asked_for(args, resumed)?.as_deref())
}

/// The folder of the run to which a checkpoint belongs.
fn run_of(checkpoint: &Checkpoint) -> &Path {
    let parent = checkpoint.folder().parent();
    parent.filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Errors if the metrics or the trace would replace a file of another kind. A `folder` that is still to be made is empty.
fn check_files(args: &TrainArgs, folder: Option<&Path>) -> Result<()> {
    let metrics = match &args.run.metrics {
        Some(file) => Some(file.clone()),
        None => folder.map(|folder| metrics(args, folder)),
    };
    if let Some(file) = args.run.metrics.as_deref() {
        check_owner(file, folder)?;
    }
    metrics.as_deref().map_or(Ok(()), check_metrics)?;
    args.run.trace.as_deref().map_or(Ok(()), check_target)
}

/// Errors if the metrics' `file` lies in the folder of another run than that of `folder`, whose lines a run that begins would
/// remove.
fn check_owner(file: &Path, folder: Option<&Path>) -> Result<()> {
    let Some(other) = file.parent().filter(|parent| parent.join("latest").exists()) else {
        return Ok(());
    };
    let real = |folder: &Path| folder.join(".").canonicalize().ok(); // "" is the folder of the process
    if real(other) == folder.and_then(real) {
        return Ok(());
    }
    let (file, other) = (file.display(), other.display());
    let message = format!("'{file}' is of the run in '{other}', name another file");
    Err(Error::config("--metrics", message))
}

/// The file of the metrics.
pub fn metrics(args: &TrainArgs, folder: &Path) -> PathBuf {
    args.run.metrics.clone().unwrap_or_else(|| folder.join("metrics.jsonl"))
}

/// The folder of the run: as asked for, that of the checkpoint, or the next free number. The first rank of
/// `world` chooses.
pub fn make(args: &TrainArgs, resumed: Option<&Checkpoint>, world: &Group) -> Result<PathBuf> {
    let folder = match world.rank() {
        0 => asked_for(args, resumed)?.map_or_else(new_run, Ok)?,
        _ => PathBuf::new(),
    };
    Ok(OsString::from_vec(broadcast_bytes(world, folder.into_os_string().into_vec())?).into())
}

fn asked_for(args: &TrainArgs, resumed: Option<&Checkpoint>) -> Result<Option<PathBuf>> {
    let loaded = resumed.map(run_of);
    // A folder has many names: relative, absolute, through a link.
    let same = |folder: &Path| {
        let names = loaded.map(|loaded| (loaded.canonicalize(), folder.canonicalize()));
        matches!(names, Some((Ok(loaded), Ok(folder))) if loaded == folder)
    };
    match (&args.run.save, loaded) {
        (Some(folder), _) if same(folder) => Ok(Some(folder.clone())),
        (Some(folder), _) => RunLock::check_new(folder).map(|()| Some(folder.clone())),
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
        let number = numbered_runs().into_iter().max().map_or(1, |(number, _)| number + 1);
        let folder = Path::new("runs").join(format!("{number:04}"));
        match std::fs::create_dir(&folder) {
            Ok(()) => return Ok(folder),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(fail(error)),
        }
    }
}

/// Removes the folder of a run that was refused before it wrote anything there.
pub fn remove_if_empty(folder: &Path) {
    // A folder that holds something stays: `remove_dir` refuses it.
    let _ = std::fs::remove_dir(folder);
}

/// The newest run in `runs/` that has a checkpoint. A newer one without is named on standard error.
///
/// # Errors
/// There is none; `op` names the option or command that wants it.
pub fn newest_run(op: &'static str) -> Result<PathBuf> {
    newest_run_with(op, "latest", "checkpoint")
}

/// The newest run in `runs/` that has the file, which is its `name`. A newer one without is named on standard error.
///
/// # Errors
/// The errors of [`newest_run`].
pub fn newest_run_with(op: &'static str, file: &str, name: &str) -> Result<PathBuf> {
    let mut runs = numbered_runs();
    runs.sort();
    let newest = runs.last().map(|(_, folder)| folder.clone());
    let found = runs.into_iter().map(|(_, folder)| folder).rfind(|run| run.join(file).exists());
    let Some(found) = found else {
        let message =
            format!("there is no run with a {name} in runs/: train one first, or name one");
        return Err(Error::config(op, message));
    };
    if let Some(newest) = newest.filter(|newest| *newest != found) {
        output::note(&format!(
            "'{}' has no {name} yet: taking '{}'",
            newest.display(),
            found.display()
        ));
    }
    Ok(found)
}

/// The error of a command that wants the checkpoints of a folder that has none.
pub fn no_checkpoint(folder: &Path) -> Error {
    Error::io("checkpoint", format!("'{}' holds no checkpoint", folder.display()))
}

/// The run folders `runs/NNNN` with their numbers.
fn numbered_runs() -> Vec<(u64, PathBuf)> {
    let entries = std::fs::read_dir("runs").into_iter().flatten();
    let numbered = entries.filter_map(|entry| {
        let path = entry.ok()?.path();
        Some((path.file_name()?.to_str()?.parse::<u64>().ok()?, path))
    });
    numbered.collect()
}
