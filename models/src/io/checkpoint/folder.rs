//! The folder of a run: finished checkpoints, the one being written, and `latest`.
//!
//! | entry | what it is |
//! |---|---|
//! | `iter_0000100` | a finished checkpoint of step 100 |
//! | `iter_0000100.tmp` | one being written or deleted; anything under this name may be discarded |
//! | `iter_0000100.old` | a finished one while another of the same step takes its place |
//! | `latest` | a text file: the name of the checkpoint to resume from |
//!
//! A folder gets its final name by one rename, after the disk has all of its files, and `latest` is
//! replaced by another: at any moment `latest` names a finished checkpoint.

use std::cmp::Reverse;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{CONFIG, SAVED};
use crate::io::checked_file::{Fault, cannot, write_bytes};

/// Name of the file that names the checkpoint to resume from.
pub(super) const LATEST: &str = "latest";

/// Seconds since 1970 that no clock shows: the year 5138.
const END_OF_TIMES: f64 = 1e11;

const TEMPORARY: &str = ".tmp";
const OLD: &str = ".old";

/// The name of the folder of a step.
pub fn name(step: u64) -> String {
    format!("iter_{step:07}")
}

/// Whether this is the name of a checkpoint's folder.
pub(super) fn is_name(name: &str) -> bool {
    name.strip_prefix("iter_")
        .is_some_and(|step| step.len() >= 7 && step.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The name of the checkpoint that `latest` in `dir` names, if it does.
pub(super) fn latest(dir: &Path) -> Option<String> {
    let text = fs::read_to_string(dir.join(LATEST)).ok()?;
    Some(text.trim().to_string()).filter(|name| is_name(name))
}

/// The step in the name of a checkpoint's folder, also of one that is being written or deleted.
pub fn step(folder: &Path) -> Option<u64> {
    let name = folder.file_name()?.to_str()?;
    let name = name.strip_suffix(TEMPORARY).unwrap_or(name);
    let name = name.strip_suffix(OLD).unwrap_or(name);
    is_name(name).then(|| name["iter_".len()..].parse().ok())?
}

/// The folder of `name`, or the one that was about to make room for it.
pub(super) fn find(dir: &Path, name: &str) -> PathBuf {
    let (folder, old) = (dir.join(name), dir.join(format!("{name}{OLD}")));
    if !folder.exists() && old.exists() { old } else { folder }
}

/// The folder in which the checkpoint of a step is written.
pub(super) fn staging(dir: &Path, step: u64) -> PathBuf {
    dir.join(format!("{}{TEMPORARY}", name(step)))
}

/// The folder of a whole checkpoint.
pub(super) fn published(dir: &Path, step: u64) -> PathBuf {
    dir.join(name(step))
}

/// A checkpoint being written. Dropped before it is published, it leaves nothing behind.
pub(super) struct Staging {
    dir: PathBuf,
    name: String,
    /// The folder of the files.
    pub folder: PathBuf,
}

impl Staging {
    /// An empty folder in `dir`, which is made if need be and rid of what a killed process left.
    pub fn begin(dir: &Path, step: u64) -> Result<Staging, Fault> {
        fs::create_dir_all(dir).map_err(|error| cannot("create", dir, &error))?;
        clean(dir)?;
        let (name, folder) = (name(step), staging(dir, step));
        fs::create_dir(&folder).map_err(|error| cannot("create", &folder, &error))?;
        Ok(Staging { dir: dir.to_path_buf(), name, folder })
    }

    /// Gives the folder its name and lets `latest` name it.
    pub fn publish(self) -> Result<PathBuf, Fault> {
        sync(&self.folder)?;
        let (target, old) =
            (self.dir.join(&self.name), self.dir.join(format!("{}{OLD}", self.name)));
        if target.exists() {
            rename(&target, &old)?;
        }
        if let Err(fault) = rename(&self.folder, &target) {
            if old.exists() {
                rename(&old, &target)?;
            }
            return Err(fault);
        }
        sync(&self.dir)?;
        let (latest, new) = (self.dir.join(LATEST), self.dir.join(format!("{LATEST}{TEMPORARY}")));
        write_bytes(&new, format!("{}\n", self.name).as_bytes())?;
        rename(&new, &latest)?;
        sync(&self.dir)?;
        if old.exists() {
            delete(&old)?;
        }
        Ok(target)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // Published, there is no such folder any more. An error has already been reported: the disk that
        // refuses to write may refuse to delete, and the next save tries again.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// The finished checkpoints of `dir`, last written first.
pub fn list(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            is_name(entry.file_name().to_str()?).then(|| entry.path())
        })
        .collect();
    found.sort_by_cached_key(|folder| Reverse(age(folder)));
    found
}

/// The time of saving and the step of a checkpoint: the larger, the newer. A run that went back to an earlier step saves
/// lower numbers later, so time decides; earlier versions recorded none. Times of files are those of a copy.
pub(super) fn age(folder: &Path) -> (Option<Duration>, Option<u64>) {
    (saved(folder), step(folder))
}

/// The time of saving that a checkpoint records, since 1970.
pub(super) fn saved(folder: &Path) -> Option<Duration> {
    let config = fs::read(folder.join(CONFIG)).ok()?;
    let config: serde_json::Value = serde_json::from_slice(&config).ok()?;
    let seconds = config.get(SAVED)?.as_f64().filter(|seconds| *seconds < END_OF_TIMES)?;
    Duration::try_from_secs_f64(seconds).ok()
}

/// Deletes a checkpoint; killed halfway, it leaves rubbish that is known as such.
pub(super) fn delete(folder: &Path) -> Result<(), Fault> {
    let mut rubbish = folder.as_os_str().to_owned();
    rubbish.push(TEMPORARY);
    let rubbish = PathBuf::from(rubbish);
    rename(folder, &rubbish)?;
    fs::remove_dir_all(&rubbish).map_err(|error| cannot("delete", &rubbish, &error))
}

/// Removes what killed processes left in `dir`.
pub(super) fn clean(dir: &Path) -> Result<(), Fault> {
    let entries = fs::read_dir(dir).map_err(|error| cannot("read", dir, &error))?;
    for entry in entries {
        let entry = entry.map_err(|error| cannot("read", dir, &error))?;
        let (path, file) = (entry.path(), entry.file_name());
        let Some(file) = file.to_str() else { continue };
        if let Some(name) = file.strip_suffix(OLD)
            && is_name(name)
        {
            let target = dir.join(name);
            if target.exists() { delete(&path)? } else { rename(&path, &target)? }
        } else if let Some(name) = file.strip_suffix(TEMPORARY)
            && is_name(name.strip_suffix(OLD).unwrap_or(name))
        {
            fs::remove_dir_all(&path).map_err(|error| cannot("delete", &path, &error))?;
        }
    }
    Ok(())
}

fn rename(from: &Path, to: &Path) -> Result<(), Fault> {
    fs::rename(from, to).map_err(|error| cannot("rename", from, &error))
}

/// Waits until the disk has the names in a folder.
fn sync(folder: &Path) -> Result<(), Fault> {
    // Elsewhere folders cannot be opened, and renames are in order.
    if cfg!(unix) {
        File::open(folder)
            .and_then(|file| file.sync_all())
            .map_err(|error| cannot("write", folder, &error))?;
    }
    Ok(())
}
