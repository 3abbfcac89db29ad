//! Traces: what every rank did and when, on one clock, as JSON for <https://ui.perfetto.dev> or
//! `chrome://tracing`.
//!
//! The crates mark events with spans of the `tracing` crate. A span goes to the subscriber of the thread on which it
//! was made. [`Trace::record`] subscribes the trace of a rank to its thread, so several ranks in one process have
//! traces of their own, and nothing is passed through the graph. Without a subscriber, a span costs a comparison. A
//! collective's span is made by the thread that calls it and entered by the progress thread, which takes it along with
//! the call.
//!
//! | span | shown as | arguments |
//! |---|---|---|
//! | `step` | `step` | its number |
//! | `instruction` | a pipeline instruction, without the wait before it | microbatch, chunk |
//! | `module` | path of a block | |
//! | `forward` | an operation | |
//! | `backward` | the operation whose gradient is computed | |
//! | `weight gradient` | a parameter whose deferred gradient is computed | |
//! | `optimizer` | the update of the weights | |
//! | `wait` | time spent waiting for a collective | |
//! | `collective` | an operation of a group | operation, bytes, group, call site, when it was queued |
//!
//! A rank is a process of the trace. One track, "compute", has all that happens on the rank's own thread, nested
//! as it was called. Each group has a track "communication GROUP", since groups do not wait for one another; its
//! calls lie one behind another, and an arrow leads to each from where it was queued. An event is written when
//! its span ends, in the Trace Event Format (Google, 2016): complete events "X", flows "s" and "f", metadata "M",
//! microseconds since the trace began.
//!
//! Each rank writes to a temporary file of its own, so memory does not grow with the run. In the end rank 0
//! fetches the files of the others through the world's group and joins them. A file that cannot be read or written
//! loses events and delays no rank: all ranks still make the same calls. The clock is described in `clock.rs`.

mod clock;
mod recorder;
mod watch;

use ferrotron_nn::Axis;
use ferrotron_tensor::{Device, Result, Tensor};
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::collective::Group;
use crate::mesh::Mesh;
use crate::output_file::{self, unwritable};
use recorder::Recorder;
pub use watch::Watch;

/// Bytes that are sent at a time to the rank that writes the file.
const CHUNK: usize = 1 << 20;

const OPERATION: &str = "trace";

/// The beginning of every file; behind it comes the name of a rank, if any could be recorded.
const BEGIN: &str = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";

/// The end of every file.
const END: &[u8] = b"\n]}\n";

/// The trace of one rank. See the [module](self).
///
/// ```
/// use ferrotron_autograd::Var;
/// use ferrotron_parallel::mesh::Mesh;
/// use ferrotron_parallel::trace::Trace;
/// use ferrotron_tensor::{Device, Tensor};
///
/// let device = Device::cpu(1)?;
/// let path = std::env::temp_dir().join(format!("trace of {}.json", std::process::id()));
/// let trace = Trace::start(&path, &Mesh::single(), &device)?;
/// let x = Var::constant(Tensor::from_slice(&device, &[1.0_f32, 2.0], &[2])?);
/// trace.record(|| x.exp())?;
/// trace.finish()?;
/// assert!(std::fs::read_to_string(&path).unwrap().contains(r#""name":"exp""#));
/// # std::fs::remove_file(&path).unwrap();
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub struct Trace {
    recorder: Arc<Recorder>,
    watch: Watch,
    world: Group,
    device: Device,
    /// The file that all events go to in the end, on rank 0.
    target: Option<(PathBuf, File)>,
}

