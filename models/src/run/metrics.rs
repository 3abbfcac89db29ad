//! What a run tells of its steps: a line of `metrics.jsonl` for each, and the curve drawn from them.

use ferrotron_tensor::{Error, MemoryKind, Result};
use serde::Serialize;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::memory::RankMemory;
use crate::plot::LossCurve;
use crate::trainer::{StepReport, Trainer};

/// One line of `metrics.jsonl`.
#[derive(Debug, Clone, Serialize)]
pub struct Metrics {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean loss of the step.
    pub loss: f64,
    /// Learning rate.
    pub lr: f64,
    /// Global gradient norm before clipping; null in a step that was skipped.
    pub grad_norm: f64,
    /// What the loss was multiplied with before backward, where it is not 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// True in a step whose gradients overflowed: nothing was updated.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// Tokens of the step.
    pub tokens: u64,
    /// Duration of the step.
    pub step_ms: f64,
    /// Tokens per second.
    pub tokens_per_s: f64,
    /// 10^12 floating-point operations per second.
    pub tflops: f64,
    /// Most bytes of the pool in use at once so far, and what a GPU takes beside it.
    pub mem_peak_bytes: usize,
    /// Most bytes of host memory in use at once so far, if any were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_peak_bytes: Option<usize>,
    /// Validation loss, where one was measured after this step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
}

impl Metrics {
    /// What `trainer` has to tell of a step over sequences of `seq_length` tokens.
    pub(super) fn of(trainer: &Trainer, seq_length: usize, report: &StepReport) -> Metrics {
        let tokens_per_s = report.tokens as f64 / report.seconds;
        let device = trainer.scope().device();
        Metrics {
            step: report.step,
            loss: report.loss,
            lr: report.lr,
            grad_norm: report.grad_norm,
            loss_scale: (report.loss_scale != 1.0).then_some(report.loss_scale),
            skipped: report.skipped,
            tokens: report.tokens,
            step_ms: report.seconds * 1e3,
            tokens_per_s,
            tflops: trainer.model().flops(report.tokens, seq_length) / report.seconds / 1e12,
            mem_peak_bytes: RankMemory::of(device).total_bytes,
            host_peak_bytes: Some(device.memory_of(MemoryKind::Host).peak)
                .filter(|&bytes| bytes > 0),
            validation_loss: None,
        }
    }
}

fn unwritable(path: &Path, error: &std::io::Error) -> Error {
    Error::io("train", format!("cannot write {}: {error}", path.display()))
}

/// `metrics.jsonl` and the curve drawn from it.
pub(super) struct MetricsLog {
    path: PathBuf,
    file: File,
    pub curve: LossCurve,
}

impl MetricsLog {
    /// Continues the file after `step`: lines of later steps, from a run that went on after its last
    /// checkpoint, are dropped.
    pub fn open(path: &Path, step: u64) -> Result<MetricsLog> {
        let fail = |error: std::io::Error| unwritable(path, &error);
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(fail)?;
        }
        let old = match std::fs::read_to_string(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            other => other.map_err(fail)?,
        };
        let mut curve = LossCurve::default();
        let mut kept = String::new();
        for line in old.lines() {
            let Ok(value) = serde_json::from_str::<serde_json::Value>(line) else { continue };
            let (Some(number), Some(loss)) = (value["step"].as_u64(), value["loss"].as_f64())
            else {
                continue;
            };
            if number <= step {
                kept.push_str(line);
                kept.push('\n');
                curve.training.push((number, loss));
                curve
                    .validation
                    .extend(value["validation_loss"].as_f64().map(|loss| (number, loss)));
            }
        }
        // Beside it and then in its place, so that no moment exists at which history is lost.
        let beside = path.with_extension("jsonl.new");
        std::fs::write(&beside, kept)
            .and_then(|()| std::fs::rename(&beside, path))
            .map_err(fail)?;
        let file = File::options().append(true).open(path).map_err(fail)?;
        Ok(MetricsLog { path: path.to_path_buf(), file, curve })
    }

    pub fn write(&mut self, metrics: &Metrics) -> Result<()> {
        self.curve.training.push((metrics.step, metrics.loss));
        self.curve.validation.extend(metrics.validation_loss.map(|loss| (metrics.step, loss)));
        let line = serde_json::to_string(metrics)
            .map_err(|error| Error::io("metrics", error.to_string()))?;
        // Line by line, so that others can follow the file.
        self.file
            .write_all(format!("{line}\n").as_bytes())
            .map_err(|error| unwritable(&self.path, &error))
    }
}
