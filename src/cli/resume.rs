//! The checkpoint from which all ranks of a job resume.
//!
//! A run that is being trained by another job may get a new `latest` at any moment, so rank 0 alone reads it. The
//! others open the checkpoint that it names, and all compare what they found.

use ferrotron::Result;
use ferrotron::models::checkpoint::Checkpoint;
use ferrotron::parallel::agreement::{Facts, agree, broadcast_bytes, digest};
use ferrotron::parallel::collective::Group;
use std::path::Path;

use super::options::remembered::canonical;

/// Opens the checkpoint of `--load`, which each rank of `world` gives. Tensors are not read yet.
///
/// # Errors
/// On all ranks: another `--load`, another program or another checkpoint on some rank; one that rank 0 cannot open.
pub fn open_together(world: &Group, load: Option<&Path>) -> Result<Option<Checkpoint>> {
    let first = match load.filter(|_| world.rank() == 0) {
        Some(load) => Checkpoint::peek(load).map(Some),
        None => Ok(None),
    };
    // The folder in a run's folder, and nothing if --load names the checkpoint itself.
    let chosen = first.as_ref().ok().and_then(Option::as_ref).zip(load);
    let chosen = chosen.and_then(|(checkpoint, load)| checkpoint.folder().strip_prefix(load).ok());
    let chosen = chosen.map_or(Vec::new(), |folder| folder.to_string_lossy().into_owned().into());
    let chosen = String::from_utf8_lossy(&broadcast_bytes(world, chosen)?).into_owned();
    let opened = match (world.rank(), load) {
        (0, _) => first,
        (_, Some(load)) => Checkpoint::peek(&load.join(&chosen)).map(Some),
        (_, None) => Ok(None),
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
fn identity(checkpoint: &Checkpoint) -> String {
    let index = std::fs::read(checkpoint.folder().join("index.json"));
    let index = index.map_or_else(|error| error.to_string(), |bytes| digest(&bytes));
    format!("step {} with index {index}", checkpoint.progress().step)
}
