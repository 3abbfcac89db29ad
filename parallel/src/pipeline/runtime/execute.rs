//! Executes a rank's instructions of any schedule.
//!
//! Sends are asynchronous, and each direction between two ranks is a separate channel. Receives are started where
//! they are listed and waited for where their tensor is needed. A stage's output is moved to its send, and freed
//! before the next message of that direction starts. Backward needs only the output's history, not its value. At most
//! one message per direction is therefore in transit, however slow the receiver is, and memory use does not depend on
//! relative speed.
//!
//! Along the tensor axis all ranks have the same activations, unless these are sharded along the sequence. Each rank
//! then sends only its shard and the receivers all-gather: the scatter/gather optimization of Narayanan et al., arXiv
//! 2104.04473, section 4.1.

use ferrotron_autograd::{DeferredGrads, GradientEdge, Leaf, LossGradient, Var, WeightGrads};
use ferrotron_nn::Axis;
use ferrotron_tensor::{Category, DType, Device, Error, Result, Tensor};
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};
use tracing::trace_span;

use crate::collective::{Group, Work};
use crate::mesh::Mesh;
use crate::pipeline::{Direction, Instruction, Message, PipelineSchedule};
use crate::tensor_parallel::SequenceParallel;

/// The chunks of a model that a rank runs.
///
/// ```
/// use ferrotron_autograd::Var;
/// use ferrotron_nn::{Bias, Init, Linear, Scope};
/// use ferrotron_parallel::mesh::Mesh;
/// use ferrotron_parallel::pipeline::{
///     PipelineConfig, PipelineModel, PipelineSchedule, ScheduleKind, execute,
/// };
/// use ferrotron_tensor::{DType, Device, Result, Tensor};
///
/// /// One layer; the loss is the sum of its outputs.
/// struct Layer(Linear, Vec<Tensor>);
///
/// impl PipelineModel for Layer {
///     fn activation(&self, _microbatch: usize) -> (Vec<usize>, DType, Device) {
///         let x = &self.1[0];
///         (x.dims().to_vec(), x.dtype(), x.device().clone())
///     }
///
///     fn forward(&mut self, microbatch: usize, _chunk: usize, input: Option<Var>) -> Result<Var> {
///         let x = input.unwrap_or_else(|| Var::constant(self.1[microbatch].clone()));
///         self.0.forward(&x)?.sum_all()
///     }
///
///     fn end_backward(&mut self, _microbatch: usize, _chunk: usize) -> Result<()> {
///         Ok(())
///     }
/// }
///
/// let device = Device::cpu(1)?;
/// let layer = Linear::new(&Scope::new(&device, DType::F64, 1), 2, 1, Bias::No, Init::Ones)?;
/// let x = Tensor::full(&device, DType::F64, &[1, 2], 3.0)?;
/// let mut model = Layer(layer, vec![x.clone(), x]);
/// let config =
///     PipelineConfig { kind: ScheduleKind::OneFOneB, stages: 1, microbatches: 2, chunks: 1 };
/// let done = execute(&PipelineSchedule::new(&config)?, &mut model, &Mesh::single(), 0.5)?;
/// assert_eq!((done.spans.len(), done.peak), (4, 1)); // two forwards, two backwards, one at a time
/// let gradient = model.0.weight().leaf().gradient()?.unwrap();
/// assert_eq!(gradient.to_vec::<f64>()?, [3.0, 3.0]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub trait PipelineModel {
    /// Dims (local), dtype and device of the tensors between stages for a micro-batch.
    fn activation(&self, microbatch: usize) -> (Vec<usize>, DType, Device);

    /// Runs a chunk of this rank on a micro-batch. The input is the previous virtual stage's activation, or `None` on
    /// the first, which reads the data. The result is the activation for the next virtual stage or, of the last, the loss:
    /// one element.
    fn forward(&mut self, microbatch: usize, chunk: usize, input: Option<Var>) -> Result<Var>;

    /// Called when all gradients of a micro-batch in a chunk are complete, including weight gradients.
    fn end_backward(&mut self, microbatch: usize, chunk: usize) -> Result<()>;

    /// Selects a version of the weights for the passes that follow, in a schedule without a flush: see
    /// [`Instruction::UseWeights`] and [`WeightVersions`](crate::pipeline::WeightVersions). A model without versions errors.
    fn use_weights(&mut self, version: usize) -> Result<()> {
        Err(Error::config(
            "pipeline",
            format!("the model keeps no versions of its weights, got version {version}"),
        ))
    }

    /// Updates the newest weights by the gradients of a step, in a schedule without a flush: see [`Instruction::Update`]. A
    /// model that is updated behind its schedule errors.
    ///
    /// Later micro-batches are between forward and backward then, and
    /// [`WeightVersions::update`](crate::pipeline::WeightVersions::update) changes weights in place. What `forward` saved of
    /// them must be parameters themselves: a view (narrowed, reshaped) would read the newest weights in backward.
    fn update(&mut self, step: usize) -> Result<()> {
        Err(Error::config(
            "pipeline",
            format!("the model is not updated within its schedule, got step {step}"),
        ))
    }
}

