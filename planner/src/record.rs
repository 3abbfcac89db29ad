//! Records the work of a step: its kernels, collectives and waits, in order, by the instructions of its pipeline.
//!
//! The crates below announce their work by events and spans of the `tracing` crate: launches and kernels in `tensor`, calls of
//! fake groups in `parallel`, instructions by the executor, operations by `autograd`. A subscriber writes them down.

use ferrotron_parallel::collective::Op;
use ferrotron_parallel::trace::Watch;
use ferrotron_tensor::{DType, Error, Result};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::fields::Fields;

/// A kernel, a matrix product or a copy that a GPU is given, or a kernel of a processor.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Launch {
    /// Its name.
    pub kernel: String,
    /// Type of its elements.
    pub dtype: DType,
    /// Bytes that it reads and writes.
    pub bytes: u64,
    /// Number of matrix products of each of `batch`; 0 if it computes none.
    pub count: usize,
    /// Number of matrices of each operand.
    pub batch: usize,
    /// Rows of the left operand.
    pub rows: usize,
    /// Columns of the right operand.
    pub columns: usize,
    /// Columns of the left operand.
    pub inner: usize,
    /// Whether only the products below the diagonal are computed.
    pub causal: bool,
}

impl Launch {
    /// Operations of the matrix products, 2 for each multiplication.
    pub fn operations(&self) -> f64 {
        let products = [self.count, self.batch, self.rows, self.columns, self.inner];
        let whole = 2.0 * products.iter().map(|&size| size as f64).product::<f64>();
        if self.causal { whole / 2.0 } else { whole }
    }
}

/// A part of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Work {
    /// A launch, by its index.
    Launch(usize),
    /// The call of this number of a group, by its index, begins.
    Call {
        /// Index of the group.
        group: usize,
        /// Number of the call in the group.
        number: u64,
        /// The operation's name.
        operation: &'static str,
        /// Bytes of the whole buffer.
        bytes: u64,
    },
    /// The step goes on when that call has ended.
    Await {
        /// Index of the group.
        group: usize,
        /// Number of the call in the group.
        number: u64,
    },
    /// A span opens, by its category and name: an operation, a module, the optimizer.
    Open(&'static str, String),
    /// The span that was opened last closes.
    Close,
}

/// The work of one rank's step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Recording {
    /// Work before the first instruction.
    pub before: Vec<Work>,
    /// Work of each instruction of the schedule, from the end of the one before it.
    pub instructions: Vec<Vec<Work>>,
    /// Work behind the last instruction.
    pub behind: Vec<Work>,
    /// Number of micro-batches.
    pub microbatches: usize,
    /// The different launches.
    pub launches: Vec<Launch>,
    /// The names of the groups.
    pub groups: Vec<String>,
}

/// The announcements that are recorded beside calls and instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Watched {
    /// Spans of a processor's kernels. Without them events of a GPU's launches are recorded.
    pub kernels: bool,
    /// Operations and modules.
    pub operations: bool,
}

/// Runs `f`, which takes steps of a trainer on this thread, and returns its result with the work of the last one.
///
/// Errors as `f` does, and if it takes no step.
pub fn record<R>(watched: Watched, f: impl FnOnce() -> Result<R>) -> Result<(R, Recording)> {
    let recorder = Arc::new(Recorder { watched, ..Recorder::default() });
    let result = Watch::new(recorder.clone()).over(f)?;
    let state = std::mem::take(&mut *recorder.state());
    match state.ended {
        true => Ok((result, state.recording)),
        false => Err(Error::graph("record", "no step was taken")),
    }
}

