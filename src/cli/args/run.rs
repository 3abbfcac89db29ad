//! The options of a run: its folder, its intervals and the files that it leaves.

use clap::Args;
use ferrotron::models::checkpoint::Retention;
use ferrotron::models::run::TraceConfig;
use ferrotron::{Error, Result};
use signal_hook::consts::{
    SIGALRM, SIGHUP, SIGINT, SIGPROF, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU,
};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::cli::bytes;

/// The time at which the program started, once [`run`](crate::cli::run) has noted it.
static START: OnceLock<Instant> = OnceLock::new();

/// The time of the first call, which the program makes when it starts.
pub fn program_start() -> Instant {
    *START.get_or_init(Instant::now)
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Run")]
pub struct RunArgs {
    /// Folder of the run [default: the next free runs/NNNN, or that of --load]
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,
    /// Continue from a run folder or checkpoint; its options are the defaults. If --save names the same folder and
    /// nothing is saved there yet, a new run starts. Or begin with the weights of a Hugging Face folder
    #[arg(long, value_name = "PATH")]
    pub load: Option<PathBuf>,
    /// Begin --task with the weights of this run, checkpoint or Hugging Face folder of a BERT, with a new head and a new
    /// optimizer state; its shape and tokenizer are the defaults
    #[arg(long, value_name = "PATH")]
    pub pretrained_checkpoint: Option<PathBuf>,
    /// Steps between checkpoints; the run always writes one at its end; 0 for no other [default: 500]
    #[arg(long, value_name = "N")]
    pub save_interval: Option<u64>,
    /// Checkpoints to keep; older ones are deleted
    #[arg(long, alias = "most-recent-k", value_name = "N", default_value_t = 2)]
    pub save_retain: usize,
    /// Keep besides every checkpoint whose step is a multiple of N; 0 keeps none
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub save_retain_interval: u64,
    /// Write checkpoints while training goes on: a step waits only for a copy of weights and optimizer state, which takes
    /// as much memory as these. The end of a run waits for the last checkpoint
    #[arg(long)]
    pub async_save: bool,
    /// Stop cleanly, after saving, when the step number is a multiple of N
    #[arg(long, value_name = "N")]
    pub exit_interval: Option<u64>,
    /// Stop cleanly, after saving, with the step in which the program has run for so many minutes
    #[arg(long, value_name = "MINUTES")]
    pub exit_duration_in_mins: Option<f64>,
    /// Another signal at which the run finishes its step, saves and exits, by its name, such as SIGXCPU; SIGINT, SIGTERM,
    /// SIGHUP, SIGUSR1 and SIGUSR2 do that always
    #[arg(long, value_name = "SIGNAL")]
    pub exit_signal: Option<ExitSignal>,
    /// Steps between evaluations; one follows the last step; 0 for none at all [default: 250]
    #[arg(long, value_name = "N")]
    pub eval_interval: Option<u64>,
    /// Batches of validation data in each evaluation, from the beginning; 'all' for all, 0 for no evaluation
    #[arg(long, value_name = "N", default_value = "20")]
    pub eval_iters: EvalIters,
    /// Steps between lines where no terminal shows a progress bar, 0 for none; a GPU is waited for, and the metrics
    /// written, as often
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub log_interval: u64,
    /// Every --log-interval steps, find the ranks that compute, wait for others and wait for samples longest, write them to the
    /// metrics beside the means, and warn of one for which the others wait
    #[arg(long)]
    pub log_straggler: bool,
    /// One JSON object per step; a file that is there must hold metrics [default: metrics.jsonl in the run folder]
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
    /// Write what every rank did and when, as JSON for ui.perfetto.dev; replaces nothing but an earlier trace
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Steps to trace [default: the first 10 of this process]
    #[arg(long, value_name = "FIRST-LAST", requires = "trace", value_parser = parse_steps)]
    pub trace_steps: Option<RangeInclusive<u64>>,
    /// Refuse a run if a rank would take more, as 8GiB or 500MB [default: what the machine, its control group or the
    /// GPU has]
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse)]
    pub memory_limit: Option<u64>,
    /// Tokens of the sample that a GPT prints at the end; 0 prints none [default: 200]
    #[arg(long, value_name = "N")]
    pub sample_length: Option<usize>,
}