/// The record of an execution.
#[derive(Debug, Clone)]
pub struct ExecutionTrace {
    /// Start and end of each instruction, relative to the first start; in order.
    pub spans: Vec<(Instruction, Duration, Duration)>,
    /// Peak number of micro-batches of a chunk in flight, including those with deferred gradients; equal to the peak
    /// of [`validate`](crate::pipeline::validate).
    pub peak: usize,
}

/// Runs this rank's instructions of `schedule`. `gradient` is that of the loss: the loss scale over the number of valid
/// tokens of the global batch.
///
/// Errors if the schedule is incomplete or has another number of stages, if a chunk returns another activation than
/// [`PipelineModel::activation`] says or the last one something else than a loss, and as the model and the collectives do.
pub fn execute(
    schedule: &PipelineSchedule,
    model: &mut dyn PipelineModel,
    mesh: &Mesh,
    gradient: impl Into<LossGradient>,
) -> Result<ExecutionTrace> {
    let stage = mesh.axis(Axis::Pipeline).rank();
    if schedule.stages() != mesh.axis(Axis::Pipeline).size() {
        let (wanted, found) = (schedule.stages(), mesh.axis(Axis::Pipeline).size());
        let message = format!("the schedule has {wanted} stages, the mesh {found}");
        return Err(Error::config("pipeline", message));
    }
    let mut run = Run {
        schedule,
        stage,
        mesh,
        gradient: gradient.into(),
        arriving: HashMap::new(),
        leaving: HashMap::new(),
        sending: [None, None],
        flying: HashMap::new(),
        constant: HashSet::new(),
        deferred: HashMap::new(),
    };
    let (started, mut spans, mut peak) = (Instant::now(), Vec::new(), 0);
    for instruction in schedule.instructions(stage) {
        let begin = started.elapsed();
        run.step(model, instruction)?;
        spans.push((instruction.clone(), begin, started.elapsed()));
        peak = peak.max(run.flying.len() + run.deferred.len());
    }
    run.sending.iter_mut().filter_map(Option::take).try_for_each(Work::wait)?;
    match run.left() {
        Some(what) => Err(Error::value("pipeline", format!("the schedule ends with {what}"))),
        None => Ok(ExecutionTrace { spans, peak }),
    }
}

/// A micro-batch of a chunk between forward and backward.
struct InFlight {
    input: Option<Leaf>,
    output: GradientEdge,
}

struct Run<'a> {
    schedule: &'a PipelineSchedule,
    stage: usize,
    mesh: &'a Mesh,
    gradient: LossGradient,
    arriving: HashMap<Message, Arriving>,
    leaving: HashMap<Message, Tensor>,
    /// The last message of each direction.
    sending: [Option<Work<()>>; 2],
    flying: HashMap<(usize, usize), InFlight>,
    /// Chunks and micro-batches whose output needs no gradient: all parameters so far are frozen, or nothing is
    /// recorded.
    constant: HashSet<(usize, usize)>,
    deferred: HashMap<(usize, usize), DeferredGrads>,
}

