//! The options of `ferrotron eval`, and the data that they name.

use clap::{Args, ValueEnum};
use ferrotron::models::data::{DataConfig, Split};
use ferrotron::{Error, Result};
use std::path::PathBuf;

use crate::cli::args::data::{DataArgs, DataSource, SplitArgs};
use crate::cli::args::device::DeviceArgs;
use crate::cli::args::ranks::RankArgs;
use crate::cli::args::run::EvalIters;
use crate::cli::options::Options;
use crate::cli::tasks::{Task, with_data};

#[derive(Debug, Args)]
pub struct EvalArgs {
    /// Run folder, checkpoint or Hugging Face folder [default: the newest of runs/]
    #[arg(long, value_name = "PATH")]
    pub(super) load: Option<PathBuf>,
    /// Data whose last part is evaluated [default: what the run was trained on]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub(super) data: Vec<PathBuf>,
    /// Fraction of the tokens, at the end, that is evaluated; 1 takes all [default: what the run held out, or 0.1]
    #[arg(long, value_name = "SHARE")]
    pub(super) valid_fraction: Option<f64>,
    /// Part of the data: test is one of data sets alone, by --test-data-path or --split [default: valid]
    #[arg(long, value_name = "PART", value_enum)]
    pub(super) split_part: Option<SplitPart>,
    /// Batches of the run's --eval-global-batch-size or global batch size, from the beginning; 'all' for all
    #[arg(long, value_name = "N", default_value = "all")]
    pub(super) eval_iters: EvalIters,
    /// Tasks to evaluate in place of a loss, on the data of --task-data
    #[arg(long, value_name = "TASK", value_enum, value_delimiter = ',', num_args = 1..)]
    pub(super) tasks: Vec<Task>,
    /// Data of each task as TASK=PATH: JSON lines or Parquet with a string 'text', or text; of lambada, text has one
    /// passage a line; of race, its file or folder
    #[arg(long, value_name = "TASK=PATH", num_args = 1..)]
    pub(super) task_data: Vec<String>,
    /// Tokens between the windows of the task wikitext; of each window but the first the last ones so many are scored
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub(super) overlapping_eval: usize,
    /// Tokens per sequence [default: the longest that the model takes]
    #[arg(long, value_name = "N")]
    pub(super) seq_length: Option<usize>,
    /// Sequences that go through the model at once
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub(super) micro_batch_size: usize,
    /// Print one JSON object
    #[arg(long)]
    pub(super) json: bool,
    /// Take the moving average of the weights, which a run with --ema-decay keeps
    #[arg(long)]
    pub(super) ema: bool,
    #[command(flatten)]
    pub(super) device: DeviceArgs,
    #[command(flatten)]
    pub(super) ranks: RankArgs,
}

/// A part of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SplitPart {
    Train,
    Valid,
    Test,
}

impl EvalArgs {
    /// The tasks, each with the path of its data.
    ///
    /// # Errors
    /// A task without data or with data named twice; data of no task; options that mean nothing to tasks.
    pub(super) fn tasks(&self) -> Result<Vec<(Task, PathBuf)>> {
        if !self.tasks.is_empty() && (!self.data.is_empty() || self.valid_fraction.is_some()) {
            let message = "names data of a loss: leave it and --valid-fraction out, or --tasks";
            return Err(Error::config("--data", message));
        }
        if !self.tasks.is_empty() {
            self.refuse_part("a task has no parts")?;
        }
        if self.valid_fraction.is_some() && self.part() != SplitPart::Valid {
            let message = "says what is evaluated already: leave it or --split-part out";
            return Err(Error::config("--valid-fraction", message));
        }
        with_data("--tasks", &self.tasks, &self.task_data)
    }

    /// Errors if a part of the data or a number of batches is asked for, where `why` there is none.
    pub(super) fn refuse_part(&self, why: &str) -> Result<()> {
        let options = [
            ("--split-part", self.split_part.is_some()),
            ("--eval-iters", self.eval_iters.0.is_some()),
        ];
        match options.iter().find(|(_, given)| *given) {
            Some((option, _)) => Err(Error::config(option, format!("{why}: leave it out"))),
            None => Ok(()),
        }
    }

    /// The part of the data that is evaluated.
    pub(super) fn part(&self) -> SplitPart {
        self.split_part.unwrap_or(SplitPart::Valid)
    }

    /// The samples that are evaluated, in batches as those of the run with the `saved` options; `None` for all.
    ///
    /// # Errors
    /// No batch; a model without a run, whose batches have no size.
    pub(super) fn samples(&self, saved: &Options) -> Result<Option<u64>> {
        let Some(batches) = self.eval_iters.0 else { return Ok(None) };
        let number =
            |name: &str| saved.values(name).pop().and_then(|text| text.parse::<u64>().ok());
        let size = number("eval-global-batch-size").or_else(|| number("global-batch-size"));
        match (batches, size) {
            (0, _) => Err(Error::config("--eval-iters", "must be positive or 'all', got 0")),
            (_, None) => {
                let message = "counts batches of a run, and --load names none: leave it out";
                Err(Error::config("--eval-iters", message))
            }
            (batches, Some(size)) => Ok(Some(batches.saturating_mul(size))),
        }
    }

    /// The length of the sequences that are evaluated, of which a model takes `longest` tokens.
    pub(super) fn sequence_length(&self, longest: usize) -> Result<usize> {
        match self.seq_length.unwrap_or(longest) {
            length if length > longest => {
                let message =
                    format!("{length} is more than the {longest} tokens that the model takes");
                Err(Error::config("--seq-length", message))
            }
            length => Ok(length),
        }
    }

    /// The data that is evaluated, and what errors call it, for the `saved` options of a run, if it is one.
    pub(super) fn data_config(
        &self,
        saved: &Options,
        is_run: bool,
    ) -> Result<(DataSource, &'static str)> {
        if self.data.is_empty()
            && let source @ DataSource::Sets(_) = DataArgs::from_options(saved).source()?
        {
            if self.valid_fraction.is_some() {
                let message = "the run has data sets with parts of their own: leave it out, or name data by --data";
                return Err(Error::config("--valid-fraction", message));
            }
            return Ok((source, "--data-path of the run"));
        }
        let data = if self.data.is_empty() {
            if !is_run {
                let message = "must be given: --load names no run, which would name its data";
                return Err(Error::config("--data", message));
            }
            saved.values("data").into_iter().map(PathBuf::from).collect()
        } else {
            self.data.clone()
        };
        let given = self.valid_fraction;
        if let Some(share) = given.filter(|share| !(*share > 0.0 && *share <= 1.0)) {
            let message =
                format!("is the share that is evaluated: above 0, at most 1, got {share}");
            return Err(Error::config("--valid-fraction", message));
        }
        let split = match given {
            // All of it is what training would get if nothing were kept for validation.
            Some(share) => Split::valid_fraction(if share == 1.0 { 0.0 } else { share })?,
            None => SplitArgs::from_options(saved).split()?,
        };
        // Data for validation alone that the run had is evaluated whole.
        let validation_data = match self.data.is_empty() && given.is_none() {
            true => saved.values("valid-data").into_iter().map(PathBuf::from).collect(),
            false => Vec::new(),
        };
        let origin = if self.data.is_empty() { "--data of the run" } else { "" };
        Ok((DataSource::Files(DataConfig { data, validation_data, split }), origin))
    }
}
