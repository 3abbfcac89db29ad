//! Adds up the time and the work of the spans of a thread's steps.

use ferrotron_tensor::{DType, Device, Error, Result};
use std::collections::HashMap;
use std::fmt;
use std::mem::take;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use super::launches::{Launch, Launches};
use super::rows::{Amount, Recording};

/// Spans that are added up; those of collectives are entered by other threads.
const KINDS: [&str; 7] =
    ["step", "module", "forward", "backward", "weight gradient", "optimizer", "kernel"];

/// The subscriber of a profile.
pub(super) struct Recorder {
    next: AtomicU64,
    /// Whether a GPU does the work, later than it is given.
    on_gpu: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    recording: Recording,
    open: HashMap<u64, OpenSpan>,
    /// The spans that were entered and not left, outermost first.
    stack: Vec<u64>,
    /// The work of a GPU, and why it cannot be timed.
    launches: Option<Launches>,
    failure: Option<Error>,
}

/// A span that has not ended.
struct OpenSpan {
    kind: &'static str,
    fields: Work,
    pass: &'static str,
    entered: Instant,
    /// Time of the spans within, and whether there were any.
    within: Duration,
    encloses: bool,
    handles: usize,
}

/// The fields of a span.
#[derive(Default)]
struct Work {
    name: String,
    dtype: Option<DType>,
    flops: u64,
    read: u64,
    written: u64,
}

impl Recorder {
    pub fn new(device: &Device) -> Recorder {
        let launches = device.is_gpu().then(|| Launches::of(device));
        let state = Mutex::new(State { launches, ..State::default() });
        Recorder { next: AtomicU64::new(1), on_gpu: device.is_gpu(), state }
    }

    /// Takes the rows recorded so far. Waits for a GPU.
    pub fn take(&self) -> Result<Recording> {
        let state = &mut *self.state();
        match (state.failure.take(), &state.launches) {
            (Some(error), _) => Err(error),
            (None, Some(launches)) => launches.recording(),
            (None, None) => Ok(take(&mut state.recording)),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Subscriber for Recorder {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let is_known = match metadata.is_span() {
            true => KINDS.contains(&metadata.name()),
            false => self.on_gpu && metadata.name() == "launch",
        };
        is_known && metadata.target().starts_with("ferrotron")
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut fields = Work::default();
        span.record(&mut fields);
        let number = self.next.fetch_add(1, Relaxed);
        let open = OpenSpan {
            kind: span.metadata().name(),
            fields,
            pass: "step",
            entered: Instant::now(),
            within: Duration::ZERO,
            encloses: false,
            handles: 1,
        };
        self.state().open.insert(number, open);
        Id::from_u64(number)
    }

    fn enter(&self, span: &Id) {
        let mut state = self.state();
        let State { open, stack, .. } = &mut *state;
        let around = stack.last().and_then(|number| open.get(number)).map(|span| span.pass);
        if let Some(span) = open.get_mut(&span.into_u64()) {
            span.pass = match span.kind {
                "forward" => "forward",
                "backward" | "weight gradient" => "backward",
                "optimizer" => "update",
                _ => around.unwrap_or("step"),
            };
        }
        stack.push(span.into_u64());
        if let Some(span) = open.get_mut(&span.into_u64()) {
            span.entered = Instant::now();
            if span.kind == "step" {
                state.on_launches(|launches| launches.step(true));
            }
        }
    }

    fn exit(&self, span: &Id) {
        let now = Instant::now();
        let mut state = self.state();
        let State { open, stack, recording, .. } = &mut *state;
        // Spans are left in the order opposite to that in which they were entered.
        stack.pop();
        // Work outside of a step is not a step's.
        let is_step = |number: &u64| open.get(number).is_some_and(|span| span.kind == "step");
        let ends_step = is_step(&span.into_u64());
        if !ends_step && !stack.iter().any(is_step) {
            return;
        }
        if self.on_gpu {
            if ends_step {
                state.on_launches(|launches| launches.step(false));
            }
            return;
        }
        let Some(span) = open.get_mut(&span.into_u64()) else { return };
        let whole = now.duration_since(span.entered);
        let own = whole.saturating_sub(take(&mut span.within));
        let named = match span.kind {
            "kernel" => true,
            "step" | "module" => false,
            // The time of an operation around its kernels is that of the graph.
            _ => !span.encloses,
        };
        if span.kind == "step" {
            recording.steps += 1;
            recording.total += whole;
        }
        if named {
            let name = match span.kind {
                "optimizer" => "optimizer",
                _ => &span.fields.name,
            };
            let row = recording.rows.entry((span.pass, name.to_string())).or_default();
            row.add(span.fields.amount(), own);
        } else {
            recording.outside += own;
        }
        if let Some(around) = stack.last().and_then(|number| open.get_mut(number)) {
            around.within += whole;
            around.encloses = true;
        }
    }

    fn clone_span(&self, span: &Id) -> Id {
        if let Some(open) = self.state().open.get_mut(&span.into_u64()) {
            open.handles += 1;
        }
        span.clone()
    }

    fn try_close(&self, span: Id) -> bool {
        let (number, mut state) = (span.into_u64(), self.state());
        let Some(open) = state.open.get_mut(&number) else { return false };
        open.handles -= 1;
        let closed = open.handles == 0;
        if closed {
            state.open.remove(&number);
        }
        closed
    }

    /// Spans have all their fields from the beginning.
    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    /// A GPU is given work.
    fn event(&self, event: &Event<'_>) {
        let mut launch = Launch::default();
        event.record(&mut launch);
        let state = &mut *self.state();
        let of = |number: &u64| state.open.get(number);
        if state.stack.iter().filter_map(of).any(|span| span.kind == "step") {
            let pass = state.stack.last().and_then(of).map_or("step", |span| span.pass);
            state.on_launches(|launches| launches.launch(pass, launch));
        }
    }
}

impl State {
    /// Notes what a GPU does, until that fails.
    fn on_launches(&mut self, note: impl FnOnce(&mut Launches) -> Result<()>) {
        if let (Some(launches), None) = (&mut self.launches, &self.failure) {
            self.failure = note(launches).err();
        }
    }
}

impl Work {
    fn amount(&self) -> Amount {
        let [flops, read, written] = [self.flops, self.read, self.written].map(|x| x as f64);
        Amount { dtype: self.dtype.unwrap_or(DType::F32), flops, read, written }
    }
}

impl Visit for Work {
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "flops" => self.flops = value,
            "read" => self.read = value,
            "written" => self.written = value,
            _ => {}
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "name" {
            self.name = value.to_string();
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "dtype" => self.dtype = format!("{value:?}").parse().ok(),
            "name" => self.name = format!("{value:?}"),
            _ => {}
        }
    }
}
