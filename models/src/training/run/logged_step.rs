//! A line of `metrics.jsonl` as it is read, and the reader of whole files.

use ferrotron_tensor::{Error, Result};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use super::stragglers::Stragglers;

const OPERATION: &str = "metrics";

/// The metrics of a step, as a file has them; `None` stands for a number that was not finite or not written.
#[derive(Debug, Clone, Deserialize)]
pub struct LoggedStep {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean loss of the step.
    #[serde(deserialize_with = "Option::deserialize")]
    pub loss: Option<f64>,
    /// Learning rate.
    pub lr: f64,
    /// Global gradient norm before clipping.
    #[serde(deserialize_with = "Option::deserialize")]
    pub grad_norm: Option<f64>,
    /// The factor of the loss before backward, where it is not 1.
    pub loss_scale: Option<f64>,
    /// Whether the step has updated nothing.
    #[serde(default)]
    pub skipped: bool,
    /// The updates that the weights of each rank missed, with asynchronous data parallelism.
    #[serde(default)]
    pub staleness: Vec<usize>,
    /// Tokens of the step.
    pub tokens: u64,
    /// Duration of the step.
    pub step_ms: Option<f64>,
    /// The part of it in which the first rank waited for samples.
    pub data_wait_ms: Option<f64>,
    /// Tokens per second.
    pub tokens_per_s: Option<f64>,
    /// 10^12 floating-point operations per second.
    pub tflops: Option<f64>,
    /// Most bytes of the pool in use at once so far.
    pub mem_peak_bytes: Option<u64>,
    /// The same of host memory.
    pub host_peak_bytes: Option<u64>,
    /// The slowest ranks, where they were found after the step.
    pub stragglers: Option<Stragglers>,
    /// Validation loss, where one was measured after the step.
    pub validation_loss: Option<f64>,
    /// The loss of each validation set by name, where the run has several.
    #[serde(default)]
    pub validation_losses: BTreeMap<String, Option<f64>>,
    /// The numbers of each task by name, where tasks were evaluated after the step.
    #[serde(default)]
    pub tasks: BTreeMap<String, BTreeMap<String, Option<f64>>>,
}

/// Reads the metrics of a run, one step after another. The file may be one that a live run writes: a last line that is not
/// complete is left out.
///
/// # Errors
/// A file that cannot be read, or a line that is none of a run's metrics, with its number.
pub fn read_metrics(path: &Path, mut each: impl FnMut(LoggedStep)) -> Result<()> {
    let unreadable = |error: std::io::Error| {
        Error::io(OPERATION, format!("cannot read {}: {error}", path.display()))
    };
    let mut reader = BufReader::with_capacity(1 << 20, File::open(path).map_err(unreadable)?);
    let (mut bytes, mut number) = (Vec::new(), 0_u64);
    loop {
        bytes.clear();
        let read = reader.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut bytes);
        if read.map_err(unreadable)? == 0 {
            return Ok(());
        }
        number += 1;
        match serde_json::from_slice(&bytes) {
            Ok(step) => each(step),
            Err(_) if !bytes.ends_with(b"\n") && (bytes.len() as u64) < LONGEST_LINE => {}
            Err(error) => {
                let message = format!(
                    "{}, line {number}, is no line of a run's metrics: {error}",
                    path.display()
                );
                return Err(Error::config(OPERATION, message));
            }
        }
    }
}

/// Bytes of a line beyond which it is none of a run.
const LONGEST_LINE: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"{"step":1,"loss":null,"lr":0.1,"grad_norm":2.0,"tokens":8}"#;

    #[test]
    fn a_line_being_written_is_left_out_and_a_foreign_one_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            let mut steps = Vec::new();
            read_metrics(&path, |step| steps.push(step)).map(|()| steps)
        };
        let steps = read(&format!("{LINE}\n{}", &LINE[..20])).unwrap();
        assert_eq!((steps.len(), steps[0].loss, steps[0].grad_norm), (1, None, Some(2.0)));
        let refused = read(&format!("{LINE}\nmilk\n{LINE}\n")).unwrap_err().to_string();
        assert!(refused.contains("metrics.jsonl, line 2, is no line"), "{refused}");
        let endless = "x".repeat(LONGEST_LINE as usize + 5);
        assert!(read(&endless).unwrap_err().to_string().contains("line 1"));
        std::fs::remove_file(&path).unwrap();
        let absent = read_metrics(&path, |_| {}).unwrap_err().to_string();
        assert!(absent.contains("cannot read"), "{absent}");
    }
}
