//! Rewinding a run behind a bad step, to the last checkpoint that its save interval has written.
//!
//! Checkpoints that a stop has left in between do not count where there is another: a run that was stopped rewinds to the
//! same checkpoint as one that was not. Until the run has a checkpoint of its own, it rewinds to the one that was loaded.
//!
//! If that checkpoint cannot be loaded, the run warns and rewinds to the newest other one that can.

use ferrotron_parallel::agreement::broadcast_bytes;
use ferrotron_tensor::{Error, ErrorKind, Result};
use std::cmp::Reverse;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::{Run, RunConfig};
use crate::io::checkpoint::{self, Checkpoint, folder_name};
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
    /// Rewinds the trainer to the checkpoint that the first rank names, or to the newest other one that can be loaded.
    ///
    /// # Errors
    /// There is no checkpoint yet, or none can be loaded, with the reason of the first; the one that is being written
    /// cannot be; as [`Trainer::rewind`](crate::training::trainer::Trainer::rewind).
    pub(super) fn rewind(&mut self) -> Result<()> {
        self.finish_saving()?;
        let named: Vec<_> = self.rewind_candidates().into_iter().map(OsString::from).collect();
        let named: Vec<&[u8]> = named.iter().map(|folder| folder.as_bytes()).collect();
        let named = broadcast_bytes(self.trainer.mesh().world(), named.join(&0))?;
        let step = self.trainer.progress().step;
        if named.is_empty() {
            let message = format!(
                "step {step} is bad, and there is no checkpoint to rewind to yet: choose a smaller --save-interval, or \
                 --on-bad-step skip"
            );
            return Err(Error::value("train", message));
        }
        let mut refused = None;
        for folder in named.split(|&byte| byte == 0) {
            let folder = PathBuf::from(OsStr::from_bytes(folder));
            if let Err(fault) = self.try_rewind(&folder)? {
                refused = refused.or(Some(fault));
                continue;
            }
            if let Some(fault) = &refused {
                if self.first {
                    let folder = folder.display();
                    let message = format!("step {step}: rewound to '{folder}', for {fault}");
                    self.observer.warning(&message);
                }
                self.rewind_to = Some(folder);
            }
            return Ok(());
        }
        Err(refused.unwrap_or_else(|| Error::value("train", "there is no checkpoint to rewind to")))
    }

    /// Rewinds to one checkpoint; if it cannot be loaded, all ranks get the reason.
    fn try_rewind(&mut self, folder: &Path) -> Result<Result<()>> {
        let peeked = Checkpoint::peek(folder);
        let failed = f64::from(u8::from(peeked.is_err()));
        if self.trainer.mesh().world().sum(self.trainer.host(), failed)? > 0.0 {
            let unseen = || Error::io("checkpoint", "another rank cannot read it".to_string());
            return Ok(Err(peeked.err().unwrap_or_else(unseen)));
        }
        match self.trainer.rewind(&peeked?) {
            Err(error) if error.kind() == ErrorKind::Io && error.op() == "checkpoint" => {
                Ok(Err(error))
            }
            rewound => rewound.map(Ok),
        }
    }

    /// The checkpoint to rewind to, then all others of the run, newest step first.
    fn rewind_candidates(&self) -> Vec<PathBuf> {
        let Some(first) = self.rewind_to.clone() else { return Vec::new() };
        let now = self.trainer.progress().step;
        let mut others = checkpoint::list_folders(&self.config.folder);
        others.extend(self.config.loaded.clone());
        others.retain(|folder| *folder != first);
        others.retain(|folder| checkpoint::folder_step(folder).is_some_and(|step| step < now));
        others.sort_by_key(|folder| Reverse(checkpoint::folder_step(folder)));
        others.dedup();
        [vec![first], others].concat()
    }
}