/// Batches of an evaluation; `None` for the whole validation set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EvalIters(pub Option<u64>);

impl FromStr for EvalIters {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "all" => Ok(EvalIters(None)),
            number => number
                .parse()
                .map(|number| EvalIters(Some(number)))
                .map_err(|_| "must be a number of batches, or 'all'".into()),
        }
    }
}

/// The number of a signal that can be handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExitSignal(pub i32);

impl FromStr for ExitSignal {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let found = EXIT_SIGNALS.iter().find(|(name, _)| {
            name.eq_ignore_ascii_case(text) || name["SIG".len()..].eq_ignore_ascii_case(text)
        });
        found.map(|row| ExitSignal(row.1)).ok_or_else(|| {
            let names: Vec<&str> = EXIT_SIGNALS.iter().map(|row| row.0).collect();
            format!("must be one of {}", names.join(", "))
        })
    }
}

/// The signals of `--exit-signal`.
const EXIT_SIGNALS: [(&str, i32); 9] = [
    ("SIGALRM", SIGALRM),
    ("SIGHUP", SIGHUP),
    ("SIGINT", SIGINT),
    ("SIGPROF", SIGPROF),
    ("SIGQUIT", SIGQUIT),
    ("SIGTERM", SIGTERM),
    ("SIGUSR1", SIGUSR1),
    ("SIGUSR2", SIGUSR2),
    ("SIGXCPU", SIGXCPU),
];

/// `7-9`, or `7` for one step.
fn parse_steps(text: &str) -> std::result::Result<RangeInclusive<u64>, String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (first.parse(), last.parse()) {
        (Ok(first), Ok(last)) if 0 < first && first <= last => Ok(first..=last),
        _ => Err("must be FIRST-LAST, two numbers of steps in order, as 11-13".into()),
    }
}

impl RunArgs {
    /// Tokens of the sample that is printed at the end.
    pub fn sample_length(&self) -> usize {
        self.sample_length.unwrap_or(200)
    }

    /// The retention of checkpoints.
    pub fn retention(&self) -> Retention {
        let interval = Some(self.save_retain_interval).filter(|interval| *interval > 0);
        Retention { last: self.save_retain, interval }
    }

    /// Steps between the times at which the slowest ranks are found, if they are.
    pub fn straggler_interval(&self) -> Option<u64> {
        self.log_straggler.then_some(self.log_interval)
    }

    /// The time at which the run ends, if `--exit-duration-in-mins` is given.
    pub fn deadline(&self) -> Option<Instant> {
        let minutes = self.exit_duration_in_mins?;
        program_start().checked_add(Duration::try_from_secs_f64(minutes * 60.0).ok()?)
    }

    /// The trace of a run that has already taken `done` steps.
    pub fn trace(&self, done: u64) -> Option<TraceConfig> {
        self.trace.clone().map(|path| TraceConfig {
            path,
            steps: self.trace_steps.clone().unwrap_or(done + 1..=done + 10),
        })
    }

    /// Errors for intervals that mean nothing.
    pub fn validate(&self) -> Result<()> {
        if self.exit_interval == Some(0) {
            return Err(Error::config("--exit-interval", "must be positive, got 0"));
        }
        if let Some(minutes) =
            self.exit_duration_in_mins.filter(|minutes| !minutes.is_finite() || *minutes <= 0.0)
        {
            let message = format!("must be positive, got {minutes}");
            return Err(Error::config("--exit-duration-in-mins", message));
        }
        if self.log_straggler && self.log_interval == 0 {
            let message =
                "finds the slowest ranks every --log-interval steps, which are 0: choose some";
            return Err(Error::config("--log-straggler", message));
        }
        if self.save_retain == 0 {
            return Err(Error::config("--save-retain", "must be positive, got 0"));
        }
        Ok(())
    }
}