#[derive(Default)]
struct Recorder {
    watched: Watched,
    next: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    recording: Recording,
    launches: HashMap<Launch, usize>,
    /// Spans that are open: what they are.
    spans: HashMap<u64, (&'static str, String)>,
    /// Work since the end of the last instruction.
    current: Vec<Work>,
    in_step: bool,
    ended: bool,
}

impl Recorder {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Subscriber for Recorder {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let ours = metadata.target().starts_with("ferrotron");
        ours && match metadata.name() {
            "call" | "awaited" => metadata.is_event(),
            "launch" => metadata.is_event() && !self.watched.kernels,
            "kernel" => metadata.is_span() && self.watched.kernels,
            "step" | "instruction" | "optimizer" => metadata.is_span(),
            "module" | "forward" | "backward" | "weight gradient" => self.watched.operations,
            _ => false,
        }
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let category = span.metadata().name();
        let mut fields = Fields::default();
        span.record(&mut fields);
        let number = self.next.fetch_add(1, Relaxed) + 1;
        let mut state = self.state();
        if category == "kernel" {
            if state.in_step {
                let work = state.kernel(&fields);
                state.current.push(work);
            }
            return Id::from_u64(number);
        }
        let name = fields.texts.remove("name").unwrap_or_else(|| category.to_string());
        if let (true, Some(microbatch)) = (state.in_step, fields.numbers.get("microbatch")) {
            let taken = *microbatch as usize + 1;
            state.recording.microbatches = state.recording.microbatches.max(taken);
        }
        state.spans.insert(number, (category, name));
        Id::from_u64(number)
    }

    fn enter(&self, span: &Id) {
        let mut state = self.state();
        let Some((category, name)) = state.spans.get(&span.into_u64()).cloned() else { return };
        match category {
            "step" => {
                let Recording { before, instructions, behind, .. } = &mut state.recording;
                before.clear();
                instructions.clear();
                behind.clear();
                state.in_step = true;
            }
            "instruction" if state.in_step && state.recording.instructions.is_empty() => {
                state.recording.before = std::mem::take(&mut state.current);
            }
            "instruction" => {}
            _ if state.in_step => state.current.push(Work::Open(category, name)),
            _ => {}
        }
    }

    fn exit(&self, span: &Id) {
        let mut state = self.state();
        let category = state.spans.get(&span.into_u64()).map(|span| span.0);
        if !state.in_step {
            return;
        }
        match category {
            Some("step") => {
                state.recording.behind = std::mem::take(&mut state.current);
                (state.in_step, state.ended) = (false, true);
            }
            Some("instruction") => {
                let done = std::mem::take(&mut state.current);
                state.recording.instructions.push(done);
            }
            Some(_) => state.current.push(Work::Close),
            None => {}
        }
    }

    fn try_close(&self, span: Id) -> bool {
        self.state().spans.remove(&span.into_u64());
        true
    }

    fn event(&self, event: &Event<'_>) {
        let mut state = self.state();
        if !state.in_step {
            return;
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        let work = match event.metadata().name() {
            "launch" => state.launch(&fields),
            "call" => Work::Call {
                group: state.group(fields.text("group")),
                number: fields.number("number"),
                operation: operation(fields.text("operation")),
                bytes: fields.number("bytes"),
            },
            _ => Work::Await {
                group: state.group(fields.text("group")),
                number: fields.number("number"),
            },
        };
        state.current.push(work);
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}
}

impl State {
    fn launch(&mut self, fields: &Fields) -> Work {
        let size = |name| fields.number(name) as usize;
        let launch = Launch {
            kernel: fields.text("kernel").to_string(),
            dtype: fields.text("dtype").parse().unwrap_or(DType::U8),
            bytes: fields.number("bytes"),
            count: size("count"),
            batch: size("batch"),
            rows: size("rows"),
            columns: size("columns"),
            inner: size("inner"),
            causal: fields.number("causal") > 0,
        };
        self.known(launch)
    }

    /// A processor's kernel. Its span states operations and no sizes of matrices.
    fn kernel(&mut self, fields: &Fields) -> Work {
        let operations = fields.number("flops") as usize;
        self.known(Launch {
            kernel: fields.text("name").to_string(),
            dtype: fields.text("dtype").parse().unwrap_or(DType::U8),
            bytes: fields.number("read") + fields.number("written"),
            count: usize::from(operations > 0),
            batch: 1,
            rows: operations / 2,
            columns: 1,
            inner: 1,
            causal: false,
        })
    }

