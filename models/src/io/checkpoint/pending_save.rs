//! A checkpoint that is being written: by threads of all ranks, then published by one of the first rank.
//!
//! ```text
//!              training thread                              writer thread
//!  all ranks   makes the folder, barrier, copies tensors -> writes its files
//!              flags [unfinished, failed], summed over ranks    |
//!              0 unfinished <-----------------------------------+
//!  rank 0      starts the publication ------------------>   joins the lists, checks, renames, latest
//!              flags, summed over ranks                         |
//!  all ranks   0 unfinished: published <------------------------+
//! ```
//!
//! The writer threads call no collective. Training threads sum two flags of each rank between two steps, or, where they
//! wait for the checkpoint, every tenth of a second: so no call takes as long as the disks do, and none times out. Ranks with GPUs write
//! in place, and take as long. A single rank's thread publishes at once.
//!
//! If a rank fails, the sum tells all ranks. The others stop writing; when none writes any more, the first removes the
//! folder, and the failed rank returns its error, which ends the rest with the same line.

use ferrotron_parallel::collective::{Group, Reduction};
use ferrotron_parallel::long_work::POLL_INTERVAL;
use ferrotron_tensor::{Device, Error, Result, Tensor};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{JoinHandle, sleep};
use std::time::Duration;

use super::folder::{self, Staging};
use super::index::{INDEX, Index};
use super::rank_files::{part_name, write_part};
use crate::io::checked_file::{Fault, write_bytes};

/// Names and texts of the files beside the tensors.
pub(super) type Documents = Vec<(&'static str, String)>;

/// The thread that writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Writes {
    Here,
    InThread,
    /// Writes beside training steps, which come first.
    InBackground,
}

/// The result of a writer: what was written, or nothing more than that the checkpoint is published.
type Written = std::result::Result<Option<Index>, Fault>;

/// A checkpoint that is being written. Between two steps, each rank sums its [flags](PendingSave::flags) over all ranks
/// and gives the sums to [`PendingSave::advance`]; or it [waits](PendingSave::wait) for the end.
///
/// Dropped before its end, it stops writing and leaves the last checkpoint in place.
pub struct PendingSave {
    dir: PathBuf,
    step: u64,
    world: Group,
    writer: Writer,
    is_publishing: bool,
    /// The data that the first rank needs to publish, until it does.
    unpublished: Option<(Staging, Documents)>,
}

/// The error of a checkpoint that was not saved.
pub(super) fn refused(step: u64, fault: &Fault) -> Error {
    Error::io(
        "checkpoint",
        format!(
            "step {step} was not saved: {fault}; earlier checkpoints are untouched: free space there or choose another --save"
        ),
    )
}

impl PendingSave {
    /// Starts `write`, which writes this rank's files into the folder of the step; the first rank has what follows.
    pub(super) fn start(
        (dir, step): (&Path, u64),
        world: &Group,
        first: (Option<Staging>, Documents),
        writes: Writes,
        write: impl FnOnce(&AtomicBool) -> std::result::Result<Index, Fault> + Send + 'static,
    ) -> Result<PendingSave> {
        let (staging, documents) = first;
        let mut unpublished = staging.map(|staging| (staging, documents));
        let (folder, rank) = (folder::staging(dir, step), world.rank());
        // One rank has nothing to wait for.
        let alone = if world.size() == 1 { unpublished.take() } else { None };
        let is_publishing = alone.is_some();
        let work = move |cancelled: &AtomicBool| {
            let index = write(cancelled)?;
            if let Some((staging, documents)) = alone {
                return publish(staging, documents, index, 1).map(|()| None);
            }
            if rank > 0 {
                write_part(&folder, rank, &index)?;
            }
            Ok(Some(index))
        };
        let writer = Writer::start(writes, work).map_err(|fault| refused(step, &fault))?;
        let (dir, world) = (dir.to_path_buf(), world.clone());
        Ok(PendingSave { dir, step, world, writer, is_publishing, unpublished })
    }

    /// The step of the checkpoint.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Returns what this rank adds to the sums of [`PendingSave::advance`]: whether it is unfinished, and whether it has
    /// failed, as 0 or 1.
    pub fn flags(&mut self) -> [f64; 2] {
        self.writer.look(Duration::ZERO);
        let written = self.writer.written.as_ref();
        self.writer.told = matches!(written, Some(Err(_)));
        [written.is_none(), self.writer.told].map(|flag| f64::from(u8::from(flag)))
    }

    /// Goes on after the ranks have summed their flags. All ranks call this, with the same sums. Returns the folder of
    /// the checkpoint if it is published.
    ///
    /// # Errors
    /// On all ranks if one could not write: the first fault, in one line. Earlier checkpoints are untouched.
    pub fn advance(&mut self, sums: [f64; 2]) -> Result<Option<PathBuf>> {
        let [unfinished, failed] = sums;
        if failed > 0.0 {
            return Err(self.abandon());
        }
        if unfinished > 0.0 {
            return Ok(None);
        }
        let written = self.writer.written.take().transpose();
        let index = written.map_err(|fault| refused(self.step, &fault))?.flatten();
        if std::mem::replace(&mut self.is_publishing, true) {
            return Ok(Some(folder::published(&self.dir, self.step)));
        }
        let unpublished = self.unpublished.take().zip(index);
        let ranks = self.world.size();
        // On the other ranks nothing is left to be done.
        self.writer = Writer::start(Writes::InThread, move |_| match unpublished {
            Some(((staging, documents), index)) => {
                publish(staging, documents, index, ranks).map(|()| None)
            }
            None => Ok(None),
        })
        .map_err(|fault| refused(self.step, &fault))?;
        Ok(None)
    }

