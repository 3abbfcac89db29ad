//! Whether a run fits into memory, and what would help if it does not.

use ferrotron::models::memory::{MemoryEstimator, RankMemory, StageMemory};
use ferrotron::models::memory_limit::{MemoryLimit, memory_limit};
use ferrotron::nn::Axis;
use ferrotron::{DType, Error, MemoryKind, Result};
use std::ops::Range;

use super::architecture::TrainedModel;
use super::args::device::GpuMemory;
use super::args::parallel::Granularity;
use super::args::train::TrainArgs;
use super::bytes::display;
use super::job::ProcessRole;
use super::plan::plan as planned;

/// The bytes of a category.
type Of = fn(&RankMemory) -> usize;

/// The categories by name.
pub const CATEGORIES: &[(&str, Of)] = &[
    ("weights", |memory| memory.weights_bytes),
    ("gradients", |memory| memory.gradients_bytes),
    ("optimizer", |memory| memory.optimizer_bytes),
    ("activations", |memory| memory.activations_bytes),
    ("logits", |memory| memory.logits_bytes),
    ("buffers", |memory| memory.buffers_bytes),
    ("workspace", |memory| memory.workspace_bytes),
    ("snapshot", |memory| memory.snapshot_bytes),
];

/// The stage whose ranks take most.
pub fn largest(stages: &[StageMemory]) -> StageMemory {
    let most = stages.iter().max_by_key(|stage| stage.memory.total_bytes);
    *most.expect("a run has a stage")
}

/// The most that a rank takes, and of what.
pub fn sentence(memory: &RankMemory) -> String {
    let used =
        CATEGORIES.iter().map(|(name, of)| (name, of(memory))).filter(|(_, bytes)| *bytes > 0);
    let parts: Vec<String> =
        used.map(|(name, bytes)| format!("{name} {}", display(bytes as u64))).collect();
    format!("{} ({})", display(memory.total_bytes as u64), parts.join(", "))
}

/// Errors if a rank of the run that `args` ask for would take more than `--memory-limit`. Without that option, errors
/// if the ranks of this machine together take more than it has, or than their GPU has. A missing GPU is an error, too.
/// The message says what would help.
pub fn check<M: TrainedModel>(
    args: &TrainArgs,
    plan: &MemoryEstimator<M>,
    stages: &[StageMemory],
    job: &ProcessRole,
) -> Result<()> {
    let gpu = args.device.gpu_memory(job.local_numbers())?;
    if args.run.memory_limit.is_some() {
        return check_ranks(args, plan, stages);
    }
    match (gpu, memory_limit()) {
        (Some(gpu), _) => check_gpu(args, plan, stages, job.local_ranks(), gpu),
        (None, Some(limit)) => {
            check_together(args, plan, stages, job.local_ranks(), limit, "machine")
        }
        (None, None) => Ok(()),
    }
}

/// Checks a run that is only planned. Other machines are unknown, so ranks with GPUs of their own are compared with the
/// first one here, if there is one.
pub fn check_thought<M: TrainedModel>(
    args: &TrainArgs,
    plan: &MemoryEstimator<M>,
    stages: &[StageMemory],
) -> Result<()> {
    if args.run.memory_limit.is_some() {
        return check_ranks(args, plan, stages);
    }
    match args.device.gpu_memory(0..1) {
        Ok(Some(gpu)) => check_gpu(args, plan, stages, 0..plan.layout.world(), gpu),
        Ok(None) | Err(_) => Ok(()),
    }
}

fn check_gpu<M: TrainedModel>(
    args: &TrainArgs,
    plan: &MemoryEstimator<M>,
    stages: &[StageMemory],
    local: Range<usize>,
    gpu: GpuMemory,
) -> Result<()> {
    let limit = MemoryLimit { bytes: gpu.bytes, source: "the GPU has" };
    match gpu.shared {
        true => check_together(args, plan, stages, local, limit, "GPU"),
        false => local
            .into_iter()
            .try_for_each(|rank| check_together(args, plan, stages, rank..rank + 1, limit, "GPU")),
    }
}

/// Errors if the ranks `local` take more than the limit of what they share.
fn check_together<M: TrainedModel>(
    args: &TrainArgs,
    plan: &MemoryEstimator<M>,
    stages: &[StageMemory],
    local: Range<usize>,
    limit: MemoryLimit,
    shared: &str,
) -> Result<()> {
    let of_stage = |rank| stages[plan.layout.coordinate(rank, Axis::Pipeline)].memory.total_bytes;
    let most: u64 = local.clone().map(|rank| of_stage(rank) as u64).sum();
    if most <= limit.bytes {
        return Ok(());
    }
    // Not every rank takes as much as the one of its stage that takes most.
    let of_rank = |rank| plan.rank(rank).map(|memory| memory.total_bytes as u64);
    let together = local.clone().map(of_rank).sum::<Result<u64>>()?;
    if together <= limit.bytes {
        return Ok(());
    }
    let there = format!("more than the {} that {}", display(limit.bytes), limit.source);
    let why = match local.len() {
        1 => there,
        ranks => format!("{ranks} ranks on this {shared} take {}, {there}", display(together)),
    };
    Err(refused(args, plan, stages, &why))
}

