//! Shows a run to its user: a progress bar on a terminal, lines elsewhere.

use ferrotron::Result;
use ferrotron::models::evaluate::Evaluation;
use ferrotron::models::run::{Metrics, Observer, TaskResult, TensorboardLog};
use indicatif::{HumanDuration, ProgressBar, ProgressState, ProgressStyle};
use std::fmt::Write;
use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, Instant};

use super::closing_report::bert_line;
use super::{bytes, log_writer, output};

/// Writes to standard error, so that standard output stays for results.
pub struct TrainProgress {
    bar: Option<Bar>,
    log_interval: u64,
    last_step: u64,
    /// Running mean of the loss, so that the bar does not flicker.
    loss: Option<f64>,
    seconds: f64,
    /// The event file to which everything is written as well.
    tensorboard: Option<TensorboardLog>,
    /// Whether the user was warned that events are lost.
    events_lost: bool,
}

impl TrainProgress {
    /// Shows steps `done` to `last_step`.
    pub fn new(done: u64, last_step: u64, log_interval: u64) -> TrainProgress {
        let bar = bar("{pos}/{len} {msg} ETA {eta}", done, last_step);
        TrainProgress { bar, log_interval, last_step, ..TrainProgress::silent() }
    }

    /// Shows nothing: another rank does.
    pub fn silent() -> TrainProgress {
        TrainProgress {
            bar: None,
            log_interval: 0,
            last_step: 0,
            loss: None,
            seconds: 0.0,
            tensorboard: None,
            events_lost: false,
        }
    }

    /// Writes everything to `log` as well.
    pub fn write_events(&mut self, log: TensorboardLog) {
        self.tensorboard = Some(log);
    }

    /// Writes to the event file, if there is one. The first failure is a warning.
    pub fn event(&mut self, write: impl FnOnce(&mut TensorboardLog) -> Result<()>) {
        if let Some(log) = &mut self.tensorboard
            && let Err(error) = write(log)
            && !std::mem::replace(&mut self.events_lost, true)
        {
            self.warning(&format!("{error}; training goes on, and such events are lost"));
        }
    }

    /// A line above the bar.
    pub fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => {
                let line = line.to_string();
                bar.draw(move |bar| bar.println(line));
            }
            None => output::note(line),
        }
    }

    /// Leaves the bar as it is.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }
}

/// A text as a block of code in Markdown.
pub fn code_block(text: &str) -> String {
    let lines = text.lines().map(|line| format!("    {line}\n"));
    lines.collect()
}

/// A progress bar that is drawn by the thread that writes to standard error.
struct Bar(ProgressBar);

impl Bar {
    fn draw(&self, draw: impl FnOnce(&ProgressBar) + Send + 'static) {
        let bar = self.0.clone();
        log_writer::draw(move || draw(&bar));
    }

    /// Shows a position and a message.
    fn show(&self, position: u64, message: String) {
        self.draw(move |bar| {
            bar.set_position(position);
            bar.set_message(message);
        });
    }

    /// Leaves the bar as it is.
    fn abandon(&self) {
        self.draw(ProgressBar::abandon);
    }
}

/// A bar from `done` to `last` on a terminal; none elsewhere.
fn bar(text: &str, done: u64, last: u64) -> Option<Bar> {
    std::io::stderr().is_terminal().then(|| {
        let bar = ProgressBar::new(last);
        let template = format!("{{bar:30.cyan/blue}} {text}");
        let style = ProgressStyle::with_template(&template).expect("the template is valid");
        // Nothing is known of the time before the first step is done.
        bar.set_style(style.with_key("eta", move |state: &ProgressState, text: &mut dyn Write| {
            let _ = match state.pos() > done {
                true => write!(text, "{:#}", HumanDuration(state.eta())),
                false => write!(text, "-"),
            };
        }));
        bar.set_position(done);
        bar.reset_eta();
        Bar(bar)
    })
}

/// Shows how much of some files is done: a progress bar on a terminal, a line every ten seconds elsewhere.
pub struct ByteProgress {
    bar: Option<Bar>,
    started: Instant,
    said: Instant,
}

/// Time between two lines.
const BETWEEN_LINES: Duration = Duration::from_secs(10);

impl ByteProgress {
    /// Shows nothing yet.
    pub fn new() -> ByteProgress {
        ByteProgress { bar: None, started: Instant::now(), said: Instant::now() }
    }

    /// Shows `done` of `total` bytes, of which `before` were done by an earlier process, and `found`.
    pub fn show(&mut self, done: u64, total: u64, before: u64, found: &str) {
        if self.bar.is_none() {
            let text = "{bytes}/{total_bytes} {bytes_per_sec} {msg} ETA {eta}";
            self.bar = bar(text, before, total);
        }
        if let Some(bar) = &self.bar {
            bar.show(done, found.to_string());
        } else if self.said.elapsed() >= BETWEEN_LINES {
            self.said = Instant::now();
            let speed = (done - before) as f64 / self.started.elapsed().as_secs_f64();
            let left = (total - done) as f64 / speed;
            output::note(&format!(
                "{} of {}  {}/s  {found}  ETA {left:.0} s",
                bytes::display(done),
                bytes::display(total),
                bytes::display(speed as u64)
            ));
        }
    }