    fn known(&mut self, launch: Launch) -> Work {
        let known = &mut self.recording.launches;
        let index = *self.launches.entry(launch).or_insert_with_key(|launch| {
            known.push(launch.clone());
            known.len() - 1
        });
        Work::Launch(index)
    }

    fn group(&mut self, name: &str) -> usize {
        let groups = &mut self.recording.groups;
        groups.iter().position(|known| known == name).unwrap_or_else(|| {
            groups.push(name.to_string());
            groups.len() - 1
        })
    }
}

/// The names of `Op::name`, without an allocation for each call.
fn operation(name: &str) -> &'static str {
    Op::NAMES.into_iter().find(|known| *known == name).unwrap_or("send")
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrotron_cuda::nvrtc::Architecture;
    use ferrotron_nn::Axis;
    use ferrotron_parallel::collective::Reduction;
    use ferrotron_parallel::mesh::{Mesh, ParallelDims};
    use ferrotron_parallel::tensor_parallel::SequenceParallel;
    use ferrotron_tensor::{Device, Tensor, ops::matmul::matmul};
    use tracing::trace_span;

    #[test]
    fn a_step_is_written_down_by_its_instructions() {
        let device = Device::fake_cuda(Architecture { major: 8, minor: 0 }).unwrap();
        let layout = ParallelDims::new(4, 4, 1, 1).unwrap();
        let mesh = Mesh::fake(layout, 1, SequenceParallel::Off).unwrap();
        let step = || {
            let a = Tensor::zeros(&device, DType::BF16, &[64, 32])?; // not within the step
            let _step = trace_span!("step", step = 1).entered();
            let sum = {
                let _span =
                    trace_span!("instruction", name = "one", microbatch = 2_usize, chunk = 0)
                        .entered();
                let product = matmul(&a, &a.transpose(0, 1)?)?;
                mesh.axis(Axis::Tensor).all_reduce(product, Reduction::Sum)?
            };
            sum.wait()?.dim(0)
        };
        let (rows, recording) = record(Watched::default(), step).unwrap();
        assert_eq!((rows, recording.microbatches), (64, 3));
        assert_eq!(recording.launches.len(), 1, "{recording:?}");
        let launch = &recording.launches[0];
        assert_eq!(launch.operations(), 2.0 * 64.0 * 64.0 * 32.0);
        assert_eq!(launch.bytes, 2 * (64 * 32 + 64 * 32 + 64 * 64));
        assert_eq!(recording.groups, ["tp"]);
        let call = Work::Call { group: 0, number: 0, operation: "all_reduce", bytes: 2 * 64 * 64 };
        assert_eq!(recording.instructions, [vec![Work::Launch(0), call]]);
        assert_eq!(recording.behind, [Work::Await { group: 0, number: 0 }]);
        assert!(record(Watched::default(), || Ok(())).unwrap_err().to_string().contains("no step"));
    }

    #[test]
    fn kernels_of_a_processor_are_written_down_with_their_work() {
        let device = Device::fake(1).unwrap();
        let step = || {
            let a = Tensor::zeros(&device, DType::F32, &[64, 32])?;
            let _step = trace_span!("step", step = 1).entered();
            let product = matmul(&a, &a.transpose(0, 1)?)?;
            product.gelu_tanh().map(drop)
        };
        let watched = Watched { kernels: true, operations: false };
        let ((), recording) = record(watched, step).unwrap();
        let [product, gelu] = &recording.launches[..] else { panic!("{recording:?}") };
        assert_eq!(
            (product.kernel.as_str(), product.operations()),
            ("matmul", 2.0 * 64.0 * 64.0 * 32.0)
        );
        assert_eq!(product.bytes, 4 * (2 * 64 * 32 + 64 * 64));
        assert_eq!((gelu.operations(), gelu.bytes), (0.0, 2 * 4 * 64 * 64));
    }
}