impl Trace {
    /// Begins the trace that rank 0 will write to `path` in the end. All ranks of the mesh call this; `device` holds
    /// what they tell each other.
    ///
    /// Errors if a file cannot be made, if there is one that is no trace (as [`check_target`]), or as the
    /// communication does.
    pub fn start(path: &Path, mesh: &Mesh, device: &Device) -> Result<Trace> {
        let target = match mesh.rank() {
            // Now rather than after hours of training.
            0 => {
                let mut file = output_file::open(OPERATION, path)?;
                check_own(&mut file, path)?;
                Some((path.to_path_buf(), file))
            }
            _ => None,
        };
        let zero = clock::common_zero(mesh.world(), device)?;
        let temporary = std::env::temp_dir();
        let part = tempfile::tempfile().map_err(|e| unwritable(OPERATION, &temporary, &e))?;
        let recorder = Arc::new(Recorder::new(mesh.rank(), &rank_name(mesh), zero, part));
        let watch = Watch::new(recorder.clone());
        let (world, device) = (mesh.world().clone(), device.clone());
        Ok(Trace { recorder, watch, world, device, target })
    }

    /// Runs `f` and writes down what happens on this thread.
    pub fn record<R>(&self, f: impl FnOnce() -> R) -> R {
        self.watch.over(f)
    }

    /// Ends the trace. All ranks call this; when rank 0 returns, the file is complete.
    ///
    /// Errors if a file cannot be read or written ([`Io`](ferrotron_tensor::ErrorKind::Io)): that of this rank alone,
    /// and everybody else's part is written all the same. Else as the communication does.
    pub fn finish(self) -> Result<()> {
        let part = self.recorder.finish();
        drop(self.watch);
        let mut part = Part::new(part);
        let joined = match self.target {
            None => send(&mut part, &self.world, &self.device),
            Some((path, file)) => {
                let joined = join(&mut part, file, &self.world, &self.device)?;
                joined.map_err(|error| unwritable(OPERATION, &path, &error))
            }
        };
        let temporary = |error: io::Error| unwritable(OPERATION, &std::env::temp_dir(), &error);
        joined.and(part.failure.map_or(Ok(()), |error| Err(temporary(error))))
    }
}

/// Errors if the file at `path` is there and is not a trace that this program wrote, or cannot be written. Changes
/// nothing.
pub fn check_target(path: &Path) -> Result<()> {
    let file = output_file::open_existing(OPERATION, path)?;
    file.map_or(Ok(()), |mut file| check_own(&mut file, path))
}

