//! Writes the steps of a run into TensorBoard's event files, under the tags of Megatron-LM's `training.py`.
//!
//! An [`Observer`](super::Observer) calls [`TensorboardLog`], and decides what a file that cannot be written means.

use ferrotron_tensor::Result;
use std::path::PathBuf;

use crate::io::tensorboard::{EventFile, EventValue};
use crate::training::evaluate::Evaluation;
use crate::training::run::metrics::Metrics;
use crate::training::run::task::TaskResult;

/// Largest loss of which Megatron-LM writes the perplexity e^loss.
const LARGEST_LOSS: f64 = 20.0;

/// The folder of event files, and what is written beside loss, learning rate and gradient norm.
#[derive(Debug, Clone)]
pub struct TensorboardConfig {
    /// Folder of the event files.
    pub folder: PathBuf,
    /// Steps between events; evaluations are always written.
    pub log_interval: u64,
    /// Ranks of the run: `throughput` is per rank.
    pub world_size: usize,
    /// Whether to write `loss-scale`.
    pub loss_scale: bool,
    /// Whether to write `batch-size`, the samples of the global batch.
    pub batch_size: bool,
    /// Whether to write `throughput`, in 10^12 operations per second and rank, and `tokens-per-second`.
    pub throughput: bool,
    /// Whether to write `iteration-time` and `data-wait-time`, in seconds.
    pub timers: bool,
    /// Whether to write `mem-max-allocated-bytes`, and the same of host memory if there is any.
    pub memory: bool,
    /// Whether to write `world-size`.
    pub log_world_size: bool,
    /// Whether to write the perplexity of evaluations.
    pub validation_ppl: bool,
}

/// The event file of a run.
#[derive(Debug)]
pub struct TensorboardLog {
    config: TensorboardConfig,
    events: EventFile,
}

impl TensorboardLog {
    /// Starts an event file for a run that has taken `done` steps. Readers ignore later steps in the folder's earlier
    /// files.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub fn create(config: TensorboardConfig, done: u64) -> Result<TensorboardLog> {
        let events = EventFile::create(&config.folder, done + 1)?;
        Ok(TensorboardLog { config, events })
    }

    /// Writes a text in Markdown under `tag`.
    ///
    /// # Errors
    /// A file that cannot be written, as all methods.
    pub fn text(&mut self, tag: &str, step: u64, text: &str) -> Result<()> {
        self.events.write(step, &[(format!("{tag}/text_summary"), EventValue::Text(text))])
    }

    /// Writes the curves of a step, if the interval asks for it.
    pub fn step(&mut self, metrics: &Metrics) -> Result<()> {
        match metrics.step.is_multiple_of(self.config.log_interval) {
            true => self.events.write(metrics.step, &self.scalars(metrics)),
            false => Ok(()),
        }
    }

    /// Writes the losses of an evaluation, under the name of the set if it has one.
    pub fn evaluated(
        &mut self,
        step: u64,
        set: Option<&str>,
        evaluation: &Evaluation,
    ) -> Result<()> {
        let suffix = set.map_or_else(String::new, |name| format!("-{name}"));
        let mut values = Vec::new();
        let terms = match &evaluation.losses[..] {
            [] | [_] => vec![("lm loss".to_string(), evaluation.loss)],
            terms => terms.iter().map(|(name, loss)| (loss_tag(name), *loss)).collect(),
        };
        for (tag, loss) in terms {
            values.push((format!("{tag} validation{suffix}"), EventValue::Scalar(loss as f32)));
            if self.config.validation_ppl && tag != "accuracy" {
                let perplexity = EventValue::Scalar(loss.min(LARGEST_LOSS).exp() as f32);
                values.push((format!("{tag} validation{suffix} ppl"), perplexity));
            }
        }
        self.events.write(step, &values)
    }

    /// Writes the numbers of a task.
    pub fn evaluated_task(&mut self, step: u64, task: &str, result: &TaskResult) -> Result<()> {
        let scalar = |&(name, value)| (format!("{task}/{name}"), EventValue::Scalar(value as f32));
        self.events.write(step, &result.numbers.iter().map(scalar).collect::<Vec<_>>())
    }

    /// The curves of a step.
    fn scalars(&self, metrics: &Metrics) -> Vec<(String, EventValue<'static>)> {
        let config = &self.config;
        let mut scalars = vec![("learning-rate".to_string(), metrics.lr)];
        let mut add = |wanted: bool, tag: &str, value: f64| {
            if wanted {
                scalars.push((tag.to_string(), value));
            }
        };
        add(config.batch_size, "batch-size", metrics.samples as f64);
        match metrics.losses.is_empty() {
            true => add(true, "lm loss", metrics.loss),
            false => {
                add(true, "loss", metrics.loss);
                metrics.losses.iter().for_each(|(name, loss)| add(true, &loss_tag(name), *loss));
            }
        }
        add(config.loss_scale, "loss-scale", metrics.loss_scale.unwrap_or(1.0));
        add(config.log_world_size, "world-size", config.world_size as f64);
        add(true, "grad-norm", metrics.grad_norm);
        add(config.throughput, "throughput", metrics.tflops / config.world_size as f64);
        add(config.throughput, "tokens-per-second", metrics.tokens_per_s);
        add(config.timers, "iteration-time", metrics.step_ms / 1e3);
        add(config.timers, "data-wait-time", metrics.data_wait_ms / 1e3);
        add(config.memory, "mem-max-allocated-bytes", metrics.mem_peak_bytes as f64);
        if let Some(bytes) = metrics.host_peak_bytes {
            add(config.memory, "host-mem-max-allocated-bytes", bytes as f64);
        }
        let scalar = |(tag, value): (String, f64)| (tag, EventValue::Scalar(value as f32));
        scalars.into_iter().map(scalar).collect()
    }
}

