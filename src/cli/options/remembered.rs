//! The options that a checkpoint remembers, and those that a run that resumes from it takes.
//!
//! A checkpoint keeps `{"option": value, ..}` as `run` in its `config.json`; those of earlier versions keep the words
//! of a command line. A checkpoint decides what the run is, never which files this process writes.

use ferrotron::models::checkpoint::Checkpoint;
use ferrotron::models::gpt::{Gpt, Normalization};
use ferrotron::models::tokenizer::TokenizerChoice;
use ferrotron::models::trainer::Model;
use ferrotron::parallel::launch::RankEnvironment;
use ferrotron::parallel::pipeline::ScheduleKind;
use ferrotron::{DType, Error, Result};
use serde_json::{Map, Value};

use crate::cli::definition::Definition;
use crate::cli::options::{Options, Source, spellings};

/// Options of one start of a run, or of one process of it. A checkpoint neither remembers nor decides them, even if
/// they stand in it.
const NOT_REMEMBERED: &[&str] = &[
    "load",
    "pretrained-checkpoint",
    "save",
    "allow-data-change",
    "metrics",
    "trace",
    "trace-steps",
    "tensorboard-dir",
    "tensorboard-log-interval",
    "log-throughput",
    "log-straggler",
    "log-timers-to-tensorboard",
    "log-memory-to-tensorboard",
    "log-batch-size-to-tensorboard",
    "log-world-size-to-tensorboard",
    "log-validation-ppl-to-tensorboard",
    "log-samples-to-tensorboard",
    "no-log-loss-scale-to-tensorboard",
    "exit-interval",
    "exit-duration-in-mins",
    "exit-signal",
    "enable-cuda-graph",
    "autotune-gemm",
    "device",
    "memory-limit",
    "offload-folder",
    "rendezvous-port",
    "distributed-timeout-minutes",
    "distributed-backend",
    "transport",
    "rank-encryption",
];

/// Options that each rank may have its own values of.
pub const MAY_DIFFER: &[&str] = &[
    "device",
    "threads",
    "memory-limit",
    "offload-folder",
    "rendezvous-port",
    "distributed-timeout-minutes",
    "transport",
    "rank-encryption",
];

/// The options that shard the model over ranks.
const LAYOUT: &[&str] = &[
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "context-parallel-size",
    "sequence-parallel",
    "pipeline-schedule",
    "pipeline-drain-interval",
    "num-virtual-stages-per-pipeline-rank",
];

/// The options of [`LAYOUT`] that decide on the staleness of a pipeline's weights: a run keeps them in another layout.
const UNFLUSHED: &[&str] = &["pipeline-schedule", "pipeline-drain-interval"];

/// The options that mean nothing without `--async-data-parallel`.
const OF_ASYNC: &[&str] = &["max-staleness", "drain-interval"];

/// Options that decide one thing together: with one of them given, a resumed run forgets the others that the checkpoint
/// remembers.
const TOGETHER: &[&[&str]] = &[
    LAYOUT,
    // What is computed again in backward.
    &[
        "recompute-granularity",
        "recompute-method",
        "recompute-num-layers",
        "recompute-modules",
        "distribute-saved-activations",
    ],
    &["eval-tasks", "task-data"],
    // What waits outside of the device's memory, and in which form.
    &[
        "offload-optimizer-states",
        "cpu-offloading-num-layers",
        "saved-activations-dtype",
        "saved-activations-encoding",
    ],
];

/// Options that mean nothing in some precisions: a run that resumes in another precision forgets those that the
/// checkpoint remembers.
fn meaningless_in(dtype: DType) -> &'static [&'static str] {
    match dtype {
        DType::BF16 => &["saved-activations-dtype"],
        DType::F16 => &["grad-reduce-in-bf16", "saved-activations-dtype"],
        _ => &["grad-reduce-in-bf16", "no-master-weights", "stochastic-rounding", "keep-in-fp32"],
    }
}

/// Whether a resumed run may have an option otherwise than its checkpoint, in all of its ranks.
pub fn may_change(name: &str) -> bool {
    !NOT_REMEMBERED.contains(&name) && !MAY_DIFFER.contains(&name) && name != CONSUMED
}

/// The samples with which a run began; from then on its checkpoints count.
const CONSUMED: &str = "consumed-train-samples";

/// The tokenizer of a run that names none: the default of `--tokenizer`.
const DEFAULT_TOKENIZER: &str = "char";