fn check_own(file: &mut File, path: &Path) -> Result<()> {
    let found = output_file::beginning(file, BEGIN.len() as u64 + 200);
    let found = found.map_err(|error| unwritable(OPERATION, path, &error))?;
    // One that a killed process has begun may end anywhere.
    let own = match found.strip_prefix(BEGIN.as_bytes()) {
        Some(events) => events.is_empty() || events == END || contains(events, b"\"rank "),
        None => BEGIN.as_bytes().starts_with(&found),
    };
    if own { Ok(()) } else { Err(output_file::not_own(OPERATION, path, "a trace")) }
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// The name of a rank: its number, and its coordinates on the axes that are longer than one.
fn rank_name(mesh: &Mesh) -> String {
    let names =
        [(Axis::Tensor, "tp"), (Axis::Context, "cp"), (Axis::Data, "dp"), (Axis::Pipeline, "pp")];
    let places = names
        .iter()
        .filter(|(axis, _)| mesh.axis(*axis).size() > 1)
        .map(|(axis, name)| format!(", {name} {}", mesh.axis(*axis).rank()));
    format!("rank {}{}", mesh.rank(), places.collect::<String>())
}

/// The spans that one rank has recorded, read in chunks.
struct Part {
    file: Option<File>,
    /// Bytes that are not read yet.
    left: usize,
    /// The first failure. What cannot be read is blanks.
    failure: Option<io::Error>,
}

impl Part {
    fn new(recorded: io::Result<File>) -> Part {
        let sized = recorded.and_then(|file| Ok((file.metadata()?.len() as usize, file)));
        match sized {
            Ok((left, file)) => Part { file: Some(file), left, failure: None },
            Err(error) => Part { file: None, left: 0, failure: Some(error) },
        }
    }

    /// The next bytes; `None` behind the last.
    fn next(&mut self) -> Option<Vec<u8>> {
        let file = self.file.as_mut().filter(|_| self.left > 0)?;
        let mut chunk = vec![0; CHUNK.min(self.left)];
        self.left -= chunk.len();
        if let Err(error) = file.read_exact(&mut chunk) {
            chunk.fill(b' ');
            self.failure.get_or_insert(error);
        }
        Some(chunk)
    }
}

/// Writes the parts of all ranks, this rank's first. What cannot be written is received all the same; the inner
/// result is the first failure.
fn join(part: &mut Part, file: File, world: &Group, device: &Device) -> Result<io::Result<()>> {
    let mut written = output_file::truncate(&file, 0);
    let mut file = BufWriter::new(file);
    let mut write = |bytes: &[u8]| {
        if written.is_ok() {
            written = file.write_all(bytes);
        }
    };
    write(BEGIN.as_bytes());
    let mut separator: &[u8] = b"";
    while let Some(chunk) = part.next() {
        write(&chunk);
        separator = b",\n";
    }
    for rank in 1..world.size() {
        let length = world.recv(Tensor::from_slice(device, &[0_i64], &[1])?, rank)?.wait()?;
        let mut left = length.to_vec::<i64>()?[0] as usize;
        if left > 0 {
            write(separator);
            separator = b",\n";
        }
        while left > 0 {
            let place = vec![0_u8; CHUNK.min(left)];
            let chunk = world.recv(Tensor::from_slice(device, &place, &[place.len()])?, rank)?;
            write(&chunk.wait()?.to_vec::<u8>()?);
            left -= place.len();
        }
    }
    write(END);
    Ok(written.and_then(|()| file.flush()))
}

/// Sends a rank's part to rank 0: its length, then its bytes.
fn send(part: &mut Part, world: &Group, device: &Device) -> Result<()> {
    world.send(Tensor::from_slice(device, &[part.left as i64], &[1])?, 0)?.wait()?;
    while let Some(chunk) = part.next() {
        world.send(Tensor::from_slice(device, &chunk, &[chunk.len()])?, 0)?.wait()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_traces_are_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        let device = Device::cpu(1).unwrap();
        let traced = || {
            let trace = Trace::start(&path, &Mesh::single(), &device)?;
            trace.record(|| tracing::trace_span!("forward", name = "something").in_scope(|| {}));
            trace.finish()
        };
        check_target(&path).unwrap();
        assert!(!path.exists());
        traced().unwrap();
        let first = std::fs::read_to_string(&path).unwrap();
        serde_json::from_str::<serde_json::Value>(&first).unwrap();
        // Longer than the next, and cut where a killed process may have been.
        for length in [0, 1, BEGIN.len(), first.len() / 2] {
            let cut = first.repeat(2)[..length].to_string();
            std::fs::write(&path, cut).unwrap();
            check_target(&path).unwrap();
            traced().unwrap();
            let again = std::fs::read_to_string(&path).unwrap();
            serde_json::from_str::<serde_json::Value>(&again).unwrap();
        }
        for foreign in
            ["notes", "{\"traceEvents\":[]}", "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n{}]}"]
        {
            std::fs::write(&path, foreign).unwrap();
            let refused = traced().unwrap_err().to_string();
            assert!(refused.contains("something else than a trace"), "{refused}");
            assert_eq!(check_target(&path).unwrap_err().to_string(), refused);
            assert_eq!(std::fs::read_to_string(&path).unwrap(), foreign);
        }
        // Until it ends, a trace changes nothing.
        std::fs::write(&path, &first).unwrap();
        let trace = Trace::start(&path, &Mesh::single(), &device).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), first);
        trace.finish().unwrap();
    }

    /// Ranks whose files fail still tell the others what they wait for.
    #[test]
    fn a_part_that_cannot_be_read_is_blank() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("part");
        std::fs::write(&path, [b'x'; 10]).unwrap();
        let mut part = Part::new(File::open(&path));
        std::fs::write(&path, "xxx").unwrap();
        assert_eq!(part.next().unwrap(), [b' '; 10]);
        assert!(part.next().is_none() && part.failure.is_some());
        let mut absent = Part::new(File::open(folder.path().join("absent")));
        assert!(absent.next().is_none() && absent.left == 0 && absent.failure.is_some());
    }
}
