//! Predicts a training step: records a rank of each pipeline stage, and replays the whole schedule.

use ferrotron_models::gpt::Gpt;
use ferrotron_models::memory::{MemoryEstimator, PlannedDevice, StageMemory};
use ferrotron_models::trainer::Model;
use ferrotron_nn::{Axis, Sharding};
use ferrotron_parallel::data_parallel::AsyncUpdates;
use ferrotron_parallel::mesh::ParallelDims;
use ferrotron_parallel::pipeline::{PipelineConfig, PipelineSchedule};
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, Error, Result};

use crate::asynchronous;
use crate::bound::least_seconds;
use crate::cluster::Cluster;
use crate::kernels::{KernelTime, counted_operations, kernels};
use crate::program::{Place, Program};
use crate::record::{Recording, Watched, record};
use crate::simulate::{Replay, simulate};
use crate::stage_time::StageTime;
use crate::steps::{Part, Traffic};
use crate::trace::Mark;

/// The most steps of one replay, and the most micro-batches of all of them on all stages.
const MOST_STEPS: usize = 10_000;
const MOST_MICROBATCHES: usize = 4_000_000;

/// A predicted step.
#[derive(Debug, Clone)]
pub struct Prediction {
    /// The step, by stage and instruction; without a flush, and with asynchronous updates, all steps until a drain.
    pub replay: Replay,
    /// Number of steps of the replay.
    pub steps: usize,
    /// The mean over stages and steps. Its parts add up to the duration of the step.
    pub mean: StageTime,
    /// The kernels of the busiest stage's rank, those that take longest first.
    pub kernels: Vec<KernelTime>,
    /// Memory of the ranks of each recorded stage.
    pub memory: Vec<StageMemory>,
    /// The simulated rank of each recorded stage.
    pub ranks: Vec<usize>,
    /// Number of GPUs.
    pub world: usize,
    /// Tokens of the global batch.
    pub tokens: u64,
    /// Operations of the model on the global batch, without recomputation.
    pub model_operations: f64,
    /// Operations of all products on all GPUs, with recomputation. Attention counts two products of all pairs of
    /// positions in each pass. With full recomputation this is equation (3) of arXiv:2104.04473.
    pub hardware_operations: f64,
    /// Peak operations a second of a GPU.
    pub peak: f64,
}

impl Prediction {
    /// Duration of the step: the mean if the replay has several.
    pub fn seconds(&self) -> f64 {
        self.replay.seconds / self.steps as f64
    }

    /// Tokens a second of all GPUs.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds()
    }

    /// Operations a second of one GPU, with recomputation.
    pub fn hardware_per_gpu(&self) -> f64 {
        self.hardware_operations / self.seconds() / self.world as f64
    }

    /// Operations a second of one GPU, without recomputation.
    pub fn model_per_gpu(&self) -> f64 {
        self.model_operations / self.seconds() / self.world as f64
    }

    /// The bubble over the time that is not bubble, as papers state it: (p-1)/m for 1F1B.
    pub fn bubble(&self) -> f64 {
        self.mean.bubble / (self.seconds() - self.mean.bubble)
    }

    /// Seconds of forward and backward of one of `microbatches` a step, on the stage for which they take longest: its
    /// kernels but those of updates, and its waits for tensor- and context-parallel calls. These are tf + tb of equation (1)
    /// of arXiv:2104.04473.
    pub fn pass_seconds(&self, microbatches: usize) -> f64 {
        let passes = |stage: &StageTime| {
            let waits =
                stage.exposed[Traffic::Tensor as usize] + stage.exposed[Traffic::Context as usize];
            stage.computing.iter().sum::<f64>() - stage.computing[Part::Optimizer as usize] + waits
        };
        let longest = self.replay.stages.iter().map(passes).fold(0.0, f64::max);
        longest / (microbatches * self.steps) as f64
    }

    /// Bytes of the rank that takes most.
    pub fn peak_bytes(&self) -> usize {
        self.memory.iter().map(|stage| stage.memory.total_bytes).max().unwrap_or(0)
    }

    /// Seconds of a training on `tokens`.
    pub fn training_seconds(&self, tokens: f64) -> f64 {
        tokens / self.tokens_per_second()
    }

    /// The same for a model of `parameters` by equation (4) of arXiv:2104.04473: 8 T P / (n X) for T tokens, P parameters,
    /// n GPUs and X operations a second of each with recomputation.
    pub fn training_seconds_by_equation(&self, tokens: f64, parameters: f64) -> f64 {
        8.0 * tokens * parameters / (self.world as f64 * self.hardware_per_gpu())
    }

    /// The spans of a trace, if they were asked for.
    pub fn marks(&self) -> &[Mark] {
        &self.replay.marks
    }
}

