//! Generates the published schedules: each rank's order of computations.

use ferrotron_tensor::{Error, Result};
use std::collections::VecDeque;

use crate::pipeline::schedule::PipelineSchedule;
use crate::pipeline::schedule::config::{
    PipelineConfig, ScheduleKind, refused_sizes, unsupported_reason,
};
use crate::pipeline::schedule::instruction::Instruction;
use crate::pipeline::schedule::transfers;

impl PipelineSchedule {
    /// The instructions of a published schedule.
    ///
    /// The order of computations, with p stages, m micro-batches and v chunks, on rank r:
    ///
    /// - *naive*: forward and backward of each micro-batch in turn.
    /// - *GPipe*: all forwards, then all backwards, both in the order of the micro-batches (as in figure 3 of
    ///   arXiv:2104.04473). Gradients therefore accumulate in the order of serial training.
    /// - *1F1B*: a warm-up of p - r - 1 forwards, then one forward and one backward alternately, then the remaining
    ///   backwards.
    /// - *interleaved*: micro-batches form groups of p. A group passes through chunk 0, then 1, and so on, and
    ///   backward through the chunks in reverse. The order is that of 1F1B over these m v passes after a warm-up of 2
    ///   (p - r - 1) + (v - 1) p forwards, as in Megatron-LM.
    /// - *ZB-H1*: forwards and input gradients as in 1F1B. Rank r also runs a weight gradient after each input
    ///   gradient, r micro-batches behind it, so that all ranks hold at most p activations. The remaining weight
    ///   gradients fill the time in which 1F1B waits for gradients at the end.
    ///
    /// - *PipeDream*, also with vertical sync, and *PipeDream-2BW*: 1F1B, then an update, with the weight versions of
    ///   [`ScheduleKind::weights_version`]. See [`PipelineSchedule::over_steps`] for several steps.
    ///
    /// A send follows the computation that produces its tensor, and a receive precedes the one that consumes it;
    /// adjacent ones form one [`Instruction::Exchange`]. A receive is moved earlier if the schedule would otherwise
    /// deadlock with blocking sends. This happens for messages from the last rank to the first.
    ///
    /// # Errors
    /// Errors if [`unsupported_reason`] rejects the configuration.
    pub fn new(config: &PipelineConfig) -> Result<PipelineSchedule> {
        PipelineSchedule::over_steps(config, 1)
    }

    /// The instructions of several steps of a schedule without a flush, from an empty pipeline to an empty one.
    ///
    /// Micro-batches count through all steps, which is the order of 1F1B over all of them. An [`Instruction::Update`]
    /// follows the last backward of each step, and an [`Instruction::UseWeights`] precedes a computation whose version is
    /// not selected yet.
    ///
    /// # Errors
    /// Errors as [`PipelineSchedule::new`], for 0 steps, and for several of a kind that [flushes](ScheduleKind::flushes).
    ///
    /// ```
    /// use ferrotron_parallel::pipeline::*;
    /// let config = PipelineConfig { kind: ScheduleKind::PipeDream, stages: 2, microbatches: 1, chunks: 1 };
    /// let schedule = PipelineSchedule::over_steps(&config, 3)?;
    /// let names: Vec<String> = schedule.instructions(0).iter().map(ToString::to_string).collect();
    /// assert!(names.contains(&"Update(step 2)".to_string()));
    /// assert_eq!(weight_versions(&schedule)?, [2, 1]); // kept on each rank, with the newest
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn over_steps(config: &PipelineConfig, steps: usize) -> Result<PipelineSchedule> {
        let PipelineConfig { kind, stages, microbatches, chunks } = *config;
        let refused = unsupported_reason(config).or_else(|| match steps {
            1 => None,
            _ if kind.flushes() => {
                Some(format!("{kind} is empty after each step, got {steps} steps"))
            }
            _ => refused_sizes([stages, microbatches.saturating_mul(steps), chunks]),
        });
        if let Some(why) = refused {
            return Err(Error::config("pipeline schedule", why));
        }
        let microbatches = microbatches * steps;
        let all = PipelineConfig { microbatches, ..*config };
        let of_rank = |rank| match kind.flushes() {
            true => computations(&all, rank),
            false => with_updates(config, rank, computations(&all, rank)),
        };
        with_transfers((0..stages).map(of_rank).collect(), microbatches, chunks)
    }

