//! Metrics of a run's steps: a line of `metrics.jsonl` for each, and the curve drawn from them.

use ferrotron_parallel::output_file::{self, unwritable};
use ferrotron_tensor::{Error, MemoryKind, Result};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use crate::planning::memory::RankMemory;
use crate::training::loss_curve::LossCurve;
use crate::training::run::logged_step::LoggedStep;
use crate::training::run::stragglers::Stragglers;
use crate::training::run_lock::try_for_a_moment;
use crate::training::trainer::{Model, StepReport, Trainer};

const OPERATION: &str = "metrics";

/// One line of `metrics.jsonl`.
#[derive(Debug, Clone, Serialize)]
pub struct Metrics {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean loss of the step.
    pub loss: f64,
    /// The mean of each loss term, by name, where there are several.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub losses: BTreeMap<&'static str, f64>,
    /// Learning rate.
    pub lr: f64,
    /// Global gradient norm before clipping; null in a step that was skipped.
    pub grad_norm: f64,
    /// The factor of the loss before backward, where it is not 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// True in a step that has updated nothing: its gradients overflowed, or it was bad.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// The reason why a step is bad.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bad_step: Option<String>,
    /// Step of the checkpoint to which training was rewound behind the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rewound_to: Option<u64>,
    /// With asynchronous data parallelism, the updates that the weights of each rank missed when it computed its gradient.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub staleness: Vec<usize>,
    /// Samples of the step.
    pub samples: u64,
    /// Tokens of the step.
    pub tokens: u64,
    /// Duration of the step.
    pub step_ms: f64,
    /// The part of it in which the first rank waited for samples.
    pub data_wait_ms: f64,
    /// Tokens per second.
    pub tokens_per_s: f64,
    /// 10^12 floating-point operations per second.
    pub tflops: f64,
    /// Most bytes of the pool in use at once so far, and what a GPU takes beside it.
    pub mem_peak_bytes: usize,
    /// Most bytes of host memory in use at once so far, if any were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_peak_bytes: Option<usize>,
    /// The slowest ranks since the last step that names them, where they were found after this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stragglers: Option<Stragglers>,
    /// Validation loss, where one was measured after this step; of several sets, the mean over all their tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    /// The loss of each validation set by name, where there are several.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub validation_losses: BTreeMap<String, f64>,
    /// The numbers of each task by name, where tasks were evaluated after this step.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub tasks: BTreeMap<String, BTreeMap<&'static str, f64>>,
}

impl Metrics {
    /// The metrics of one of `trainer`'s steps over sequences of `seq_length` tokens.
    pub(super) fn from_report<M: Model>(
        trainer: &Trainer<M>,
        seq_length: usize,
        report: &StepReport,
    ) -> Metrics {
        let tokens_per_s = report.tokens as f64 / report.seconds;
        let device = trainer.scope().device();
        Metrics {
            step: report.step,
            loss: report.loss,
            losses: match report.losses.len() {
                1 => BTreeMap::new(),
                _ => report.losses.iter().copied().collect(),
            },
            lr: report.lr,
            grad_norm: report.grad_norm,
            loss_scale: (report.loss_scale != 1.0).then_some(report.loss_scale),
            skipped: report.skipped || report.bad_step.is_some(),
            bad_step: report.bad_step.clone(),
            rewound_to: report.rewound_to,
            staleness: report.staleness.clone(),
            samples: report.samples,
            tokens: report.tokens,
            step_ms: report.seconds * 1e3,
            data_wait_ms: report.data_seconds * 1e3,
            tokens_per_s,
            tflops: M::flops(trainer.model(), report.tokens, seq_length) / report.seconds / 1e12,
            mem_peak_bytes: RankMemory::from_device(device).total_bytes,
            host_peak_bytes: Some(device.memory_of(MemoryKind::Host).peak)
                .filter(|&bytes| bytes > 0),
            stragglers: None,
            validation_loss: None,
            validation_losses: BTreeMap::new(),
            tasks: BTreeMap::new(),
        }
    }
}

/// `metrics.jsonl`, locked for as long as it is open, and the curve drawn from it.
pub(super) struct MetricsLog {
    path: PathBuf,
    file: File,
    last: Option<LastLine>,
    pub curve: LossCurve,
}

/// The line that was written last.
struct LastLine {
    step: u64,
    /// Its first byte in the file.
    start: u64,
    line: String,
}