/// The tag of a loss term, with Megatron-LM's names for those of BERT.
fn loss_tag(term: &str) -> String {
    match term {
        "masked_lm" => "lm loss".to_string(),
        "sentence_order" => "sop loss".to_string(),
        "accuracy" => "accuracy".to_string(),
        name => format!("{} loss", name.replace('_', " ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::tensorboard::event_files;
    use std::collections::BTreeMap;
    use std::path::Path;

    fn metrics(step: u64) -> Metrics {
        Metrics {
            step,
            losses: BTreeMap::new(),
            loss: 2.0,
            lr: 1e-3,
            grad_norm: f64::NAN,
            loss_scale: None,
            skipped: false,
            bad_step: None,
            rewound_to: None,
            staleness: Vec::new(),
            samples: 4,
            tokens: 32,
            step_ms: 500.0,
            data_wait_ms: 0.0,
            tokens_per_s: 64.0,
            tflops: 6.0,
            mem_peak_bytes: 1000,
            host_peak_bytes: None,
            stragglers: None,
            validation_loss: None,
            validation_losses: BTreeMap::new(),
            tasks: BTreeMap::new(),
        }
    }

    fn config(folder: &Path) -> TensorboardConfig {
        TensorboardConfig {
            folder: folder.to_path_buf(),
            log_interval: 2,
            world_size: 3,
            loss_scale: true,
            batch_size: false,
            throughput: false,
            timers: false,
            memory: false,
            log_world_size: false,
            validation_ppl: true,
        }
    }

    fn tags(log: &TensorboardLog, metrics: &Metrics) -> Vec<String> {
        log.scalars(metrics).into_iter().map(|(tag, _)| tag).collect()
    }

    #[test]
    fn tags_are_those_of_megatron_and_the_rest_is_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = TensorboardLog::create(config(folder.path()), 0).unwrap();
        let few = ["learning-rate", "lm loss", "loss-scale", "grad-norm"];
        assert_eq!(tags(&log, &metrics(1)), few);
        let losses = BTreeMap::from([("masked_lm", 1.5), ("sentence_order", 0.5)]);
        let bert = tags(&log, &Metrics { losses, ..metrics(1) });
        assert_eq!(bert[1..4], ["loss", "lm loss", "sop loss"]);
        log.config = TensorboardConfig {
            throughput: true,
            timers: true,
            memory: true,
            batch_size: true,
            log_world_size: true,
            ..log.config
        };
        let scalars = log.scalars(&metrics(1));
        let value = |name: &str| scalars.iter().find(|(tag, _)| tag == name).unwrap().1;
        for (tag, number) in [
            ("throughput", 2.0),
            ("tokens-per-second", 64.0),
            ("iteration-time", 0.5),
            ("mem-max-allocated-bytes", 1000.0),
            ("batch-size", 4.0),
            ("world-size", 3.0),
        ] {
            assert_eq!(value(tag), EventValue::Scalar(number), "{tag}");
        }
    }

    #[test]
    fn each_process_has_a_file_and_the_interval_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/tb");
        assert!(event_files(&path).is_empty());
        let mut logs = [0, 3].map(|done| TensorboardLog::create(config(&path), done).unwrap());
        let length = || -> u64 {
            let files = std::fs::read_dir(&path).unwrap();
            files.map(|file| file.unwrap().metadata().unwrap().len()).sum()
        };
        let before = length();
        logs[0].step(&metrics(1)).unwrap();
        assert_eq!(length(), before);
        logs[0].step(&metrics(2)).unwrap();
        assert!(length() > before);
        assert_eq!(event_files(&path).len(), 2);
    }
}