/// A run of which a rank of each stage has been recorded: it can be predicted for several clusters with GPUs of one
/// architecture, or with processors.
pub struct RecordedRun {
    layout: ParallelDims,
    sequence_parallel: SequenceParallel,
    pipeline: PipelineConfig,
    /// Number of steps that the run takes at once.
    steps: usize,
    /// The updates that ranks do not wait for, if there are some.
    updates: Option<AsyncUpdates>,
    /// With the schedule of the recorded step or steps.
    recorded: Vec<(StageMemory, Recording, PipelineSchedule)>,
    /// The recording of each stage.
    of_stage: Vec<usize>,
    dtype: DType,
    tokens: u64,
    model_operations: f64,
    /// Whether a position sees only those before it.
    causal: bool,
}

impl RecordedRun {
    /// Takes a step of `run` on fake devices like `device`, which replace its own. Operations and modules are
    /// recorded `with_operations` only.
    ///
    /// Errors as [`MemoryEstimator::stages`].
    pub fn new<M: Model>(
        run: &MemoryEstimator<M>,
        device: PlannedDevice,
        with_operations: bool,
    ) -> Result<RecordedRun> {
        let mut recorded = RecordedRun::empty(run);
        for stage in 0..run.layout.size(Axis::Pipeline) {
            recorded.add(run, device, stage, with_operations)?;
            recorded.of_stage.push(stage);
        }
        Ok(recorded)
    }

    /// Like [`RecordedRun::new`] for the GPUs of `cluster`, but of stages that are alike there only one takes a step. The
    /// stages must have equally many blocks.
    ///
    /// Errors as [`MemoryEstimator::stages`].
    pub fn of_differing_stages<M: Model>(
        run: &MemoryEstimator<M>,
        cluster: &Cluster,
    ) -> Result<RecordedRun> {
        let mut recorded = RecordedRun::empty(run);
        let (stages, of_stage) = differing_stages(&run.layout, cluster.gpus_per_node);
        for stage in stages {
            recorded.add(run, cluster.gpu.device, stage, false)?;
        }
        recorded.represent(of_stage);
        Ok(recorded)
    }

    /// A run of which no stage has been recorded.
    pub(crate) fn empty<M: Model>(run: &MemoryEstimator<M>) -> RecordedRun {
        let (parallel, sizes) = (&run.trainer.parallel, &run.trainer.batch_size);
        let tokens = (sizes.full_batch_size() * run.seq_length) as u64;
        let updates = parallel.data_parallel.stale_updates();
        let pipeline = PipelineConfig {
            kind: parallel.pipeline_schedule,
            stages: run.layout.size(Axis::Pipeline),
            microbatches: sizes.microbatches(u64::MAX),
            chunks: parallel.chunks,
        };
        RecordedRun {
            layout: run.layout,
            sequence_parallel: run.sequence_parallel,
            pipeline,
            steps: updates.map_or(run.steps_at_once(), |updates| updates.drain_interval),
            updates,
            recorded: Vec::new(),
            of_stage: Vec::new(),
            dtype: run.dtype,
            tokens,
            model_operations: M::flops(&run.model, tokens, run.seq_length),
            causal: M::ARCHITECTURE == Gpt::ARCHITECTURE,
        }
    }