/// Files that a run reads.
const INPUTS: &[&str] = &[
    "data",
    "data-path",
    "data-args-path",
    "train-data-path",
    "valid-data-path",
    "test-data-path",
    "per-split-data-args-path",
    "valid-data",
    "tokenizer",
    "task-data",
];

/// Options whose values are paths.
const PATHS: &[&str] = &[
    "data",
    "data-args-path",
    "per-split-data-args-path",
    "valid-data",
    "load",
    "pretrained-checkpoint",
    "save",
    "metrics",
    "trace",
    "tensorboard-dir",
];

/// Options whose values are paths and the weights of them.
const BLENDS: &[&str] = &["data-path", "train-data-path", "valid-data-path", "test-data-path"];

/// The options of a run that the next checkpoint remembers. Paths become absolute, so that the run resumes from any
/// folder.
pub fn of_options(options: &Options) -> Map<String, Value> {
    let remembered = options.iter().filter(|(name, _)| !NOT_REMEMBERED.contains(name));
    let absolute = |(name, value): (&str, &Value)| {
        let absolute = |value: &Value| value.as_str().map(|text| canonical(name, text).into());
        let value = match value {
            Value::Array(values) => {
                values.iter().map(|value| absolute(value).unwrap_or(value.clone())).collect()
            }
            value => absolute(value).unwrap_or(value.clone()),
        };
        (name.to_string(), value)
    };
    remembered.map(absolute).collect()
}

/// An option's value in the form in which equal ones are equal: paths are absolute. Links stay, since machines may
/// have their own targets of one.
pub fn canonical(name: &str, text: &str) -> String {
    if let Some((task, path)) = text.split_once('=').filter(|_| name == "task-data") {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
        return format!("{task}={}", path.display());
    }
    let tokenizer = || name == "tokenizer" && matches!(text.parse(), Ok(TokenizerChoice::File(_)));
    let in_blend = || BLENDS.contains(&name) && text.parse::<f64>().is_err();
    if !PATHS.contains(&name) && !in_blend() && !tokenizer() {
        return text.to_string();
    }
    let absolute = std::path::absolute(text);
    absolute.map_or(text.to_string(), |path| path.to_string_lossy().into_owned())
}

fn source_name(checkpoint: &Checkpoint) -> String {
    format!("the checkpoint {checkpoint}")
}

/// The options that a checkpoint remembers, and the names of those in it that it may not decide.
///
/// # Errors
/// An option that this program does not have.
pub fn of_checkpoint(
    checkpoint: &Checkpoint,
    definition: &Definition,
) -> Result<(Options, Vec<String>)> {
    let train = definition.subcommand("train");
    let source = Source::Checkpoint(source_name(checkpoint));
    let mut options = match spellings::of_earlier_checkpoints(checkpoint.run()) {
        Value::Object(map) => Options::from_map(&train, map, &source)?,
        Value::Array(words) => {
            let words = words.iter().filter_map(Value::as_str).map(Into::into);
            let matches = definition.words_of("train", words).map_err(|why| source.refuse(why))?;
            Options::from_matches(&train, &matches, &source)?
        }
        _ => Options::default(),
    };
    let ignored = options.remove(NOT_REMEMBERED);
    Ok((options, ignored))
}

