//! Options and values as Megatron-LM, PyTorch and torchrun spell them, replaced by this program's own.
//!
//! An option that differs in its name alone is a hidden alias of its definition. Those that need more are the hidden
//! [`SpellingArgs`]: they stand until [`replace`] has turned them into others, in each source by itself, so that no
//! command, no comparison of ranks and no checkpoint sees them.

use clap::{Args, Command};
use ferrotron::Result;
use serde_json::{Map, Value};

use crate::cli::options::{Options, Source};

/// The file that `--profile`, which names none, writes.
const PROFILE: &str = "trace.json";

/// Values of `--data-parallel-sharding-strategy`, each at its ZeRO stage.
const STRATEGIES: [&str; 4] = ["no_shard", "optim", "optim_grads", "optim_grads_params"];

/// Values of an option, and what this program calls them.
const VALUES: &[(&str, &str, &str)] = &[
    ("dtype", "fp32", "f32"),
    ("dtype", "fp64", "f64"),
    ("dtype", "fp16", "f16"),
    ("pipeline-schedule", "interleaved1f1b", "interleaved"),
    ("position-embedding-type", "learned_absolute", "learned-absolute"),
    ("task", "RACE", "race"),
];

/// Options of others that this program states in another way.
#[derive(Debug, Clone, Args)]
pub struct SpellingArgs {
    /// Megatron-LM: --zero-stage 1
    #[arg(long, hide = true)]
    use_distributed_optimizer: bool,
    /// Megatron-LM: --zero-stage
    #[arg(long, hide = true, value_name = "STRATEGY")]
    data_parallel_sharding_strategy: Option<String>,
    /// Megatron-LM: what this program always does
    #[arg(long, hide = true)]
    exit_signal_handler: bool,
    /// Megatron-LM: --num-query-groups, which must be given
    #[arg(long, hide = true)]
    group_query_attention: bool,
    /// Megatron-LM: --enable-cuda-graph
    #[arg(long, hide = true, value_name = "HOW")]
    cuda_graph_impl: Option<String>,
    /// Megatron-LM: --trace trace.json
    #[arg(long, hide = true)]
    profile: bool,
    /// Megatron-LM: steps before the first one that is traced
    #[arg(long, hide = true, value_name = "N")]
    profile_step_start: Option<u64>,
    /// Megatron-LM: the last step that is traced
    #[arg(long, hide = true, value_name = "N")]
    profile_step_end: Option<u64>,
    /// Megatron-LM: ranks to trace; a trace has all
    #[arg(long, hide = true, value_name = "RANK", num_args = 1..)]
    profile_ranks: Vec<usize>,
    /// torchrun: --rendezvous-port
    #[arg(long, hide = true, value_name = "HOST:PORT")]
    rdzv_endpoint: Option<String>,
}

/// Replaces in the options of one source what this program spells in another way. An option of the command's own that
/// has such a name, as `bench --profile`, stays.
///
/// # Errors
/// A value without a counterpart; two options that contradict each other.
pub fn replace(options: &mut Options, definition: &Command, source: &Source) -> Result<()> {
    replace_values(options);
    let shown: Vec<&str> = (definition.get_arguments().filter(|arg| !arg.is_hide_set()))
        .filter_map(|arg| arg.get_long())
        .collect();
    let mut take = |name: &str| -> Option<String> {
        if shown.contains(&name) {
            return None;
        }
        let value = options.values(name).pop();
        options.remove(&[name]);
        value
    };
    let is_on = |value: Option<String>| value.as_deref() == Some("true");
    let distributed = is_on(take("use-distributed-optimizer"));
    let strategy = take("data-parallel-sharding-strategy");
    let grouped = is_on(take("group-query-attention"));
    let graph = take("cuda-graph-impl");
    take("exit-signal-handler");
    let profile = is_on(take("profile"));
    let [start, end, _, endpoint] =
        ["profile-step-start", "profile-step-end", "profile-ranks", "rdzv-endpoint"].map(take);

    if let Some(strategy) = strategy {
        let Some(stage) = STRATEGIES.iter().position(|name| *name == strategy) else {
            let names = STRATEGIES.join(", ");
            let why = format!("--data-parallel-sharding-strategy {strategy} is none of {names}");
            return Err(source.refuse(why));
        };
        let stage = stage.to_string();
        set(options, source, "--data-parallel-sharding-strategy", "zero-stage", &stage)?;
    } else if distributed && options.values("zero-stage").first().is_none_or(|stage| stage == "0") {
        set(options, source, "--use-distributed-optimizer", "zero-stage", "1")?;
    }
    if grouped && !options.contains("num-query-groups") {
        return Err(source.refuse("--group-query-attention needs --num-query-groups"));
    }
    match graph.as_deref() {
        None | Some("none") => {}
        Some("full_iteration") => options.insert("enable-cuda-graph", Value::Bool(true), source),
        Some(other) => {
            let why = format!(
                "--cuda-graph-impl {other} is not there: use full_iteration, or --enable-cuda-graph"
            );
            return Err(source.refuse(why));
        }
    }
    if profile {
        // There a step has the number of those before it, and the last one is left out.
        let number = |text: Option<String>, default: u64| match text {
            Some(text) => text.parse::<u64>().unwrap_or(default),
            None => default,
        };
        let (first, last) = (number(start, 10).saturating_add(1), number(end, 12));
        if !options.contains("trace") {
            options.insert("trace", PROFILE.into(), source);
        }
        set(options, source, "--profile", "trace-steps", &format!("{first}-{last}"))?;
    }
    if let Some(endpoint) = endpoint {
        let port = match endpoint.rsplit_once(':') {
            Some(("localhost" | "127.0.0.1" | "[::1]" | "", port)) => port,
            _ => {
                let why = format!(
                    "--rdzv-endpoint {endpoint} must be localhost:PORT: ranks of several machines are started by \
                     torchrun, srun or mpirun"
                );
                return Err(source.refuse(why));
            }
        };
        set(options, source, "--rdzv-endpoint", "rendezvous-port", port)?;
    }
    Ok(())
}