    /// Records a stage, and returns its memory. [`RecordedRun::represent`] says of which stages it stands.
    ///
    /// Errors as [`MemoryEstimator::stages`], for replicas that take steps of their own, and for more steps until a drain
    /// than a replay takes.
    pub(crate) fn add<M: Model>(
        &mut self,
        run: &MemoryEstimator<M>,
        device: PlannedDevice,
        stage: usize,
        with_operations: bool,
    ) -> Result<StageMemory> {
        self.check_steps()?;
        let every = run.trainer.parallel.data_parallel.synchronize_every;
        if every > 1 {
            let message = format!(
                "{every}, but the weights that replicas average every {every} steps are in no predicted step: leave it out"
            );
            return Err(Error::config("--local-sgd-steps", message));
        }
        let mut run = MemoryEstimator::<M> {
            model: run.model.clone(),
            trainer: run.trainer.clone(),
            device,
            ..*run
        };
        let watched = Watched {
            kernels: matches!(device, PlannedDevice::Cpu { .. }),
            operations: with_operations,
        };
        let (microbatches, steps) = run.dry_step(stage);
        let schedule =
            PipelineSchedule::over_steps(&PipelineConfig { microbatches, ..self.pipeline }, steps)?;
        let whole = self.updates.map(|_| run.stage(stage)).transpose()?;
        // The kernels and calls are those of a step that waits for its own sums.
        run.trainer.parallel.data_parallel.async_updates = None;
        // The weights that a step gathers are awaited in the next one, which is the one that is recorded.
        let carries = matches!(
            run.trainer.parallel.data_parallel.sharding,
            Sharding::Optimizer | Sharding::Gradients
        );
        let steps_taken = if carries { 2 } else { 1 };
        let (memory, recording) = record(watched, || run.stage_after(stage, steps_taken))?;
        let memory = whole.unwrap_or(memory);
        self.recorded.push((memory, recording, schedule));
        Ok(memory)
    }

    /// Errors if the steps until a drain are too many to replay: they are in memory together.
    fn check_steps(&self) -> Result<()> {
        let PipelineConfig { stages, microbatches, .. } = self.pipeline;
        let most = (MOST_MICROBATCHES / (stages * microbatches).max(1)).clamp(1, MOST_STEPS);
        if self.steps <= most {
            return Ok(());
        }
        let name = match self.updates {
            Some(_) => "--drain-interval",
            None => "--pipeline-drain-interval",
        };
        let message = format!(
            "{} steps until a drain are too many to predict together: give at most {most}, whose mean is about the same",
            self.steps
        );
        Err(Error::config(name, message))
    }

    /// Lets recorded stages stand for all: `of_stage` has the index of a recording for each stage.
    pub(crate) fn represent(&mut self, of_stage: Vec<usize>) {
        self.of_stage = of_stage;
    }

    /// Bytes of the recorded rank that takes most.
    pub(crate) fn peak_bytes(&self) -> u64 {
        let bytes = self.recorded.iter().map(|(found, ..)| found.memory.total_bytes as u64);
        bytes.max().unwrap_or(0)
    }

    /// The least time of the step on `cluster`, without a replay.
    pub(crate) fn least_seconds(&self, cluster: &Cluster) -> Result<f64> {
        let programs = self.programs(cluster)?;
        let of_stage: Vec<&Program> = self.of_stage.iter().map(|index| &programs[*index]).collect();
        Ok(least_seconds(&self.schedule()?, &of_stage)? / self.steps as f64)
    }

    /// The instructions of the run.
    pub(crate) fn schedule(&self) -> Result<PipelineSchedule> {
        match self.updates {
            None => PipelineSchedule::over_steps(&self.pipeline, self.steps),
            Some(updates) => {
                Ok(asynchronous::schedule(&PipelineSchedule::new(&self.pipeline)?, updates))
            }
        }
    }