    /// Forwards without backwards, for evaluation: all microbatches follow one another through the stages. With
    /// several chunks, a group of one microbatch for each rank passes through all chunks before the next group
    /// begins; the last group may be smaller.
    ///
    /// # Errors
    /// A number that is zero; more forwards than [`unsupported_reason`] allows.
    pub fn forward_only(
        stages: usize,
        microbatches: usize,
        chunks: usize,
    ) -> Result<PipelineSchedule> {
        let sizes = [stages, microbatches, chunks];
        if let Some(why) = refused_sizes(sizes) {
            return Err(Error::config("pipeline schedule", why));
        }
        let group = |first: usize| {
            let group = first..(first + stages).min(microbatches);
            (0..chunks).flat_map(move |chunk| {
                group.clone().map(move |microbatch| Instruction::Forward { microbatch, chunk })
            })
        };
        let forwards: Vec<Instruction> =
            (0..microbatches).step_by(stages).flat_map(group).collect();
        with_transfers(vec![forwards; stages], microbatches, chunks)
    }
}

/// The computations of every rank with their messages.
fn with_transfers(
    computations: Vec<Vec<Instruction>>,
    microbatches: usize,
    chunks: usize,
) -> Result<PipelineSchedule> {
    let order = PipelineSchedule::from_instructions(computations, microbatches, chunks);
    Ok(PipelineSchedule::from_instructions(transfers::add_send_recv(&order)?, microbatches, chunks))
}

/// The computations of a rank, without messages.
fn computations(config: &PipelineConfig, rank: usize) -> Vec<Instruction> {
    let PipelineConfig { kind, stages, microbatches, chunks } = *config;
    let after = stages - rank - 1;
    match kind {
        ScheduleKind::Naive => one_forward_one_backward(config, 0),
        ScheduleKind::GPipe => one_forward_one_backward(config, microbatches),
        ScheduleKind::OneFOneB
        | ScheduleKind::PipeDream
        | ScheduleKind::PipeDreamVerticalSync
        | ScheduleKind::PipeDream2Bw => one_forward_one_backward(config, after),
        ScheduleKind::Interleaved => {
            one_forward_one_backward(config, 2 * after + (chunks - 1) * stages)
        }
        ScheduleKind::ZbH1 => split_backward(one_forward_one_backward(config, after), rank),
    }
}

/// `warm_up` forwards, then forwards and backwards alternately, then the remaining backwards.
fn one_forward_one_backward(config: &PipelineConfig, warm_up: usize) -> Vec<Instruction> {
    let passes = config.microbatches * config.chunks;
    let warm_up = warm_up.min(passes);
    let forward = |pass: usize| {
        let (microbatch, chunk) = pass_of(config, pass);
        Instruction::Forward { microbatch, chunk }
    };
    let backward = |pass: usize| {
        let (microbatch, chunk) = pass_of(config, pass);
        Instruction::Backward { microbatch, chunk: config.chunks - 1 - chunk }
    };
    let mut list: Vec<Instruction> = (0..warm_up).map(forward).collect();
    for pass in 0..passes {
        if warm_up + pass < passes {
            list.push(forward(warm_up + pass));
        }
        list.push(backward(pass));
    }
    list
}

/// Micro-batch and chunk of a rank's n-th forward: a group with one micro-batch per rank passes through all chunks
/// before the next group starts. With one chunk, micro-batch n.
fn pass_of(config: &PipelineConfig, pass: usize) -> (usize, usize) {
    let PipelineConfig { stages, chunks, .. } = *config;
    let (group, within) = (pass / (stages * chunks), pass % (stages * chunks));
    (group * stages + within % stages, within / stages)
}

/// Splits each backward in two. A micro-batch's weight part follows the input part of the one that is `behind` later;
/// the last ones are at the end.
fn split_backward(list: Vec<Instruction>, behind: usize) -> Vec<Instruction> {
    let mut split = Vec::with_capacity(list.len() * 3 / 2);
    let mut deferred = VecDeque::new();
    for instruction in list {
        let Instruction::Backward { microbatch, chunk } = instruction else {
            split.push(instruction);
            continue;
        };
        split.push(Instruction::BackwardInput { microbatch, chunk });
        deferred.push_back(Instruction::BackwardWeight { microbatch, chunk });
        if deferred.len() > behind {
            split.extend(deferred.pop_front());
        }
    }
    split.extend(deferred);
    split
}

/// Inserts an update behind the last backward of each step, and the selections of weight versions.
fn with_updates(config: &PipelineConfig, rank: usize, list: Vec<Instruction>) -> Vec<Instruction> {
    let PipelineConfig { kind, stages, microbatches, .. } = *config;
    let mut updated = Vec::with_capacity(2 * list.len());
    let mut selected = 0;
    for instruction in list {
        let Some((microbatch, _)) = instruction.microbatch_and_chunk() else { continue };
        let step = microbatch / microbatches;
        let version = kind.weights_version(stages, rank, step);
        if version != selected {
            updated.push(Instruction::UseWeights { version });
            selected = version;
        }
        let is_backward = matches!(instruction, Instruction::Backward { .. });
        updated.push(instruction);
        if is_backward && (microbatch + 1).is_multiple_of(microbatches) {
            updated.push(Instruction::Update { step });
            selected = step + 1;
        }
    }
    updated
}