/// Sets an option that `from` asks for.
///
/// # Errors
/// Another value of it in the same source.
fn set(options: &mut Options, source: &Source, from: &str, name: &str, value: &str) -> Result<()> {
    match options.values(name).first() {
        Some(other) if other != value => {
            let why = format!("{from} asks for --{name} {value}, but --{name} {other} is given");
            Err(source.refuse(why))
        }
        _ => {
            options.insert(name, value.into(), source);
            Ok(())
        }
    }
}

fn replace_values(options: &mut Options) {
    let schedule = "pipeline-schedule";
    if let Some(name) = options.values(schedule).first().map(|name| name.to_ascii_lowercase()) {
        options.set_value(schedule, name.into());
    }
    for (name, theirs, ours) in VALUES {
        if options.values(name) == [*theirs] {
            options.set_value(name, (*ours).into());
        }
    }
    // A bad value is refused where it is parsed.
    let pair = options.values("window-size").pop().filter(|text| text.contains(','));
    if let Some(Ok(keys)) = pair.map(|pair| window_size(&pair)) {
        options.set_value("window-size", keys.to_string().into());
    }
}

/// The value of `--window-size`: the keys that a query sees; or Megatron-LM's pair of those before it and those behind it,
/// which are none, perhaps in parentheses.
pub fn window_size(text: &str) -> std::result::Result<usize, String> {
    let words = text.trim().trim_start_matches('(').trim_end_matches(')');
    let Some((before, behind)) = words.split_once(',') else {
        return text.parse().map_err(|_| "is no number of keys, as 4096".to_string());
    };
    match (before.trim().parse::<i64>(), behind.trim().parse::<i64>()) {
        (Ok(-1), Ok(0 | -1)) => Err("asks for no window: leave the option out".to_string()),
        (Ok(before), Ok(0)) if before >= 0 => Ok(before as usize + 1),
        (Ok(before), Ok(_)) if before >= 0 => {
            Err("must be A,0: a query sees no keys behind it".to_string())
        }
        _ => Err("is no pair A,0 of the keys before a query and behind it".to_string()),
    }
}

