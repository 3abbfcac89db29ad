//! The lines that `train` prints before the first step.

use ferrotron::models::data::Dataset;
use ferrotron::models::memory::StageMemory;
use ferrotron::models::run::{RunConfig, RunResult, StopReason};
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::models::traffic::StepTraffic;
use ferrotron::models::trainer::Trainer;
use ferrotron::nn::Axis;
use ferrotron::tensor::gemm::{InstructionSets, instruction_sets};
use ferrotron::{DType, Device, Result};

use super::architecture::TrainedModel;
use super::args::device::DeviceChoice;
use super::args::train::TrainArgs;
use super::configuration::Configuration;
use super::options::remembered;
use super::{bytes, memory_limits, output};

/// Prints what is about to be trained, on what and where.
pub fn before<M: TrainedModel>(
    configuration: &Configuration,
    trainer: &Trainer<M>,
    dataset: &Dataset,
    tokenizer: &Tokenizer,
    stages: &[StageMemory],
    config: &RunConfig,
) -> Result<()> {
    let load = configuration.args.run.load.as_ref();
    if let Some(load) = load.filter(|_| config.loaded.is_none() && configuration.imported.is_none())
    {
        output::note(&format!("nothing is saved in '{}' yet: starting at step 0", load.display()));
    }
    configuration.notes.iter().for_each(|line| output::note(line));
    if let Some(line) = remembered::inputs_line(&configuration.options) {
        output::note(&line);
    }
    output::note(&format!(
        "{:.2} M parameters, {} training tokens, {} tokenizer of {}, {}, {}",
        M::sizes(trainer.model()).num_parameters as f64 / 1e6,
        dataset.train.len(),
        tokenizer.name(),
        tokenizer.vocab_size(),
        place(&configuration.args, trainer.scope().device())?,
        config.folder.display()
    ));
    let frozen: usize = trainer.buffers().frozen().iter().map(|param| param.leaf().numel()).sum();
    if frozen > 0 {
        let trained = trainer.buffers().numel();
        output::note(&format!("rank 0 trains {trained} parameters; {frozen} are frozen"));
    }
    if let Some(lines) = layout_lines(trainer, config.seq_length)? {
        output::note(&lines);
    }
    let memory = memory_limits::largest(stages).memory;
    let host = match memory.host_bytes {
        0 => String::new(),
        bytes => format!(", and {} of host memory", bytes::display(bytes as u64)),
    };
    let sentence = memory_limits::sentence(&memory);
    output::note(&format!("memory of a rank: at most {sentence}{host}"));
    let scope = trainer.scope();
    if let Some(line) = refused_instructions(instruction_sets(), scope.dtype(), scope.device()) {
        output::note(&line);
    }
    Ok(())
}

/// Prints why a run ended before its last step, and how it goes on.
pub fn stopped(outcome: &RunResult, step: u64, config: &RunConfig) {
    let why = match outcome.stop_reason {
        StopReason::Finished => return,
        StopReason::ExitInterval => "by --exit-interval",
        StopReason::Deadline => "by --exit-duration-in-mins",
        StopReason::Stopped => "by a signal",
    };
    let (all, folder) = (config.intervals.train_iters, config.folder.display());
    output::note(&format!(
        "stopped {why} at step {step} of {all}; ferrotron train --load {folder} goes on"
    ));
}

/// Says why products of a run in bf16 on a CPU are slower than its processor could compute them.
fn refused_instructions(sets: InstructionSets, dtype: DType, device: &Device) -> Option<String> {
    sets.refusal.filter(|_| dtype == DType::BF16 && !device.is_gpu())
}

/// Describes the device of the run.
fn place(args: &TrainArgs, device: &Device) -> Result<String> {
    Ok(match (args.device.place()?, device.threads()) {
        (DeviceChoice::Cpu, 1) => "1 thread".to_string(),
        (DeviceChoice::Cpu, threads) => format!("{threads} threads"),
        (DeviceChoice::Gpus | DeviceChoice::Gpu(_), _) => format!("{device:?}"),
    })
}

/// Describes the layout of several ranks, and the bytes that they will send.
fn layout_lines<M: TrainedModel>(
    trainer: &Trainer<M>,
    seq_length: usize,
) -> Result<Option<String>> {
    let layout = trainer.mesh().layout();
    if layout.world() == 1 {
        return Ok(None);
    }
    let [tp, cp, dp, pp] = Axis::ALL.map(|axis| layout.size(axis));
    let parallel = &trainer.config().parallel;
    let chunks = match parallel.chunks {
        1 => String::new(),
        chunks => format!(", {chunks} chunks"),
    };
    let microbatches =
        trainer.config().batch_size.microbatches(trainer.progress().consumed_samples);
    let frozen = !trainer.buffers().frozen().is_empty();
    let every = parallel.data_parallel.synchronize_every;
    let sent = M::traffic(trainer, seq_length)?.map(|traffic| sent(traffic, frozen, every));
    let sent = sent.map_or(String::new(), |sent| format!("\nrank 0 sends {sent}"));
    Ok(Some(format!(
        "{} ranks: tensor {tp} x context {cp} x data {dp} x pipeline {pp} ({}{chunks}), ZeRO {}, \
         {microbatches} x {} samples a step on each data-parallel rank{sent}",
        layout.world(),
        parallel.pipeline_schedule,
        parallel.data_parallel.sharding as usize,
        trainer.config().batch_size.micro_batch_size(),
    )))
}

/// Says in words how much a rank sends in a step; replicas that take steps of their own are averaged every so many.
fn sent(traffic: StepTraffic, frozen: bool, synchronize_every: usize) -> String {
    let StepTraffic { tensor, context, pipeline, data, optimizer, average } = traffic;
    let parts = [
        (tensor, "of activations of shared layers"),
        (context, "of keys and values"),
        (pipeline, "between stages"),
        (data, "of gradients and weights"),
        (optimizer, "of the optimizer's exchanges"),
    ];
    let sent: Vec<String> = parts
        .iter()
        .filter(|(bytes, _)| *bytes > 0)
        .map(|(bytes, what)| format!("{} {what}", bytes::display(*bytes)))
        .collect();
    // In front of frozen parameters backward sends nothing.
    let most = if frozen { "at most " } else { "" };
    let mut sent = match (sent.is_empty(), average) {
        (false, _) => format!("in a step: {most}{}", sent.join(", ")),
        (true, 0) => "in a step: nothing but numbers".to_string(),
        (true, _) => String::new(),
    };
    if average > 0 {
        let and = if sent.is_empty() { "" } else { "; " };
        let weights = bytes::display(average);
        sent += &format!("{and}every {synchronize_every} steps: {weights} of weights");
    }
    sent
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_in_bf16_says_that_amx_is_refused() -> Result<()> {
        let refusal = Some("this processor has AMX, but".to_string());
        let sets =
            InstructionSets { f32: "AVX-512", bf16: "AVX512-BF16", refusal: refusal.clone() };
        let device = Device::cpu(1)?;
        assert_eq!(refused_instructions(sets.clone(), DType::BF16, &device), refusal);
        assert_eq!(refused_instructions(sets.clone(), DType::F32, &device), None);
        let granted = InstructionSets { refusal: None, ..sets };
        assert_eq!(refused_instructions(granted, DType::BF16, &device), None);
        Ok(())
    }
}
