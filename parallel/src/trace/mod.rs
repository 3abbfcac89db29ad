//! Traces: what every rank did and when, on one clock, as JSON for <https://ui.perfetto.dev> or
//! `chrome://tracing`.
//!
//! The crates mark what is worth seeing with spans of the `tracing` crate. A span goes to whoever watches the
//! thread on which it was made: [`Trace::record`] makes the trace of a rank watch its thread, so several ranks in
//! one process have traces of their own, nothing is passed through the graph, and where nobody watches, a span
//! costs a comparison. A collective's span is made by the thread that calls it and entered by the progress
//! thread, which takes it along with the call.
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
//! fetches the files of the others through the world's group and joins them. The clock is described in
//! `clock.rs`.

mod clock;
mod recorder;

use ferrotron_nn::Axis;
use ferrotron_tensor::{Device, Error, Result, Tensor};
use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tracing::callsite::rebuild_interest_cache;
use tracing::{Dispatch, dispatcher};

use crate::collective::Group;
use crate::mesh::Mesh;
use recorder::Recorder;

/// Bytes that are sent at a time to the rank that writes the file.
const CHUNK: usize = 1 << 20;

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
    /// Two handles of the same recorder. While there is a single one in the process, tracing-core 0.1 asks the
    /// thread that first comes by a span whether it is watched, and takes the answer for all threads:
    /// tokio-rs/tracing, issue 3611.
    watchers: [Dispatch; 2],
    world: Group,
    device: Device,
    /// On rank 0: the file that all events go to in the end.
    target: Option<(PathBuf, File)>,
}

impl Trace {
    /// Begins the trace that rank 0 will write to `path`. All ranks of the mesh call this; `device` holds what
    /// they tell each other.
    ///
    /// Errors if a file cannot be made, or as the communication does.
    pub fn start(path: &Path, mesh: &Mesh, device: &Device) -> Result<Trace> {
        let target = match mesh.rank() {
            // Now rather than after hours of training.
            0 => Some((path.to_path_buf(), File::create(path).map_err(|e| unwritable(path, &e))?)),
            _ => None,
        };
        let zero = clock::common_zero(mesh.world(), device)?;
        let part = tempfile::tempfile().map_err(|e| unwritable(&std::env::temp_dir(), &e))?;
        let recorder = Arc::new(Recorder::new(mesh.rank(), &rank_name(mesh), zero, part));
        let watchers = [Dispatch::new(recorder.clone()), Dispatch::new(recorder.clone())];
        let (world, device) = (mesh.world().clone(), device.clone());
        Ok(Trace { recorder, watchers, world, device, target })
    }

    /// Runs `f` and writes down what happens on this thread, and through [`Device::run`] on the device's.
    pub fn record<R>(&self, f: impl FnOnce() -> R) -> R {
        dispatcher::with_default(&self.watchers[0], f)
    }

    /// Ends the trace. All ranks call this; when rank 0 returns, the file is complete.
    ///
    /// Errors if a file cannot be written, or as the communication does.
    pub fn finish(self) -> Result<()> {
        let part = self.recorder.finish();
        drop(self.watchers);
        // tracing-core does not notice by itself that nobody watches any more.
        rebuild_interest_cache();
        let mut part = part.map_err(|error| unwritable(&std::env::temp_dir(), &error))?;
        match self.target {
            None => send(&mut part, &self.world, &self.device),
            Some((path, file)) => {
                let failed = |error: std::io::Error| unwritable(&path, &error);
                let mut file = BufWriter::new(file);
                let begin = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
                file.write_all(begin.as_bytes()).map_err(failed)?;
                std::io::copy(&mut part, &mut file).map_err(failed)?;
                for rank in 1..self.world.size() {
                    file.write_all(b",\n").map_err(failed)?;
                    receive(&mut file, rank, &self.world, &self.device, &path)?;
                }
                file.write_all(b"\n]}\n").and_then(|()| file.flush()).map_err(failed)
            }
        }
    }
}

/// What a rank is called: its number, and where it lies on the axes that are longer than one.
fn rank_name(mesh: &Mesh) -> String {
    let names =
        [(Axis::Tensor, "tp"), (Axis::Context, "cp"), (Axis::Data, "dp"), (Axis::Pipeline, "pp")];
    let places = names
        .iter()
        .filter(|(axis, _)| mesh.axis(*axis).size() > 1)
        .map(|(axis, name)| format!(", {name} {}", mesh.axis(*axis).rank()));
    format!("rank {}{}", mesh.rank(), places.collect::<String>())
}

/// Sends a rank's part to rank 0: its length, then its bytes.
fn send(part: &mut File, world: &Group, device: &Device) -> Result<()> {
    let unreadable = |error: std::io::Error| {
        Error::io("trace", format!("a temporary file cannot be read: {error}"))
    };
    let mut left = part.metadata().map_err(unreadable)?.len() as usize;
    world.send(Tensor::from_slice(device, &[left as i64], &[1])?, 0)?.wait()?;
    let mut bytes = vec![0; CHUNK.min(left)];
    while left > 0 {
        let chunk = &mut bytes[..CHUNK.min(left)];
        part.read_exact(chunk).map_err(unreadable)?;
        left -= chunk.len();
        world.send(Tensor::from_slice(device, chunk, &[chunk.len()])?, 0)?.wait()?;
    }
    Ok(())
}

/// Appends what [`send`] sends.
fn receive(
    file: &mut impl Write,
    rank: usize,
    world: &Group,
    device: &Device,
    path: &Path,
) -> Result<()> {
    let length = world.recv(Tensor::from_slice(device, &[0_i64], &[1])?, rank)?.wait()?;
    let mut left = length.to_vec::<i64>()?[0] as usize;
    while left > 0 {
        let chunk = Tensor::from_slice(device, &vec![0_u8; CHUNK.min(left)], &[CHUNK.min(left)])?;
        let chunk = world.recv(chunk, rank)?.wait()?.to_vec::<u8>()?;
        file.write_all(&chunk).map_err(|error| unwritable(path, &error))?;
        left -= chunk.len();
    }
    Ok(())
}

fn unwritable(path: &Path, error: &std::io::Error) -> Error {
    Error::io("trace", format!("cannot write {}: {error}", path.display()))
}