    /// The program of each recording.
    pub(crate) fn programs(&self, cluster: &Cluster) -> Result<Vec<Program>> {
        let program =
            |(found, recording, schedule): &(StageMemory, Recording, PipelineSchedule)| {
                let scattered = self.sequence_parallel == SequenceParallel::Off;
                let place = Place { layout: &self.layout, rank: found.rank, scattered };
                let program = Program::new(recording, schedule, place, cluster)?;
                Ok(match self.updates {
                    None => program,
                    Some(updates) => asynchronous::program(program, updates),
                })
            };
        self.recorded.iter().map(program).collect()
    }

    /// Predicts the step on `cluster`. `with_marks` keeps the spans of a trace.
    ///
    /// Errors if the cluster has no peak for the dtypes of the run, or as [`Cluster::sharing`].
    pub fn predict(&self, cluster: &Cluster, with_marks: bool) -> Result<Prediction> {
        let programs = self.programs(cluster)?;
        let programs: Vec<&Program> = self.of_stage.iter().map(|index| &programs[*index]).collect();
        let schedule = self.schedule()?;
        let steps = self.steps as f64;
        let world = self.layout.world();
        let sharing = cluster.sharing(world, programs.len())?;
        let mut software = cluster.software;
        software.overlap_grad_reduce |= self.updates.is_some();
        let replay = simulate(&schedule, &programs, software, sharing, with_marks)?;
        let operations = replay.stages.iter().zip(&programs).map(|(stage, program)| {
            let counts = stage.launches.iter().zip(&program.launches);
            let counted = |launch| counted_operations(launch, self.causal);
            counts.map(|(count, launch)| *count as f64 * counted(launch)).sum::<f64>()
        });
        Ok(Prediction {
            mean: StageTime::mean(&replay.stages).divided_by(steps),
            kernels: kernels(&replay, &programs, &schedule, sharing.is_some()),
            memory: self.recorded.iter().map(|(memory, ..)| *memory).collect(),
            ranks: self.recorded.iter().map(|(memory, ..)| memory.rank).collect(),
            steps: self.steps,
            world,
            tokens: self.tokens,
            model_operations: self.model_operations,
            hardware_operations: operations.sum::<f64>() * (world / programs.len()) as f64 / steps,
            peak: cluster.gpu.peak(self.dtype)?,
            replay,
        })
    }
}

/// Stages that stand for all, the first and the last ahead, and the index among them for each stage.
///
/// Stages between the first and the last are alike if all of them lie in the same way on their nodes. The second one of all
/// has the most micro-batches in flight.
pub(crate) fn differing_stages(
    layout: &ParallelDims,
    gpus_per_node: usize,
) -> (Vec<usize>, Vec<usize>) {
    let stages = layout.size(Axis::Pipeline);
    let ranks = layout.world() / stages;
    if stages < 4 || (layout.world() > gpus_per_node && !ranks.is_multiple_of(gpus_per_node)) {
        return ((0..stages).collect(), (0..stages).collect());
    }
    let index = |stage| match stage {
        0 => 0,
        _ if stage + 1 == stages => 1,
        _ => 2,
    };
    (vec![0, stages - 1, 1], (0..stages).map(index).collect())
}

/// Predicts a step of the run that `run` describes on `cluster`, whose GPUs replace the run's device. `with_marks` keeps
/// the spans of a trace.
///
/// Errors as [`MemoryEstimator::stages`] and as [`RecordedRun::predict`].
pub fn predict<M: Model>(
    run: &MemoryEstimator<M>,
    cluster: &Cluster,
    with_marks: bool,
) -> Result<Prediction> {
    RecordedRun::new(run, cluster.gpu.device, with_marks)?.predict(cluster, with_marks)
}