/// The options of a run that resumes from `checkpoint`: those `given`, which were typed or stand in a file, over what
/// the checkpoint remembers.
///
/// How many ranks there were does not matter to `rank`, which a launcher has started.
///
/// # Errors
/// Those of [`of_checkpoint`]; another tokenizer than the run's.
pub fn resumed(
    mut given: Options,
    checkpoint: &Checkpoint,
    rank: Option<&RankEnvironment>,
    definition: &Definition,
) -> Result<Options> {
    let (mut saved, _) = of_checkpoint(checkpoint, definition)?;
    // The width that follows from --swiglu was another one in earlier versions.
    let is_swiglu = saved.get("swiglu") == Some(&Value::Bool(true));
    if is_swiglu && !saved.contains("ffn-hidden-size") && !given.contains("hidden-size") {
        let width = Gpt::config_from(checkpoint)?.ffn_hidden_size;
        saved.insert("ffn-hidden-size", width.into(), &Source::Checkpoint(source_name(checkpoint)));
    }
    // In earlier versions --disable-bias-linear took the biases of LayerNorms, too.
    let is = |name| saved.get(name) == Some(&Value::Bool(true));
    if is("disable-bias-linear") && !saved.contains("disable-bias-norm") {
        let config = Gpt::config_from(checkpoint)?;
        if config.normalization == Normalization::LayerNorm && !config.norm_bias() {
            let source = Source::Checkpoint(source_name(checkpoint));
            saved.insert("disable-bias-norm", true.into(), &source);
        }
    }
    let tokenizer = |options: &Options| {
        let word = options.values("tokenizer").pop();
        canonical("tokenizer", word.as_deref().unwrap_or(DEFAULT_TOKENIZER))
    };
    if given.contains("tokenizer") && tokenizer(&given) != tokenizer(&saved) {
        let message = "a run keeps the tokenizer that it was started with";
        return Err(given.name_sources(Error::config("--tokenizer", message)));
    }
    check_consumed(&given, &saved, checkpoint).map_err(|error| given.name_sources(error))?;
    given.remove(&[CONSUMED]);
    if rank.is_some_and(|rank| saved.values("nproc") != [rank.world_size.to_string()]) {
        saved.remove(&["nproc"]);
    }
    if given.get("async-data-parallel") == Some(&Value::Bool(false)) {
        saved.remove(OF_ASYNC);
    }
    // A run does not lose the staleness of its weights unless another schedule is named.
    let named = given.contains("pipeline-schedule") && flushes(&given);
    let keeps = !flushes(&saved) && !named;
    let forgotten = |names: &[&'static str]| -> Vec<&'static str> {
        names.iter().copied().filter(|name| !(keeps && UNFLUSHED.contains(name))).collect()
    };
    if given.values("nproc") == ["1"] {
        saved.remove(&forgotten(LAYOUT));
    }
    for names in TOGETHER {
        if given.states_any(names) {
            saved.remove(&forgotten(names));
        }
    }
    let before = dtype(&saved);
    let mut options = given.clone().over(saved);
    let now = dtype(&options);
    if now != before {
        let meaningless: Vec<&str> =
            meaningless_in(now).iter().copied().filter(|name| !given.contains(name)).collect();
        options.remove(&meaningless);
    }
    Ok(options)
}

/// Whether the pipeline of a run is flushed between steps.
fn flushes(options: &Options) -> bool {
    let named = options.values("pipeline-schedule").pop();
    let kind = named.and_then(|name| name.parse::<ScheduleKind>().ok());
    kind.is_none_or(ScheduleKind::flushes)
}

/// Errors if the samples `given` as consumed are neither those with which the run began nor those of its checkpoint, which
/// counts them.
fn check_consumed(given: &Options, saved: &Options, checkpoint: &Checkpoint) -> Result<()> {
    let Some(samples) = given.values(CONSUMED).pop() else { return Ok(()) };
    let consumed = checkpoint.progress().consumed_samples.to_string();
    let began_with = saved.values(CONSUMED).pop();
    if samples == consumed || Some(&samples) == began_with.as_ref() {
        return Ok(());
    }
    let message = format!(
        "{samples} samples, but {checkpoint} has consumed {consumed} itself, from {} on: leave it out to resume there",
        began_with.unwrap_or("0".to_string())
    );
    Err(Error::config("--consumed-train-samples", message))
}

/// The precision that options name.
pub fn dtype(options: &Options) -> DType {
    let is_on = |name| options.get(name) == Some(&Value::Bool(true));
    match (is_on("bf16"), is_on("fp16")) {
        (true, _) => DType::BF16,
        (_, true) => DType::F16,
        _ => {
            let name = options.values("dtype").pop();
            name.and_then(|name| name.parse().ok()).unwrap_or(DType::F32)
        }
    }
}

/// The line that names the options of `checkpoint` that a resumed run does not take from it.
pub fn ignored_line(checkpoint: &Checkpoint, definition: &Definition) -> Result<Option<String>> {
    let (_, ignored) = of_checkpoint(checkpoint, definition)?;
    let names = ignored.iter().map(|name| format!("--{name}")).collect::<Vec<_>>().join(", ");
    Ok((!ignored.is_empty()).then(|| {
        format!("ignored: {names} of the checkpoint {checkpoint}, which does not decide this")
    }))
}

/// A number in the one way in which equal ones are written, and any other text as it is.
pub fn same_number(text: &str) -> String {
    match (text.parse::<u64>(), text.parse::<f64>()) {
        (Ok(integer), _) => integer.to_string(),
        (_, Ok(real)) => real.to_string(),
        _ => text.to_string(),
    }
}

/// The line that names the files that a resumed run reads since its checkpoint says so.
pub fn inputs_line(options: &Options) -> Option<String> {
    let inputs = options.remembered_words(INPUTS);
    (!inputs.is_empty()).then(|| format!("as the checkpoint remembers: {}", inputs.join(" ")))
}