    /// Waits until the checkpoint is published, and returns its folder. All ranks call this.
    ///
    /// # Errors
    /// Those of [`PendingSave::advance`].
    pub fn wait(mut self) -> Result<PathBuf> {
        let host = Device::cpu(1)?;
        loop {
            self.writer.look(POLL_INTERVAL);
            let own = self.flags();
            let sums = match self.world.size() {
                1 => own.to_vec(),
                _ => {
                    let own = Tensor::from_slice(&host, &own, &[2])?;
                    self.world.all_reduce(own, Reduction::Sum)?.wait()?.to_vec::<f64>()?
                }
            };
            if let Some(folder) = self.advance([sums[0], sums[1]])? {
                return Ok(folder);
            }
        }
    }

    /// Ends a save that failed on a rank; returns this rank's error.
    fn abandon(&mut self) -> Error {
        let own = match self.writer.written.take() {
            Some(Err(fault)) if self.writer.told => Some(fault),
            _ => None,
        };
        // None writes any more behind this, and the folder can be removed.
        if let Err(error) = self.wait_for_writers() {
            return error;
        }
        self.unpublished = None;
        if let Some(fault) = own {
            return refused(self.step, &fault);
        }
        // The failed rank ends, and with it this call, with its reason.
        match self.world.barrier().wait() {
            Err(error) => error,
            Ok(()) => refused(self.step, &"another rank could not write its files".into()),
        }
    }
}

impl PendingSave {
    /// Makes all ranks' writers end and waits until they have, however long a disk takes for what it was given.
    fn wait_for_writers(&mut self) -> Result<()> {
        let host = Device::cpu(1)?;
        self.writer.cancelled.store(true, Relaxed);
        loop {
            if self.writer.is_running() {
                sleep(POLL_INTERVAL);
            }
            let running = f64::from(u8::from(self.writer.is_running()));
            if self.world.sum(&host, running)? == 0.0 {
                self.writer.stop();
                return Ok(());
            }
        }
    }
}

impl Drop for PendingSave {
    fn drop(&mut self) {
        self.writer.stop();
    }
}

/// Gives this thread a low priority: it runs where cores are free, and gets a tenth of one where none is.
pub(crate) fn lower_priority() {
    // Elsewhere than on Linux this would be the priority of the process.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::setpriority_process(None, BACKGROUND_NICENESS); // a matter of speed alone
}

/// The niceness of a thread in the background. The lowest priority, 19, would be a hundredth of a busy core: a save might
/// not end before the next one.
#[cfg(target_os = "linux")]
const BACKGROUND_NICENESS: i32 = 10;

/// A thread that writes, or what one has written.
struct Writer {
    cancelled: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    results: Receiver<Written>,
    written: Option<Written>,
    /// Whether the other ranks were told that it has failed.
    told: bool,
}

impl Writer {
    fn start(
        writes: Writes,
        work: impl FnOnce(&AtomicBool) -> Written + Send + 'static,
    ) -> std::result::Result<Writer, Fault> {
        let cancelled = Arc::new(AtomicBool::new(false));
        let (sender, results) = channel();
        let (mut thread, mut written) = (None, None);
        match writes {
            Writes::Here => written = Some(work(&cancelled)),
            Writes::InThread | Writes::InBackground => {
                let seen = cancelled.clone();
                let run = move || {
                    if writes == Writes::InBackground {
                        lower_priority();
                    }
                    // The receiver is gone if the save was given up.
                    let _ = sender.send(work(&seen));
                };
                let name = "checkpoint".to_string();
                let started = std::thread::Builder::new().name(name).spawn(run);
                thread = Some(started.map_err(|error| format!("cannot start a thread: {error}"))?);
            }
        }
        Ok(Writer { cancelled, thread, results, written, told: false })
    }

    /// Looks whether it has ended, for so long.
    fn look(&mut self, patience: Duration) {
        if self.written.is_some() {
            return;
        }
        self.written = match self.results.recv_timeout(patience) {
            Ok(written) => Some(written),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                Some(Err("the thread that writes has ended without a result".into()))
            }
        };
    }

    fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Makes it end, and waits until it has.
    fn stop(&mut self) {
        self.cancelled.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            // Its panic was told, and there is nothing that it returns.
            let _ = thread.join();
        }
    }
}

/// Joins the lists of what all `ranks` have written with `index`, the first one's, and publishes the checkpoint.
fn publish(
    staging: Staging,
    documents: Documents,
    mut index: Index,
    ranks: usize,
) -> std::result::Result<(), Fault> {
    let folder = &staging.folder;
    for (file, text) in documents {
        let record = write_bytes(&folder.join(file), text.as_bytes())?;
        index.files.insert(file.to_string(), record);
    }
    // What could not be loaded must not take the place of what can.
    for rank in 1..ranks {
        index.join(Index::take_part(&folder.join(part_name(rank)))?)?;
    }
    index.check()?;
    let text = serde_json::to_string_pretty(&index).map_err(|error| error.to_string())?;
    write_bytes(&folder.join(INDEX), text.as_bytes())?;
    staging.publish().map(drop)
}
