//! Rewinding a run behind a bad step, to the last checkpoint that its save interval has written.
//!
//! Checkpoints that a stop has left in between do not count where there is another: a run that was stopped rewinds to the
//! same checkpoint as one that was not. Until the run has a checkpoint of its own, it rewinds to the one that was loaded.

use ferrotron_parallel::agreement::broadcast_bytes;
use ferrotron_tensor::{Error, Result};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use super::{Run, RunConfig};
use crate::io::checkpoint::{Checkpoint, folder_name};
use crate::training::trainer::Model;

impl RunConfig {
    /// The checkpoint to rewind to in a run that has loaded the checkpoint `loaded`.
    pub(super) fn rewind_to(&self, loaded: &Path) -> PathBuf {
        let file = loaded.file_name().and_then(|name| name.to_str());
        let step = file.and_then(|name| name.strip_prefix("iter_")?.parse::<u64>().ok());
        let before = step.and_then(|step| step.checked_div(self.intervals.save_interval));
        let before = before.filter(|&count| count > 0); // a run that goes on undisturbed has no checkpoint of step 0
        let name = before.map(|count| folder_name(count * self.intervals.save_interval));
        let regular = name.map(|name| loaded.with_file_name(name));
        regular.filter(|folder| folder.exists()).unwrap_or_else(|| loaded.to_path_buf())
    }
}

impl<M: Model> Run<'_, M> {
    /// Rewinds the trainer to the checkpoint that the first rank names.
    ///
    /// # Errors
    /// There is no checkpoint yet, or the one that is being written cannot be; as [`Trainer::rewind`](crate::training::trainer::Trainer::rewind).
    pub(super) fn rewind(&mut self) -> Result<()> {
        self.finish_saving()?;
        let folder = self.rewind_to.clone().unwrap_or_default().into_os_string().into_vec();
        let folder = broadcast_bytes(self.trainer.mesh().world(), folder)?;
        if folder.is_empty() {
            let message = format!(
                "step {} is bad, and there is no checkpoint to rewind to yet: choose a smaller --save-interval, or \
                 --on-bad-step skip",
                self.trainer.progress().step
            );
            return Err(Error::value("train", message));
        }
        let checkpoint = Checkpoint::peek(Path::new(&OsString::from_vec(folder)))?;
        self.trainer.rewind(&checkpoint)
    }
}