/// Errors, with what would help, if a rank would take more than `--memory-limit`.
fn check_ranks<M: TrainedModel>(
    args: &TrainArgs,
    plan: &MemoryEstimator<M>,
    stages: &[StageMemory],
) -> Result<()> {
    let takes = largest(stages).memory.total_bytes as u64;
    match args.run.memory_limit.filter(|&limit| takes > limit) {
        Some(limit) => {
            let why = format!("more than --memory-limit {}", display(limit));
            Err(refused(args, plan, stages, &why))
        }
        None => Ok(()),
    }
}

/// Refuses a run in one line: the numbers, and what options would make of them.
fn refused<M: TrainedModel>(
    args: &TrainArgs,
    plan: &MemoryEstimator<M>,
    stages: &[StageMemory],
    why: &str,
) -> Error {
    let StageMemory { stage, rank, memory, .. } = largest(stages);
    // What does not go with the rest of the run, or saves nothing, is of no help.
    let less = |args: &TrainArgs| {
        let changed =
            planned::<M>(args, plan.layout.world(), 1, M::sizes(&plan.model).vocab_size).ok()?;
        let found =
            MemoryEstimator::<M> { device: plan.device, ..changed }.stage(stage).ok()?.memory;
        Some(found.total_bytes).filter(|&total| total < memory.total_bytes)
    };
    let (mut together, mut found) = (args.clone(), Vec::new());
    let changes: [Change<M>; 6] = [recompute, shrink, narrow, shard, offload, block];
    for change in changes {
        let mut alone = args.clone();
        let Some(flag) = change(&mut alone, plan) else { continue };
        let Some(total) = less(&alone) else { continue };
        change(&mut together, plan);
        found.push(format!("{} with {flag}", display(total as u64)));
    }
    if let (true, Some(total)) = (found.len() > 1, less(&together)) {
        found.push(format!("{} with all of these", display(total as u64)));
    }
    let helps = match found.is_empty() {
        true => "more ranks or a smaller model take less".to_string(),
        false => format!("it takes {}", found.join(", ")),
    };
    let of_stage = match stages.len() {
        1 => String::new(),
        _ => format!(", of pipeline stage {stage},"),
    };
    let message = format!("rank {rank}{of_stage} takes {}, {why}; {helps}", sentence(&memory));
    Error::config("memory", message)
}

/// Makes the options save memory and says which it has changed, if they do not save it already.
type Change<M> = fn(&mut TrainArgs, &MemoryEstimator<M>) -> Option<String>;

fn recompute<M: TrainedModel>(args: &mut TrainArgs, _: &MemoryEstimator<M>) -> Option<String> {
    let parallel = &mut args.parallel;
    (parallel.recompute_granularity != Granularity::Full).then(|| {
        parallel.recompute_granularity = Granularity::Full;
        parallel.recompute_modules = None;
        "--recompute-granularity full".to_string()
    })
}

fn offload<M: TrainedModel>(args: &mut TrainArgs, plan: &MemoryEstimator<M>) -> Option<String> {
    let states = &mut args.offload.offload_optimizer_states;
    (plan.trainer.parallel.optimizer_states == MemoryKind::Device).then(|| {
        *states = true;
        "--offload-optimizer-states".to_string()
    })
}

/// Training waits for checkpoints, so that no copy is needed.
fn block<M: TrainedModel>(args: &mut TrainArgs, _: &MemoryEstimator<M>) -> Option<String> {
    std::mem::take(&mut args.run.async_save).then(|| "--async-save=false".to_string())
}

/// The same samples a step, fewer at once.
fn shrink<M: TrainedModel>(args: &mut TrainArgs, plan: &MemoryEstimator<M>) -> Option<String> {
    let optimization = &mut args.optimization;
    (optimization.micro_batch_size > 1).then(|| {
        let global = plan.trainer.batch_size.full_batch_size();
        optimization.micro_batch_size = 1;
        optimization.global_batch_size = Some(global);
        format!("--micro-batch-size 1 --global-batch-size {global}")
    })
}

fn narrow<M: TrainedModel>(args: &mut TrainArgs, plan: &MemoryEstimator<M>) -> Option<String> {
    (plan.dtype == DType::F32).then(|| {
        (args.device.dtype, args.device.bf16) = (None, true);
        "--bf16".to_string()
    })
}

fn shard<M: TrainedModel>(args: &mut TrainArgs, plan: &MemoryEstimator<M>) -> Option<String> {
    let copies = plan.layout.size(Axis::Data) * plan.layout.size(Axis::Context);
    let most = if plan.layout.size(Axis::Pipeline) > 1 { 1 } else { 3 };
    (copies > 1 && args.parallel.zero_stage < most).then(|| {
        args.parallel.zero_stage = most;
        format!("--zero-stage {most}")
    })
}
