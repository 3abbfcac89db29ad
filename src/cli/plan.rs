//! The plan of a run: what its options make of a model, checked before anything starts.

use ferrotron::models::memory::{DocumentResets, MemoryEstimator};
use ferrotron::models::support::{ParallelismCheck, check};
use ferrotron::models::trainer::{ExecutionMode, SaveMode, TrainerConfig};
use ferrotron::nn::Axis;
use ferrotron::{Error, Result};

use super::architecture::TrainedModel;
use super::args::model::Architecture;
use super::args::train::TrainArgs;

/// Plans the work of `world` ranks, `local` of them on this machine, with a vocabulary of `vocab_size` tokens.
pub fn plan<M: TrainedModel>(
    args: &TrainArgs,
    world: usize,
    local: usize,
    vocab_size: usize,
) -> Result<MemoryEstimator<M>> {
    let dtype = args.device.dtype()?;
    let layout = args.parallel.layout(world)?;
    let model = M::config(args, vocab_size)?;
    let sizes = M::sizes(&model);
    let parallel = args.parallel.config(&layout, &sizes, args.precision.gradients())?;
    let parallel = args.offload.config(parallel, dtype)?;
    let precision = args.precision.config(dtype, args.optimization.seed)?;
    precision.loss_scaler(&parallel)?;
    let trainer = args.optimization.config(layout.size(Axis::Data), parallel, precision)?;
    let execution = args.execution.execution(&args.device)?;
    args.execution.algorithms(&args.device)?;
    let saves = if args.run.async_save { SaveMode::Async } else { SaveMode::Blocking };
    let keep_in_fp32 = args.precision.keep_in_fp32()?;
    let trainer = TrainerConfig { execution, saves, keep_in_fp32, ..trainer };
    trainer.check_execution(layout.size(Axis::Pipeline))?;
    let own_gpus = args.parallel.ranks.have_own_gpus(args.device.place()?);
    if execution == ExecutionMode::CudaGraph && world > 1 && !own_gpus {
        return Err(Error::config("--enable-cuda-graph", ExecutionMode::NEEDS_NCCL));
    }
    trainer.check_bad_steps()?;
    trainer.check_async()?;
    trainer.check_unflushed()?;
    let sequence_parallel = args.parallel.sequence();
    let seq_length = args.model.seq_length()?;
    for microbatches in trainer.batch_size.all_microbatches() {
        check(&ParallelismCheck {
            model: sizes,
            layout,
            sequence_parallel,
            parallel: &trainer.parallel,
            seq_length,
            microbatches,
        })?;
    }
    let device = args.device.planned(local);
    let documents = match args.model.architecture {
        Architecture::Bert => DocumentResets::default(),
        _ => args.data.document_resets(),
    };
    Ok(MemoryEstimator::<M> {
        model,
        layout,
        sequence_parallel,
        trainer,
        dtype,
        seq_length,
        documents,
        device,
    })
}
