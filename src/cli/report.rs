//! The lines that `train` prints before the first step and after the last.

use ferrotron::models::data::Dataset;
use ferrotron::models::entropy::bigram_entropy;
use ferrotron::models::evaluate::Evaluation;
use ferrotron::models::gpt::Gpt;
use ferrotron::models::memory::StageMemory;
use ferrotron::models::run::{RunConfig, RunResult, StopReason};
use ferrotron::models::stop::StopFlag;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::models::traffic::{StepTraffic, expected_traffic};
use ferrotron::models::trainer::Trainer;
use ferrotron::nn::{Axis, Sharding};
use ferrotron::tensor::gemm::instruction_sets;
use ferrotron::{DType, Device, Result};

use super::args::device::DeviceChoice;
use super::args::train::TrainArgs;
use super::commands::generate::sample;
use super::configuration::Configuration;
use super::options::remembered;
use super::{bytes, memory_limits, output};

/// Evaluations of more tokens than this are not searched for their bigrams, which takes memory and
/// time of its own.
const BIGRAM_TOKENS: u64 = 10_000_000;

/// Prints what is about to be trained, on what and where.
pub fn before(
    configuration: &Configuration,
    trainer: &Trainer<Gpt>,
    dataset: &Dataset,
    tokenizer: &Tokenizer,
    stages: &[StageMemory],
    config: &RunConfig,
) -> Result<()> {
    configuration.notes.iter().for_each(|line| output::note(line));
    if let Some(line) = remembered::inputs_line(&configuration.options) {
        output::note(&line);
    }
    output::note(&format!(
        "{:.2} M parameters, {} training tokens, {} tokenizer of {}, {}, {}",
        trainer.model().num_parameters() as f64 / 1e6,
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
    if let Some(lines) = layout_lines(trainer, config.seq_length) {
        output::note(&lines);
    }
    let memory = memory_limits::largest(stages).memory;
    let host = match memory.host_bytes {
        0 => String::new(),
        bytes => format!(", and {} of host memory", bytes::display(bytes as u64)),
    };
    let sentence = memory_limits::sentence(&memory);
    output::note(&format!("memory of a rank: at most {sentence}{host}"));
    let in_bf16_on_cpu =
        trainer.scope().dtype() == DType::BF16 && !trainer.scope().device().is_gpu();
    if let Some(refusal) = instruction_sets().refusal.filter(|_| in_bf16_on_cpu) {
        output::note(&refusal);
    }
    Ok(())
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
fn layout_lines(trainer: &Trainer<Gpt>, seq_length: usize) -> Option<String> {
    let layout = trainer.mesh().layout();
    let [tp, cp, dp, pp] = Axis::ALL.map(|axis| layout.size(axis));
    let parallel = &trainer.config().parallel;
    let chunks = match parallel.chunks {
        1 => String::new(),
        chunks => format!(", {chunks} chunks"),
    };
    let microbatches =
        trainer.config().batch_size.microbatches(trainer.progress().consumed_samples);
    (layout.world() > 1).then(|| {
        let StepTraffic { tensor, context, pipeline, data, optimizer, average } =
            expected_traffic(trainer, seq_length);
        let parts = [
            (tensor, "of activations of shared layers"),
            (context, "of keys and values"),
            (pipeline, "between stages"),
            (data, "of gradients and weights"),
            (optimizer, "of the optimizer's sums"),
        ];
        let sent: Vec<String> = parts
            .iter()
            .filter(|(bytes, _)| *bytes > 0)
            .map(|(bytes, what)| format!("{} {what}", bytes::display(*bytes)))
            .collect();
        // In front of frozen parameters backward sends nothing.
        let most = if trainer.buffers().frozen().is_empty() { "" } else { "at most " };
        let mut sent = match (sent.is_empty(), average) {
            (false, _) => format!("in a step: {most}{}", sent.join(", ")),
            (true, 0) => "in a step: nothing but numbers".to_string(),
            (true, _) => String::new(),
        };
        if average > 0 {
            let every = parallel.data_parallel.synchronize_every;
            let and = if sent.is_empty() { "" } else { "; " };
            sent += &format!("{and}every {every} steps: {} of weights", bytes::display(average));
        }
        format!(
            "{} ranks: tensor {tp} x context {cp} x data {dp} x pipeline {pp} ({}{chunks}), ZeRO {}, \
             {microbatches} x {} samples a step on each data-parallel rank\n\
             rank 0 sends {sent}",
            layout.world(),
            parallel.pipeline_schedule,
            parallel.data_parallel.sharding as usize,
            trainer.config().batch_size.micro_batch_size(),
        )
    })
}

/// Prints the results.
pub fn after(
    args: &TrainArgs,
    trainer: &Trainer<Gpt>,
    dataset: &Dataset,
    tokenizer: &Tokenizer,
    outcome: &RunResult,
    stop: &StopFlag,
) -> Result<()> {
    if let (Some(evaluation), Some(source)) = (&outcome.evaluation, &dataset.validation) {
        let Evaluation { loss, tokens, .. } = *evaluation;
        output::report(&if tokens < BIGRAM_TOKENS && !stop.is_set() {
            // Those that were evaluated, and the one before them.
            let bigrams = bigram_entropy(&source.slice(0..tokens + 1)?.to_vec()?);
            format!("validation loss {loss:.4} (bigrams of the same {tokens} tokens: {bigrams:.4})")
        } else {
            format!("validation loss {loss:.4} over {tokens} tokens")
        });
    }
    if outcome.stop_reason == StopReason::Finished && args.run.sample_length > 0 && !stop.is_set() {
        if one_rank_has_all(trainer) {
            let text = sample(&trainer.parts()[0], tokenizer, args.run.sample_length, stop)?;
            text.iter().for_each(|text| output::report(&format!("sample: {text}")));
        } else {
            output::report("no sample: no rank has the whole model");
        }
    }
    let checkpoint = outcome.checkpoint.display();
    output::report(&format!(
        "continue a text: ferrotron generate --load {checkpoint} --prompt TEXT"
    ));
    Ok(())
}

/// Whether this rank can run the model without others.
fn one_rank_has_all(trainer: &Trainer<Gpt>) -> bool {
    let layout = trainer.mesh().layout();
    let sharded = trainer.config().parallel.data_parallel.sharding == Sharding::Weights;
    layout.size(Axis::Data) == layout.world() && !(sharded && layout.world() > 1)
}
