//! Writes the spans of one rank as events of the Trace Event Format, in the order in which they end.

use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter, Seek, Write};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use super::clock;

/// Time that open spans have to end after the last step, such as sends whose end no call waits for.
const GRACE: Duration = Duration::from_secs(1);

/// The subscriber of one rank.
pub(super) struct Recorder {
    rank: usize,
    /// The clock's time when the trace began.
    zero: i64,
    next: AtomicU64,
    state: Mutex<TraceState>,
    /// Tells of spans that end.
    ended: Condvar,
}

struct TraceState {
    open: HashMap<u64, Open>,
    /// Names of the tracks; the first is that of the rank's own thread.
    tracks: Vec<String>,
    part: BufWriter<File>,
    /// The first error of writing. What comes behind it is lost.
    failure: Option<io::Error>,
}

/// A span that has not ended.
struct Open {
    category: &'static str,
    fields: Map<String, Value>,
    made: i64,
    /// The time of its first entry.
    began: Option<i64>,
    handles: usize,
}

impl Recorder {
    /// A recorder that writes to `part`, with `name` for the rank.
    pub fn new(rank: usize, name: &str, zero: i64, part: File) -> Recorder {
        let state = TraceState {
            open: HashMap::new(),
            tracks: Vec::new(),
            part: BufWriter::new(part),
            failure: None,
        };
        let recorder = Recorder {
            rank,
            zero,
            next: AtomicU64::new(1),
            state: Mutex::new(state),
            ended: Condvar::new(),
        };
        {
            let mut state = recorder.state();
            // The one event without a comma before it.
            state.write_bytes(
                metadata("process_name", rank, 0, &json!({ "name": name })).to_string().as_bytes(),
            );
            state.write(&metadata("process_sort_index", rank, 0, &json!({ "sort_index": rank })));
            state.track(rank, None);
        }
        recorder
    }

    /// The events so far, from the beginning of the file; later ones are lost.
    ///
    /// Errors with the first failure of writing.
    pub fn finish(&self) -> io::Result<File> {
        let wait =
            self.ended.wait_timeout_while(self.state(), GRACE, |state| !state.open.is_empty());
        let (mut state, _) = wait.unwrap_or_else(PoisonError::into_inner);
        state.part.flush()?;
        if let Some(failure) = state.failure.take() {
            return Err(failure);
        }
        let mut file = state.part.get_ref().try_clone()?;
        file.rewind()?;
        Ok(file)
    }

    fn state(&self) -> MutexGuard<'_, TraceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Microseconds since the trace began.
    fn microseconds(&self, time: i64) -> f64 {
        (time - self.zero) as f64 / 1e3
    }
}

impl TraceState {
    /// The number of the track of the rank's own thread, or of a group.
    fn track(&mut self, rank: usize, group: Option<&str>) -> usize {
        let name = group.map_or("compute".into(), |group| format!("communication {group}"));
        if let Some(number) = self.tracks.iter().position(|track| *track == name) {
            return number;
        }
        let number = self.tracks.len();
        self.write(&metadata("thread_name", rank, number, &json!({ "name": name })));
        self.write(&metadata("thread_sort_index", rank, number, &json!({ "sort_index": number })));
        self.tracks.push(name);
        number
    }

    fn write(&mut self, event: &Value) {
        self.write_bytes(format!(",\n{event}").as_bytes());
    }

    fn write_bytes(&mut self, bytes: &[u8]) {
        if self.failure.is_none() {
            self.failure = self.part.write_all(bytes).err();
        }
    }
}

fn metadata(name: &str, rank: usize, track: usize, arguments: &Value) -> Value {
    json!({ "name": name, "ph": "M", "pid": rank, "tid": track, "args": arguments })
}

impl Subscriber for Recorder {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // Kernels are for profiles: each lies within the span of an operation.
        let own = metadata.is_span() && metadata.target().starts_with("ferrotron");
        own && metadata.name() != "kernel"
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut fields = Fields::default();
        span.record(&mut fields);
        let number = self.next.fetch_add(1, Relaxed);
        let category = span.metadata().name();
        let open = Open { category, fields: fields.0, made: clock::now(), began: None, handles: 1 };
        self.state().open.insert(number, open);
        Id::from_u64(number)
    }

    fn enter(&self, span: &Id) {
        let now = clock::now();
        if let Some(open) = self.state().open.get_mut(&span.into_u64()) {
            open.began.get_or_insert(now);
        }
    }

    fn exit(&self, _span: &Id) {}

    fn clone_span(&self, span: &Id) -> Id {
        if let Some(open) = self.state().open.get_mut(&span.into_u64()) {
            open.handles += 1;
        }
        span.clone()
    }

    fn try_close(&self, span: Id) -> bool {
        let end = clock::now();
        let number = span.into_u64();
        let mut state = self.state();
        let Some(open) = state.open.get_mut(&number) else { return false };
        open.handles -= 1;
        if open.handles > 0 {
            return false;
        }
        if let Some(open) = state.open.remove(&number) {
            self.ended(&mut state, number, open, end);
        }
        self.ended.notify_all();
        true
    }

    /// Spans have all their fields from the beginning.
    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, _event: &Event<'_>) {}
}

impl Recorder {
    /// Writes a span that ended at `end`.
    fn ended(&self, state: &mut TraceState, number: u64, span: Open, end: i64) {
        let Open { category, mut fields, made, began, .. } = span;
        let began = began.unwrap_or(made);
        let name = fields.remove("name").unwrap_or_else(|| category.into());
        let group = fields.get("group").and_then(Value::as_str).map(str::to_string);
        let track = state.track(self.rank, group.as_deref());
        let (queued, ts) = (self.microseconds(made), self.microseconds(began));
        let duration = (end - began) as f64 / 1e3;
        if group.is_some() {
            fields.insert("queued".into(), queued.into());
        }
        let rank = self.rank;
        state.write(&json!({
            "name": name, "cat": category, "ph": "X", "ts": ts, "dur": duration,
            "pid": rank, "tid": track, "args": fields,
        }));
        if group.is_some() {
            // Below 2^53 for any trace that fits a disk, so that readers with floating-point numbers only cope.
            let id = ((rank as u64) << 32) + number;
            state.write(&json!({
                "name": "queued", "cat": category, "ph": "s", "id": id, "ts": queued, "pid": rank, "tid": 0,
            }));
            state.write(&json!({
                "name": "queued", "cat": category, "ph": "f", "bp": "e", "id": id, "ts": ts, "pid": rank, "tid": track,
            }));
        }
    }
}

/// The fields of a span as JSON.
#[derive(Default)]
struct Fields(Map<String, Value>);

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().into(), format!("{value:?}").into());
    }
}