impl MetricsLog {
    /// Continues the file after `step`. Lines of later steps are cut off, which a run wrote after its last checkpoint;
    /// so is a last line that was written in part.
    ///
    /// Errors as [`check_metrics`], before anything is changed.
    pub fn open(path: &Path, step: u64) -> Result<MetricsLog> {
        let fail = |error: io::Error| unwritable(OPERATION, path, &error);
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(fail)?;
        }
        let mut file = output_file::open(OPERATION, path)?;
        lock(&file, path, File::try_lock)?;
        let Kept { curve, length, ended } = read_own(&mut file, path, step)?;
        output_file::truncate(&file, length).map_err(fail)?;
        if !ended {
            file.write_all(b"\n").map_err(fail)?;
        }
        Ok(MetricsLog { path: path.to_path_buf(), file, last: None, curve })
    }

    /// Appends a line. The line of the same step, if it is the last, gets what it lacks: the evaluations behind a save. A line
    /// that cannot be written whole is taken back.
    pub fn write(&mut self, metrics: &Metrics) -> Result<()> {
        let step = metrics.step;
        let add = |points: &mut Vec<(u64, f64)>, loss: Option<f64>| {
            let is_new = points.last().is_none_or(|(last, _)| *last != step);
            points.extend(loss.filter(|_| is_new).map(|loss| (step, loss)));
        };
        add(&mut self.curve.training, Some(metrics.loss).filter(|loss| loss.is_finite()));
        add(&mut self.curve.validation, metrics.validation_loss);
        let line = serde_json::to_string(metrics)
            .map_err(|error| Error::io(OPERATION, error.to_string()))?
            + "\n";
        let last = self.last.take().filter(|last| last.step == step);
        let mut write = || {
            let (start, same) = match &last {
                Some(LastLine { start, line: last, .. }) => {
                    let same = last.bytes().zip(line.bytes()).take_while(|(a, b)| a == b).count();
                    output_file::truncate(&self.file, start + same as u64)?;
                    (*start, same)
                }
                None => (self.file.metadata()?.len(), 0),
            };
            // At once, so that others can follow the file line by line.
            let written = self.file.write_all(&line.as_bytes()[same..]);
            if written.is_err() {
                output_file::truncate(&self.file, start)?;
            }
            written.map(|()| start)
        };
        let start = write().map_err(|error| unwritable(OPERATION, &self.path, &error))?;
        self.last = Some(LastLine { step, start, line });
        Ok(())
    }
}

/// Checks that a run may write its metrics to `path`, and changes nothing.
///
/// # Errors
/// A file that cannot be written, that a live run writes, or that has a line that no run has written, which is named.
pub fn check_metrics(path: &Path) -> Result<()> {
    let Some(mut file) = output_file::open_existing(OPERATION, path)? else { return Ok(()) };
    lock(&file, path, File::try_lock_shared)?;
    read_own(&mut file, path, u64::MAX).map(drop)
}

/// Locks a regular file, so that no other run writes it; devices such as `/dev/null` serve any number of runs. Where
/// the file system refuses locks, there is none.
///
/// # Errors
/// A file that a live run writes.
fn lock(
    file: &File,
    path: &Path,
    try_lock: fn(&File) -> std::result::Result<(), TryLockError>,
) -> Result<()> {
    if !file.metadata().is_ok_and(|found| found.is_file()) {
        return Ok(());
    }
    match try_for_a_moment(file, try_lock) {
        Err(TryLockError::WouldBlock) => {
            let message = format!(
                "{} is being written by another run: wait until it ends or stop it, or name another file with --metrics",
                path.display()
            );
            Err(Error::config(OPERATION, message))
        }
        Ok(()) | Err(TryLockError::Error(_)) => Ok(()),
    }
}

/// The part of a metrics file that belongs to finished steps.
struct Kept {
    curve: LossCurve,
    /// Bytes of their lines.
    length: u64,
    /// Whether the last of these is a line break.
    ended: bool,
}

/// Reads the lines up to `step`. Steps count up, so what is behind the first later one is later as well.
fn read_own(file: &mut File, path: &Path, step: u64) -> Result<Kept> {
    let mut reader = BufReader::new(file);
    let mut kept = Kept { curve: LossCurve::default(), length: 0, ended: true };
    let (mut bytes, mut number, mut before) = (Vec::new(), 0_u64, 0);
    loop {
        bytes.clear();
        let read = reader.read_until(b'\n', &mut bytes);
        let read = read.map_err(|error| unwritable(OPERATION, path, &error))?;
        if read == 0 {
            return Ok(kept);
        }
        number += 1;
        let ended = bytes.ends_with(b"\n");
        let line = match serde_json::from_slice::<LoggedStep>(&bytes) {
            Ok(line) if line.step > before => line,
            Err(_) if !ended && is_begun(&bytes) => return Ok(kept),
            _ => {
                let message = format!(
                    "{}, line {number}, is no line of a run's metrics behind those of the steps before: the file is \
                     left as it is, name another one with --metrics or move it away",
                    path.display()
                );
                return Err(Error::config(OPERATION, message));
            }
        };
        before = line.step;
        if line.step > step {
            continue; // the rest must be the program's own, too
        }
        kept.length += read as u64;
        kept.ended = ended;
        kept.curve.training.extend(line.loss.map(|loss| (line.step, loss)));
        kept.curve.validation.extend(line.validation_loss.map(|loss| (line.step, loss)));
    }
}

/// Whether these bytes are the beginning of a line, from a process that was killed while it wrote.
fn is_begun(bytes: &[u8]) -> bool {
    const BEGIN: &[u8] = b"{\"step\":";
    bytes.starts_with(BEGIN) || BEGIN.starts_with(bytes)
}

#[cfg(test)]
mod tests;
