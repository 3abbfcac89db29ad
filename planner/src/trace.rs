//! Writes a simulated step as a trace of the form that a real step has: see [`ferrotron_parallel::trace`].

use ferrotron_tensor::{Error, Result};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// A span of one rank of a stage.
#[derive(Debug, Clone, PartialEq)]
pub struct Mark {
    /// The stage.
    pub stage: usize,
    /// The kind: a step, an instruction, a module, an operation, a wait, a collective.
    pub category: &'static str,
    /// Its name.
    pub name: String,
    /// Start in seconds since the step began.
    pub start: f64,
    /// End in seconds.
    pub end: f64,
    /// The arguments of the event.
    pub about: About,
}

/// The subject of a span: the arguments of its event.
#[derive(Debug, Clone, PartialEq)]
pub enum About {
    /// Nothing that its name does not say.
    Nothing,
    /// The step of this number, from 1 on.
    Step(usize),
    /// The computation of a micro-batch in a chunk.
    Computation {
        /// The micro-batch, from 0 on.
        microbatch: usize,
        /// The chunk of the stage, from 0 on.
        chunk: usize,
    },
    /// A call of a group.
    Call {
        /// The group's name.
        group: String,
        /// Bytes of the whole buffer.
        bytes: u64,
    },
}

/// The track of the kernels.
const COMPUTE: &str = "compute";

/// Writes the marks of all stages to `path`. `ranks` are the numbers of the simulated ranks, one for each stage.
///
/// Errors if there is a file that is no trace, or if the file cannot be written.
pub fn write(path: &Path, marks: &[Mark], ranks: &[usize]) -> Result<()> {
    ferrotron_parallel::trace::check_target(path)?;
    let written = File::create(path).and_then(|file| write_to(BufWriter::new(file), marks, ranks));
    written.map_err(|error| Error::io("trace", format!("cannot write {}: {error}", path.display())))
}

fn write_to(mut file: impl Write, marks: &[Mark], ranks: &[usize]) -> io::Result<()> {
    writeln!(file, "{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
    let mut separator = "";
    let mut event = |value: Value| -> io::Result<()> {
        write!(file, "{separator}{value}")?;
        separator = ",\n";
        Ok(())
    };
    for (stage, rank) in ranks.iter().enumerate() {
        let name = match ranks.len() {
            1 => format!("rank {rank}"),
            _ => format!("rank {rank}, pp {stage}"),
        };
        event(metadata("process_name", *rank, 0, json!({ "name": name })))?;
        event(metadata("process_sort_index", *rank, 0, json!({ "sort_index": rank })))?;
        event(metadata("thread_name", *rank, 0, json!({ "name": COMPUTE })))?;
        event(metadata("thread_sort_index", *rank, 0, json!({ "sort_index": 0 })))?;
    }
    let mut tracks: Vec<Vec<String>> = vec![vec![COMPUTE.to_string()]; ranks.len()];
    for mark in marks {
        let (rank, tracks) = (ranks[mark.stage], &mut tracks[mark.stage]);
        let name = match &mark.about {
            About::Call { group, .. } => format!("communication {group}"),
            _ => COMPUTE.to_string(),
        };
        let track = match tracks.iter().position(|known| *known == name) {
            Some(track) => track,
            None => {
                let track = tracks.len();
                event(metadata("thread_name", rank, track, json!({ "name": name })))?;
                event(metadata("thread_sort_index", rank, track, json!({ "sort_index": track })))?;
                tracks.push(name);
                track
            }
        };
        let arguments = match &mark.about {
            About::Nothing => json!({}),
            About::Step(number) => json!({ "step": number }),
            About::Computation { microbatch, chunk } => {
                json!({ "microbatch": microbatch, "chunk": chunk })
            }
            About::Call { group, bytes } => json!({ "group": group, "bytes": bytes }),
        };
        event(json!({
            "name": mark.name, "cat": mark.category, "ph": "X", "ts": mark.start * 1e6,
            "dur": (mark.end - mark.start) * 1e6, "pid": rank, "tid": track, "args": arguments,
        }))?;
    }
    writeln!(file, "\n]}}")?;
    file.flush()
}

fn metadata(name: &str, rank: usize, track: usize, arguments: Value) -> Value {
    json!({ "name": name, "ph": "M", "pid": rank, "tid": track, "args": arguments })
}
