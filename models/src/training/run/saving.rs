//! The checkpoints of a run: which step was saved, and the one that is being written.

use ferrotron_tensor::{Error, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::config::RunConfig;
use crate::io::checkpoint::{PendingSave, RetentionPlan, folder_name, lower_priority};
use crate::io::tokenizer::Tokenizer;
use crate::training::trainer::{Model, SaveMode, Trainer};

/// The checkpoints of a run. All ranks call its methods, in one order.
pub(super) struct Saving<'a> {
    config: &'a RunConfig,
    tokenizer: Option<&'a Tokenizer>,
    /// Whether this rank deletes superseded checkpoints.
    first: bool,
    pending: Option<PendingSave>,
    /// Deletes superseded checkpoints while training goes on.
    deleting: Option<JoinHandle<Result<RetentionPlan>>>,
    /// A line for each checkpoint that cannot be loaded, and whether it was told.
    damaged: BTreeMap<String, bool>,
    /// The step that was saved last, and where.
    saved: Option<(u64, PathBuf)>,
}

/// The wait of a save for the checkpoint of an earlier step.
pub(super) struct Waited {
    pub step: u64,
    pub duration: Duration,
    /// The folder of that checkpoint.
    pub folder: PathBuf,
}

impl<'a> Saving<'a> {
    /// Nothing is saved yet, but for the checkpoint of step `done` from which the run resumes, if that is in its folder.
    pub fn new(
        config: &'a RunConfig,
        tokenizer: Option<&'a Tokenizer>,
        (first, done): (bool, u64),
    ) -> Saving<'a> {
        let real = |folder: &Path| folder.canonicalize().ok();
        let is_here = |loaded: &&PathBuf| {
            let own = real(&config.folder.join(folder_name(done)));
            own.is_some() && own == real(loaded)
        };
        let saved = config.loaded.as_ref().filter(is_here).map(|loaded| (done, loaded.clone()));
        let damaged = BTreeMap::new();
        Saving { config, tokenizer, first, pending: None, deleting: None, damaged, saved }
    }

    /// The folder of the last checkpoint of `step`, if it is published.
    pub fn folder(&self, step: u64) -> Option<PathBuf> {
        let saved = self.saved.as_ref().filter(|(saved, _)| *saved == step);
        saved.map(|(_, folder)| folder.clone())
    }

    /// This rank's [flags](PendingSave::flags) of the checkpoint that is being written.
    pub fn flags(&mut self) -> [f64; 2] {
        self.pending.as_mut().map_or([0.0; 2], PendingSave::flags)
    }

    /// Goes on with the checkpoint that is being written, with the sums of all ranks' flags. Returns its folder if it is
    /// published now.
    ///
    /// Errors, and forgets the checkpoint, if a rank could not write it.
    pub fn advance(&mut self, sums: [f64; 2]) -> Result<Option<PathBuf>> {
        let Some(mut pending) = self.pending.take() else { return Ok(None) };
        match pending.advance(sums)? {
            Some(folder) => {
                self.finish_deleting()?;
                if self.first {
                    let (retention, dir) = (self.config.retention, self.config.folder.clone());
                    self.deleting = Some(in_background(move || retention.apply(&dir))?);
                }
                self.saved = Some((pending.step(), folder.clone()));
                Ok(Some(folder))
            }
            None => {
                self.pending = Some(pending);
                Ok(None)
            }
        }
    }

    /// Waits for the checkpoint that is being written, if there is one, and until superseded ones are deleted.
    pub fn finish(&mut self) -> Result<Option<PathBuf>> {
        self.finish_deleting()?;
        let Some(pending) = self.pending.take() else { return Ok(None) };
        let step = pending.step();
        let folder = pending.wait()?;
        self.publish(step, folder).map(Some)
    }

    /// Begins to save the step that was taken last, if the trainer [saves asynchronously](SaveMode::Async). What it had to
    /// wait for is returned.
    ///
    /// Errors if a weight is not finite.
    pub fn begin<M: Model>(&mut self, trainer: &Trainer<M>) -> Result<Option<Waited>> {
        let (started, earlier) = (Instant::now(), self.pending.as_ref().map(PendingSave::step));
        let waited = self.finish()?.zip(earlier).map(|(folder, step)| Waited {
            step,
            duration: started.elapsed(),
            folder,
        });
        check_finite(trainer)?;
        let options = self.config.options.clone();
        self.pending = Some(trainer.save_async(&self.config.folder, self.tokenizer, options)?);
        Ok(waited)
    }

    /// Saves the step that was taken last, and returns the folder.
    ///
    /// Errors if a weight is not finite.
    pub fn save<M: Model>(&mut self, trainer: &Trainer<M>) -> Result<PathBuf> {
        check_finite(trainer)?;
        let options = self.config.options.clone();
        let folder = trainer.save(&self.config.folder, self.tokenizer, options)?;
        self.publish(trainer.progress().step, folder)
    }

    /// Waits until superseded checkpoints are deleted: a save that begins removes what looks half deleted.
    fn finish_deleting(&mut self) -> Result<()> {
        let failed = |_| Error::value("checkpoint", "a thread that deletes has failed");
        if let Some(thread) = self.deleting.take() {
            self.note_damage(thread.join().map_err(failed)??);
        }
        Ok(())
    }

    fn note_damage(&mut self, deleted: RetentionPlan) {
        for line in deleted.damaged {
            self.damaged.entry(line).or_default();
        }
    }

    /// Lines about checkpoints that cannot be loaded, each once.
    pub fn new_damage(&mut self) -> impl Iterator<Item = &str> {
        let damaged = self.damaged.iter_mut();
        damaged.filter_map(|(line, told)| (!std::mem::replace(told, true)).then_some(line.as_str()))
    }

    fn publish(&mut self, step: u64, folder: PathBuf) -> Result<PathBuf> {
        if self.first {
            self.note_damage(self.config.retention.apply(&self.config.folder)?);
        }
        self.saved = Some((step, folder.clone()));
        Ok(folder)
    }
}

impl Drop for Saving<'_> {
    fn drop(&mut self) {
        // An earlier error is the one to report.
        let _ = self.finish_deleting();
    }
}

/// Runs `work` in a thread to which training does not give way.
fn in_background(
    work: impl FnOnce() -> Result<RetentionPlan> + Send + 'static,
) -> Result<JoinHandle<Result<RetentionPlan>>> {
    let run = || {
        lower_priority();
        work()
    };
    let started = std::thread::Builder::new().name("checkpoint".into()).spawn(run);
    started.map_err(|error| Error::io("checkpoint", format!("cannot start a thread: {error}")))
}

/// Errors on all ranks if a weight of one is not finite.
fn check_finite<M: Model>(trainer: &Trainer<M>) -> Result<()> {
    let damaged = f64::from(u8::from(!trainer.buffers().weights_are_finite()?));
    if trainer.mesh().world().sum(trainer.host(), damaged)? == 0.0 {
        return Ok(());
    }
    let culprit = trainer.buffers().first_non_finite()?;
    let culprit = culprit.unwrap_or_else(|| "a weight of another rank".into());
    let step = trainer.progress().step;
    Err(Error::value("train", format!("step {step}: not saved; first offender: {culprit}")))
}

/// Whether checkpoints of a run are written while it goes on.
pub(super) fn is_async<M: Model>(trainer: &Trainer<M>) -> bool {
    trainer.config().saves == SaveMode::Async
}
