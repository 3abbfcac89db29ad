//! One event file: created under a name that no other process has, and appended to.

use ferrotron_parallel::output_file::{truncate, unwritable};
use ferrotron_tensor::Result;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::event::{self, EventValue};
use super::record;

const OPERATION: &str = "tensorboard";

/// The beginning of the names of event files; TensorBoard looks for `tfevents` in them.
const BEGIN: &str = "events.out.tfevents.";

/// An event file that this process writes.
#[derive(Debug)]
pub struct EventFile {
    path: PathBuf,
    file: File,
}

impl EventFile {
    /// Creates a file in `folder`, which is made if needed, for steps from `first_step` on. To readers it replaces the
    /// events of these steps in the folder's other files: TensorBoard's `purge_step`.
    ///
    /// # Errors
    /// A folder or file that cannot be written.
    pub fn create(folder: &Path, first_step: u64) -> Result<EventFile> {
        let fail = |error: io::Error| unwritable(OPERATION, folder, &error);
        std::fs::create_dir_all(folder).map_err(fail)?;
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        // Readers take the files of a folder by name, so this one must be the last, even behind one of the same second.
        let last = event_files(folder).iter().filter_map(|path| seconds(path)).max();
        let seconds = last.map_or(0, |last| last + 1).max(wall_time() as u64);
        let process = std::process::id();
        let mut number = 0;
        let (path, file) = loop {
            let name = format!("{BEGIN}{seconds:010}.{host}.{process}.{number}");
            let path = folder.join(name);
            match OpenOptions::new().append(true).create_new(true).open(&path) {
                Ok(file) => break (path, file),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
                Err(error) => return Err(unwritable(OPERATION, &path, &error)),
            }
        };
        let mut events = EventFile { path, file };
        events.append(&[
            event::file_version(wall_time()),
            event::session_start(wall_time(), first_step),
        ])?;
        Ok(events)
    }

    /// Appends the values of a step, each under its tag. What cannot be written whole is taken back.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write(&mut self, step: u64, values: &[(String, EventValue)]) -> Result<()> {
        self.append(&[event::summary(wall_time(), step, values)])
    }

    fn append(&mut self, events: &[Vec<u8>]) -> Result<()> {
        let mut records = Vec::new();
        events.iter().for_each(|event| record::push(&mut records, event));
        let mut append = || {
            let before = self.file.metadata()?.len();
            let written = self.file.write_all(&records);
            if written.is_err() {
                truncate(&self.file, before)?;
            }
            written
        };
        append().map_err(|error| unwritable(OPERATION, &self.path, &error))
    }
}

/// The event files in `folder`.
pub fn event_files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    entries.flatten().map(|entry| entry.path()).filter(|path| seconds(path).is_some()).collect()
}

/// The time in the name of an event file, if it is one.
fn seconds(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_str()?.strip_prefix(BEGIN)?;
    name.split('.').next()?.parse().ok()
}

/// Seconds since 1970.
fn wall_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}
