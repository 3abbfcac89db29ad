//! `ferrotron memory`.

use clap::{Args, FromArgMatches};
use ferrotron::models::bert::Bert;
use ferrotron::models::checkpoint::Checkpoint;
use ferrotron::models::gpt::Gpt;
use ferrotron::models::memory::StageMemory;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::{Error, Result};
use serde_json::json;
use std::process::ExitCode;

use crate::cli::architecture::TrainedModel;
use crate::cli::args::model::Architecture;
use crate::cli::args::train::TrainArgs;
use crate::cli::definition::Definition;
use crate::cli::options::imported::Imported;
use crate::cli::options::merged::MergedOptions;
use crate::cli::options::{Options, other_optimizers};
use crate::cli::plan::plan;
use crate::cli::run_tokenizer::{known_vocab_size, open_tokenizer};
use crate::cli::{bytes, memory_limits, output, usage};

/// Tokens of the GPT-2 vocabulary, with which the presets were trained.
const PRESET_VOCAB: usize = 50_257;

#[derive(Debug, Args)]
pub struct MemoryArgs {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    train: TrainArgs,
}

/// Prints what each rank of every pipeline stage would take, with the options `given` over those of `--load`.
pub fn memory(args: &MemoryArgs, given: Options, definition: &Definition) -> Result<ExitCode> {
    let merged = MergedOptions::new(&args.train, given, definition)?;
    let matches = merged.matches("memory", definition)?;
    let args = MemoryArgs::from_arg_matches(&matches)
        .map_err(|error| usage::refuse(&error, "ferrotron memory"))?;
    let report = match args.train.model.architecture {
        Architecture::Gpt2 | Architecture::Llama | Architecture::Gemma2 => report::<Gpt>,
        Architecture::Bert => report::<Bert>,
    };
    let checked = other_optimizers::check(&merged.options);
    checked
        .and_then(|()| report(&args, merged.resumed.as_ref(), merged.imported.as_ref()))
        .map_err(|error| merged.options.name_sources(error))
}

fn report<M: TrainedModel>(
    args: &MemoryArgs,
    resumed: Option<&Checkpoint>,
    imported: Option<&Imported>,
) -> Result<ExitCode> {
    let train = &args.train;
    train.device.place()?;
    let parallel = &train.parallel;
    let sizes = [
        parallel.ranks.tensor_model_parallel_size,
        parallel.ranks.context_parallel_size,
        parallel.ranks.pipeline_model_parallel_size,
    ];
    let smallest = sizes.iter().try_fold(1_usize, |ranks, &size| ranks.checked_mul(size));
    let world = parallel.ranks.nproc.or(smallest).unwrap_or(0);
    let vocab_size = vocab_size::<M>(train, resumed, imported)?;
    let plan = plan::<M>(train, world, parallel.ranks.nproc.unwrap_or(1), vocab_size)?;
    if let Some(imported) = imported {
        imported.check_config::<M>(&plan.model)?;
    }
    let stages = plan.stages()?;
    if args.json {
        let report = json!({
            "total_bytes": memory_limits::largest(&stages).memory.total_bytes,
            "ranks": world,
            "parameters": M::sizes(&plan.model).num_parameters,
            "stages": stages,
        });
        output::line(&report.to_string());
    } else {
        output::print(&table(&stages));
    }
    memory_limits::check_thought(train, &plan, &stages)?;
    Ok(ExitCode::SUCCESS)
}

/// The number of token ids of a run that is not started.
pub fn vocab_size<M: TrainedModel>(
    train: &TrainArgs,
    resumed: Option<&Checkpoint>,
    imported: Option<&Imported>,
) -> Result<usize> {
    let unsaid = train.data.is_built_in() && train.data.tokenizer == "char";
    match train.data.vocab_size {
        Some(0) => Err(Error::config("--vocab-size", "must be positive, got 0")),
        Some(size) => M::vocab_size(&Tokenizer::Null(size)),
        None if unsaid && resumed.is_none() && train.model.preset.is_some() => {
            Ok(train.model.preset()?.map_or(PRESET_VOCAB, |preset| preset.vocab_size))
        }
        None => match known_vocab_size::<M>(resumed, imported)? {
            Some(known) => Ok(known),
            None => M::vocab_size(&open_tokenizer(train, resumed, imported)?),
        },
    }
}

/// A line for each stage, in columns: snapshots only if there are any, and what waits in host memory is the last, where
/// anything does.
fn table(stages: &[StageMemory]) -> String {
    let snapshots = stages.iter().any(|stage| stage.memory.snapshot_bytes > 0);
    let shown = || {
        memory_limits::CATEGORIES.iter().filter(move |(name, _)| snapshots || *name != "snapshot")
    };
    let names = shown().map(|(name, _)| name.to_string());
    let offloads = stages.iter().any(|stage| stage.memory.host_bytes > 0);
    let header = ["stage", "layers", "ranks"].map(String::from).into_iter().chain(names);
    let row = |stage: &StageMemory| {
        let bytes = shown().map(|(_, of)| of(&stage.memory));
        let numbers = [stage.stage, stage.layers, stage.ranks].map(|number| number.to_string());
        let host = offloads.then_some(stage.memory.host_bytes);
        let bytes = bytes.chain([stage.memory.total_bytes]).chain(host);
        let cells = bytes.map(|bytes| bytes::display(bytes as u64));
        numbers.into_iter().chain(cells).collect::<Vec<String>>()
    };
    let last = ["total", "host"].map(String::from).into_iter().take(1 + usize::from(offloads));
    let lines = [header.chain(last).collect()].into_iter();
    let line = |cells: Vec<String>| {
        let (numbers, bytes) = cells.split_at(3);
        let numbers = numbers.iter().map(|cell| format!("{cell:>7}"));
        let cells = numbers.chain(bytes.iter().map(|cell| format!("{cell:>12}")));
        cells.collect::<String>() + "\n"
    };
    lines.chain(stages.iter().map(row)).map(line).collect()
}
