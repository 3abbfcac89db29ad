//! The checkpoint from which all ranks of a job resume.
//!
//! A run that is being trained by another job may get a new `latest` at any moment, so rank 0 alone reads it. The
//! others open the checkpoint that it names, and all compare what they found.

use ferrotron::models::checkpoint::{Checkpoint, list};
use ferrotron::models::hugging_face;
use ferrotron::parallel::agreement::{Facts, agree, broadcast_bytes, digest};
use ferrotron::parallel::collective::Group;
use ferrotron::{Error, Result};
use std::path::{Path, PathBuf};

use super::args::run::RunArgs;
use super::options::remembered::canonical;
use super::output;

/// Opens the checkpoint of `--load`. A Hugging Face folder is none. There is none if `--save` names the same folder and no run has saved there yet:
/// one command line starts a run, and resumes it after any interruption.
///
/// # Errors
/// A checkpoint that cannot be opened, or is not there.
pub fn open(args: &RunArgs) -> Result<Option<Checkpoint>> {
    let load = args.load.as_deref().filter(|load| !hugging_face::is_folder(load));
    let Some(load) = load else { return Ok(None) };
    let saves_there = args.save.as_deref().is_some_and(|save| is_same(save, load));
    // A kill in the first save may leave a whole checkpoint that nothing names.
    match saves_there && !load.join("latest").exists() && !load.join("index.json").exists() {
        true => newest(load)?.map(|folder| Checkpoint::peek(&folder)).transpose(),
        false if load.exists() => Checkpoint::peek(load).map(Some),
        false => {
            let load = load.display();
            let message =
                format!("there is no '{load}'; to start a run there, give --save {load} as well");
            Err(Error::io("--load", message))
        }
    }
}

fn is_same(a: &Path, b: &Path) -> bool {
    let absolute = |path: &Path| path.canonicalize().or_else(|_| std::path::absolute(path));
    matches!((absolute(a), absolute(b)), (Ok(a), Ok(b)) if a == b)
}

/// The finished checkpoint of a run's folder that was written last.
///
/// # Errors
/// One that cannot be loaded: a run that began anew would delete it in the end.
fn newest(run: &Path) -> Result<Option<PathBuf>> {
    let entries = if run.exists() { list(run)? } else { Vec::new() };
    let Some(last) = entries.into_iter().rfind(|entry| entry.folder.extension().is_none()) else {
        return Ok(None);
    };
    let folder = run.display();
    if let Err(fault) = &last.contents {
        let message = format!(
            "'{folder}' has no file latest, and its newest checkpoint cannot be loaded: {fault}; name another one with --load"
        );
        return Err(Error::io("--load", message));
    }
    let newest = last.folder.display();
    output::note(&format!("'{folder}' has no file latest: going on from its newest, '{newest}'"));
    Ok(Some(last.folder))
}

/// Opens the checkpoint of `--load`, which each rank of `world` gives. Tensors are not read yet.
///
/// # Errors
/// On all ranks: another `--load`, another program or another checkpoint on some rank; one that rank 0 cannot open.
pub fn open_together(world: &Group, args: &RunArgs) -> Result<Option<Checkpoint>> {
    let load = args.load.as_deref();
    let first = if world.rank() == 0 { open(args) } else { Ok(None) };
    // The folder in a run's folder, "." if --load names the checkpoint itself, and nothing if there is none.
    let chosen = first.as_ref().ok().and_then(Option::as_ref).zip(load);
    let chosen = chosen.and_then(|(checkpoint, load)| checkpoint.folder().strip_prefix(load).ok());
    let chosen = chosen.map_or(Vec::new(), |folder| match folder.as_os_str().is_empty() {
        true => b".".to_vec(),
        false => folder.to_string_lossy().into_owned().into(),
    });
    let chosen = String::from_utf8_lossy(&broadcast_bytes(world, chosen)?).into_owned();
    let opened = match (world.rank(), load) {
        (0, _) => first,
        (_, Some(load)) if !chosen.is_empty() => Checkpoint::peek(&load.join(&chosen)).map(Some),
        _ => Ok(None),
    };
    let found = match &opened {
        Err(error) if world.rank() == 0 => Err(error),
        Err(error) => Ok(error.to_string()),
        Ok(None) => Ok("none".to_string()),
        Ok(Some(checkpoint)) => Ok(identity(checkpoint)),
    };
    let facts = found.map(|checkpoint| {
        let load = load.map(|path| canonical("load", &path.to_string_lossy()));
        Facts::from([
            ("--load".to_string(), load.unwrap_or("not given".to_string())),
            ("program version".to_string(), env!("CARGO_PKG_VERSION").to_string()),
            ("the checkpoint".to_string(), checkpoint),
        ])
    });
    let agreed = agree(world, facts.as_ref().map_err(|error| *error));
    agreed.and(opened)
}

/// The step and a digest of the index, which has the checksums of all files.
pub fn identity(checkpoint: &Checkpoint) -> String {
    let index = std::fs::read(checkpoint.folder().join("index.json"));
    let index = index.map_or_else(|error| error.to_string(), |bytes| digest(&bytes));
    format!("step {} with index {index}", checkpoint.progress().step)
}