/// A tensor being received, and its unscattered dims.
struct Arriving {
    work: Work<Tensor>,
    dims: Vec<usize>,
}

impl Run<'_> {
    fn step(&mut self, model: &mut dyn PipelineModel, instruction: &Instruction) -> Result<()> {
        let arrived = self.take(instruction)?;
        // After the wait, so that a trace shows bubbles between instructions.
        let (microbatch, chunk) = instruction.microbatch_and_chunk().unzip();
        let _span = trace_span!("instruction", name = %instruction, microbatch, chunk).entered();
        match *instruction {
            Instruction::Forward { microbatch, chunk } => {
                let input = arrived.map(|value| {
                    value.set_category(Category::Saved);
                    Leaf::input("stage input", value)
                });
                let var = input.as_ref().map(Leaf::var).transpose()?;
                let output = model.forward(microbatch, chunk, var)?;
                self.check_output(model, instruction, &output)?;
                if output.needs_gradient() {
                    let flight = InFlight { input, output: GradientEdge::from_var(&output) };
                    self.flying.insert((microbatch, chunk), flight);
                } else {
                    self.constant.insert((microbatch, chunk));
                }
                self.stash_for_send(instruction, output.into_value());
            }
            Instruction::Backward { microbatch, chunk } => {
                self.backward(instruction, arrived, WeightGrads::Now)?.run()?;
                model.end_backward(microbatch, chunk)?;
            }
            Instruction::BackwardInput { microbatch, chunk } => {
                let deferred = self.backward(instruction, arrived, WeightGrads::Deferred)?;
                self.deferred.insert((microbatch, chunk), deferred);
            }
            Instruction::BackwardWeight { microbatch, chunk } => {
                let deferred = self.deferred.remove(&(microbatch, chunk));
                deferred.ok_or_else(|| incomplete(instruction))?.run()?;
                model.end_backward(microbatch, chunk)?;
            }
            Instruction::UseWeights { version } => model.use_weights(version)?,
            Instruction::Update { step } => model.update(step)?,
            Instruction::Send(_) | Instruction::Receive(_) | Instruction::Exchange { .. } => {
                // The schedule was checked with messages that wait for each other, those of one instruction excepted.
                self.mesh.axis(Axis::Pipeline).together(|| {
                    for message in instruction.receives() {
                        let arriving = self.receive(model, message)?;
                        self.arriving.insert(*message, arriving);
                    }
                    for message in instruction.sends() {
                        self.send(message).transpose()?.ok_or_else(|| incomplete(instruction))?;
                    }
                    Ok(())
                })?;
            }
        }
        Ok(())
    }

    /// Errors unless a forward's output is the activation that the next stage receives or, of the last chunk, a loss.
    /// Backward would take any other for a sum, and a receiver for another tensor of as many elements.
    fn check_output(
        &self,
        model: &dyn PipelineModel,
        instruction: &Instruction,
        output: &Var,
    ) -> Result<()> {
        let refuse = |message: String| Err(Error::shape("pipeline", message));
        let Some(message) = self.schedule.produced(self.stage, instruction) else {
            return match output.value().numel() {
                1 => Ok(()),
                _ => refuse(format!(
                    "{instruction}: the last chunk must return a loss of one element and no activation, got {} {:?}",
                    output.dtype(),
                    output.dims()
                )),
            };
        };
        let (dims, dtype, _) = model.activation(message.microbatch);
        if output.dims() == dims && output.dtype() == dtype {
            return Ok(());
        }
        refuse(format!(
            "{instruction}: the next stage receives an activation {dtype} {dims:?}, as the model says, and the chunk \
             returned {} {:?}",
            output.dtype(),
            output.dims()
        ))
    }

    /// The first kind of leftover state, which a complete schedule does not have.
    fn left(&self) -> Option<&'static str> {
        [
            (self.flying.is_empty(), "a forward that has no backward"),
            (self.deferred.is_empty(), "weight gradients that are not computed"),
            (self.leaving.is_empty(), "a tensor that is not sent"),
            (self.arriving.is_empty(), "a tensor that nobody needs"),
        ]
        .into_iter()
        .find_map(|(done, what)| (!done).then_some(what))
    }

    /// Runs backward from a micro-batch's output and stashes the gradient of its input for sending.
    fn backward(
        &mut self,
        instruction: &Instruction,
        cotangent: Option<Tensor>,
        mode: WeightGrads,
    ) -> Result<DeferredGrads> {
        let place = instruction.microbatch_and_chunk();
        if place.is_some_and(|place| self.constant.remove(&place)) {
            return Ok(DeferredGrads::default());
        }
        let flight = place.and_then(|place| self.flying.remove(&place));
        let InFlight { input, output } = flight.ok_or_else(|| incomplete(instruction))?;
        let cotangent = cotangent.map_or_else(|| output.cotangent(&self.gradient), Ok)?;
        let deferred = output.backward(cotangent, mode)?;
        if let Some(input) = input {
            let gradient = input.gradient()?.ok_or_else(|| {
                Error::graph("pipeline", "the stage's output does not depend on its input")
            })?;
            self.stash_for_send(instruction, gradient);
        }
        Ok(deferred)
    }

    /// Waits for the tensor that a computation needs from another stage.
    fn take(&mut self, instruction: &Instruction) -> Result<Option<Tensor>> {
        let Some(message) = self.schedule.consumed(self.stage, instruction) else {
            return Ok(None);
        };
        let Arriving { work, dims } =
            self.arriving.remove(&message).ok_or_else(|| incomplete(instruction))?;
        let part = work.wait()?;
        let whole = match self.scattered() {
            Some(tp) => tp.blocking().all_gather(part, dims.iter().product())?.wait()?,
            None => part,
        };
        whole.reshape(&dims).map(Some)
    }

    /// Stashes a computation's result for its send.
    fn stash_for_send(&mut self, instruction: &Instruction, tensor: Tensor) {
        if let Some(message) = self.schedule.produced(self.stage, instruction) {
            self.leaving.insert(message, tensor);
        }
    }

    fn receive(&self, model: &dyn PipelineModel, message: &Message) -> Result<Arriving> {
        let (dims, dtype, device) = model.activation(message.microbatch);
        let numel = dims.iter().product();
        let held = self.scattered().map_or(numel, |tp| tp.local_range(numel).len());
        let part = Tensor::empty(&device, dtype, &[held])?;
        let channel = match message.direction {
            Direction::Forward => &self.mesh.stages().forward_in,
            Direction::Backward => &self.mesh.stages().backward_in,
        };
        Ok(Arriving { work: channel.recv(part, 1 - channel.rank())?, dims })
    }

    /// Starts sending the tensor stashed for a message; `None` if there is none.
    fn send(&mut self, message: &Message) -> Option<Result<()>> {
        let tensor = self.leaving.remove(message)?;
        Some(self.start_to_send(message.direction, tensor))
    }

    fn start_to_send(&mut self, direction: Direction, tensor: Tensor) -> Result<()> {
        let last = self.sending[direction as usize].take();
        last.map_or(Ok(()), Work::wait)?;
        let channel = match direction {
            Direction::Forward => &self.mesh.stages().forward_out,
            Direction::Backward => &self.mesh.stages().backward_out,
        };
        let flat = tensor.reshape(&[tensor.numel()])?;
        drop(tensor);
        let part = match self.scattered() {
            Some(tp) => {
                let own = tp.local_range(flat.numel());
                flat.narrow(0, own.start, own.len())?
            }
            None => flat,
        };
        let work = channel.send(part, 1 - channel.rank())?;
        self.sending[direction as usize] = Some(work);
        Ok(())
    }

    /// The group over which activations are scattered for transfers, if they are.
    fn scattered(&self) -> Option<&Group> {
        let whole = self.mesh.sequence() == SequenceParallel::Off;
        Some(self.mesh.axis(Axis::Tensor)).filter(|tp| whole && tp.size() > 1)
    }
}

fn incomplete(instruction: &Instruction) -> Error {
    Error::value("pipeline", format!("{instruction} comes before what it needs"))
}