/// The options `run` of a checkpoint in today's spelling: `--split` was the share for validation, a single number.
pub fn of_earlier_checkpoints(run: &Value) -> Value {
    match run {
        Value::Object(map) => {
            let renamed = map.iter().map(|(name, value)| match name.as_str() {
                "split" if !value.is_array() => ("valid-fraction".to_string(), value.clone()),
                _ => (name.clone(), value.clone()),
            });
            Value::Object(renamed.collect::<Map<_, _>>())
        }
        Value::Array(words) => {
            let renamed = words.iter().map(|word| match word.as_str() {
                Some("--split") => "--valid-fraction".into(),
                Some(text) => match text.strip_prefix("--split=") {
                    Some(share) => format!("--valid-fraction={share}").into(),
                    None => word.clone(),
                },
                None => word.clone(),
            });
            Value::Array(renamed.collect())
        }
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn words(value: Value) -> Result<String> {
        let map = value.as_object().unwrap().clone();
        let definition = crate::cli::definition::Definition::new(
            <crate::cli::Cli as clap::CommandFactory>::command(),
        )
        .subcommand("train");
        let options = Options::from_map(&definition, map, &Source::File("run.toml".into()))?;
        let words = options.words();
        Ok(words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn each_spelling_becomes_the_option_of_this_program() {
        for (theirs, ours) in [
            (json!({ "data_path": ["3", "a"] }), "--data-path 3 a"),
            (json!({ "most-recent-k": 3 }), "--save-retain=3"),
            (json!({ "nproc-per-node": 4 }), "--nproc=4"),
            (json!({ "use-distributed-optimizer": true }), "--zero-stage=1"),
            (json!({ "use-distributed-optimizer": false }), ""),
            (json!({ "use-distributed-optimizer": true, "zero-stage": 2 }), "--zero-stage=2"),
            (json!({ "data-parallel-sharding-strategy": "optim_grads_params" }), "--zero-stage=3"),
            (json!({ "data-parallel-sharding-strategy": "no_shard" }), "--zero-stage=0"),
            (
                json!({ "group-query-attention": true, "num-query-groups": 2 }),
                "--num-query-groups=2",
            ),
            (json!({ "cuda-graph-impl": "full_iteration" }), "--enable-cuda-graph"),
            (json!({ "cuda-graph-impl": "none" }), ""),
            (
                json!({ "exit-signal-handler": true, "exit-signal": "SIGTERM" }),
                "--exit-signal=SIGTERM",
            ),
            (json!({ "profile": true }), "--trace=trace.json --trace-steps=11-12"),
            (
                json!({ "profile": true, "profile-step-start": 2, "profile-step-end": 5,
                        "profile-ranks": [0, 1], "trace": "t" }),
                "--trace=t --trace-steps=3-5",
            ),
            (json!({ "profile-step-start": 2 }), ""),
            (json!({ "rdzv-endpoint": "localhost:29400" }), "--rendezvous-port=29400"),
            (json!({ "task": "RACE", "train-data": ["a"] }), "--data a --task=race"),
            (json!({ "window-size": "4095,0" }), "--window-size=4096"),
            (json!({ "window-size": "(0, 0)" }), "--window-size=1"),
            (json!({ "window-size": 7 }), "--window-size=7"),
            (json!({ "dtype": "fp32" }), "--dtype=f32"),
            (json!({ "dtype": "fp16" }), "--dtype=f16"),
            (json!({ "pipeline-schedule": "Interleaved1F1B" }), "--pipeline-schedule=interleaved"),
            (json!({ "pipeline-schedule": "GPipe" }), "--pipeline-schedule=gpipe"),
            (json!({ "pipeline-schedule": "ZB-H1" }), "--pipeline-schedule=zb-h1"),
            (
                json!({ "position-embedding-type": "learned_absolute" }),
                "--position-embedding-type=learned-absolute",
            ),
        ] {
            assert_eq!(words(theirs.clone()).unwrap(), ours, "{theirs}");
        }
    }

    #[test]
    fn what_contradicts_or_has_no_counterpart_is_refused() {
        for (theirs, part) in [
            (
                json!({ "most-recent-k": 2, "save-retain": 1 }),
                "'save-retain' states --save-retain once more",
            ),
            (
                json!({ "use-distributed-optimizer": true, "zero-stage": 0 }),
                "--use-distributed-optimizer asks for --zero-stage 1, but --zero-stage 0 is given",
            ),
            (json!({ "data-parallel-sharding-strategy": "all" }), "all is none of no_shard, optim"),
            (json!({ "group-query-attention": true }), "needs --num-query-groups"),
            (json!({ "cuda-graph-impl": "local" }), "use full_iteration"),
            (
                json!({ "step-batch-size-schedule": "0:768 250B:1536" }),
                "no option --step-batch-size-schedule: --rampup-batch-size START",
            ),
            (json!({ "optimizer-cpu-offload": true }), "--offload-optimizer-states keeps"),
            (
                json!({ "override_opt_param_scheduler": true }),
                "no option --override-opt-param-scheduler: options that are given go before",
            ),
            (json!({ "rdzv-endpoint": "node1:29400" }), "must be localhost:PORT"),
            (json!({ "rdzv-endpoint": "node1" }), "must be localhost:PORT"),
        ] {
            let error = words(theirs.clone()).unwrap_err().to_string();
            assert!(error.contains(part), "{theirs}: {error}");
        }
    }

    #[test]
    fn a_split_of_an_earlier_checkpoint_is_a_fraction() {
        for (before, after) in [
            (json!({ "split": "0.2", "lr": 1 }), json!({ "valid-fraction": "0.2", "lr": 1 })),
            (json!({ "split": ["90", "5", "5"] }), json!({ "split": ["90", "5", "5"] })),
            (json!(["--split=0.2", "--bf16"]), json!(["--valid-fraction=0.2", "--bf16"])),
            (json!(["--split", "0.2"]), json!(["--valid-fraction", "0.2"])),
            (Value::Null, Value::Null),
        ] {
            assert_eq!(of_earlier_checkpoints(&before), after);
        }
    }
}