    /// Leaves the bar as it is.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }
}

/// Shows how many of some things are done: a progress bar on a terminal, a line every ten seconds elsewhere.
pub struct CountProgress {
    name: String,
    total: u64,
    bar: Option<Bar>,
    started: Instant,
    said: Instant,
}

impl CountProgress {
    /// Shows nothing yet.
    pub fn new(name: &str, total: u64) -> CountProgress {
        let name = name.to_string();
        CountProgress { name, total, bar: None, started: Instant::now(), said: Instant::now() }
    }

    /// Shows that so many are done.
    pub fn show(&mut self, done: u64) {
        if self.bar.is_none() {
            self.bar = bar("{msg} {pos}/{len} ETA {eta}", 0, self.total);
        }
        if let Some(bar) = &self.bar {
            bar.show(done, self.name.clone());
        } else if self.said.elapsed() >= BETWEEN_LINES && done > 0 {
            self.said = Instant::now();
            let (name, total) = (&self.name, self.total);
            let left = self.started.elapsed().as_secs_f64() / done as f64 * (total - done) as f64;
            output::note(&format!("{name}  {done} of {total}  ETA {left:.0} s"));
        }
    }

    /// Leaves the bar as it is.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }
}

impl Observer for TrainProgress {
    fn advanced(&mut self, step: u64) {
        if let Some(bar) = &self.bar {
            bar.draw(move |bar| bar.set_position(step));
        }
    }

    fn step(&mut self, metrics: &Metrics) {
        self.event(|log| log.step(metrics));
        if metrics.loss.is_finite() {
            let loss = self.loss.map_or(metrics.loss, |mean| 0.95 * mean + 0.05 * metrics.loss);
            self.loss = Some(loss);
        }
        let step_seconds = metrics.step_ms / 1e3;
        self.seconds = if self.seconds == 0.0 {
            step_seconds
        } else {
            0.95 * self.seconds + 0.05 * step_seconds
        };
        let speed = metrics.tokens as f64 / self.seconds;
        if let Some(why) = &metrics.bad_step {
            let reaction = match metrics.rewound_to {
                Some(step) => format!("rewound to the checkpoint of step {step}"),
                None => "skipped".to_string(),
            };
            self.say(&format!("step {:>6}  bad: {why}; {reaction}", metrics.step));
        } else if metrics.skipped {
            let scale = metrics.loss_scale.unwrap_or(1.0);
            self.say(&format!(
                "step {:>6}  skipped: gradients overflow with loss scale {scale}",
                metrics.step
            ));
        }
        if let Some(bar) = &self.bar {
            let loss = self.loss.unwrap_or(metrics.loss);
            let message = format!("loss {loss:.3}  {speed:.0} tokens/s");
            bar.draw(move |bar| bar.set_message(message));
        } else if self.log_interval > 0
            && (metrics.step.is_multiple_of(self.log_interval) || metrics.step == self.last_step)
        {
            let left = (self.last_step - metrics.step) as f64 * self.seconds;
            output::note(&format!(
                "step {:>6}/{}  loss {:.4}  lr {:.2e}  grad norm {:.3}  {speed:.0} tokens/s  ETA {left:.0} s",
                metrics.step, self.last_step, metrics.loss, metrics.lr, metrics.grad_norm
            ));
        }
    }

    fn evaluated(&mut self, step: u64, set: Option<&str>, evaluation: &Evaluation) {
        self.event(|log| log.evaluated(step, set, evaluation));
        let Evaluation { loss, tokens, perplexity, losses } = evaluation;
        let found = match losses.len() {
            0 | 1 => format!("loss {loss:.4} over {tokens} tokens (perplexity {perplexity:.2})"),
            _ => bert_line(evaluation),
        };
        let name = set.map_or_else(String::new, |name| format!("{name} "));
        self.say(&format!("step {step:>6}  validation {name}{found}"));
    }

    fn evaluated_task(&mut self, step: u64, task: &str, result: &TaskResult) {
        if result.numbers.is_empty() {
            let text = code_block(&result.text);
            return self.event(|log| log.text(task, step, &text));
        }
        self.event(|log| log.evaluated_task(step, task, result));
        self.say(&format!("step {step:>6}  {task}: {}", result.text));
    }

    fn saved(&mut self, folder: &Path) {
        self.say(&format!("saved {}", folder.display()));
    }

    fn warning(&mut self, message: &str) {
        self.say(&format!("ferrotron: warning: {message}"));
    }
}
