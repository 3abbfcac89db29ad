//! `ferrotron simulate`.

use clap::{Args, FromArgMatches};
use ferrotron::models::bert::Bert;
use ferrotron::models::gpt::Gpt;
use ferrotron::models::memory::{MemoryEstimator, PlannedDevice, StageMemory};
use ferrotron::parallel::pipeline::{svg, text};
use ferrotron::planner::steps::{Part, Traffic};
use ferrotron::planner::{Cluster, Prediction, predict, trace};
use ferrotron::{Error, Result};
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use std::process::ExitCode;

use crate::cli::architecture::TrainedModel;
use crate::cli::args::model::Architecture;
use crate::cli::args::train::TrainArgs;
use crate::cli::bytes::display;
use crate::cli::commands::memory::vocab_size;
use crate::cli::definition::Definition;
use crate::cli::options::merged::MergedOptions;
use crate::cli::options::{Options, other_optimizers};
use crate::cli::plan::plan;
use crate::cli::{output, usage};

/// Characters of a line of the timeline.
const LINE: usize = 120;
const DAY: f64 = 86_400.0;

#[derive(Debug, Args)]
pub struct SimulateArgs {
    /// The cluster: v100-32-jz, dgx-2, dgx-a100-40, dgx-a100-80, h100, h200, or a file that ends in .toml
    #[arg(long, value_name = "NAME")]
    pub cluster: String,
    /// Nodes, with --nproc ranks on each [default: 1]
    #[arg(long, value_name = "N", default_value_t = 1, hide_default_value = true, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub nodes: u32,
    /// Tokens of a whole training, whose duration is printed
    #[arg(long, value_name = "N")]
    pub train_tokens: Option<f64>,
    /// List calls, bytes, operations and time of each kernel of the busiest rank
    #[arg(long)]
    pub by_kernel: bool,
    /// Draw the step of the pipeline with characters
    #[arg(long)]
    pub timeline: bool,
    /// File for a picture of the step
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub train: TrainArgs,
}

/// Prints how long a step of the run takes on a cluster, and of what, with the options `given` over those of `--load`.
pub fn simulate(args: &SimulateArgs, given: Options, definition: &Definition) -> Result<ExitCode> {
    let merged = MergedOptions::new(&args.train, given, definition)?;
    let matches = merged.matches("simulate", definition)?;
    let args = SimulateArgs::from_arg_matches(&matches)
        .map_err(|error| usage::refuse(&error, "ferrotron simulate"))?;
    let report = match args.train.model.architecture {
        Architecture::Gpt2 | Architecture::Llama | Architecture::Gemma2 => report::<Gpt>,
        Architecture::Bert => report::<Bert>,
    };
    let checked = other_optimizers::check(&merged.options);
    checked
        .and_then(|()| report(&args, &merged))
        .map_err(|error| merged.options.name_sources(error))
}

fn report<M: TrainedModel>(args: &SimulateArgs, merged: &MergedOptions) -> Result<ExitCode> {
    if let Some(tokens) = args.train_tokens.filter(|tokens| !(*tokens > 0.0 && tokens.is_finite()))
    {
        return Err(Error::config("--train-tokens", format!("must be positive, got {tokens}")));
    }
    let (run, cluster) = planned::<M>(args, merged)?;
    let trace_file = args.train.run.trace.as_deref();
    let found = predict(&run, &cluster, trace_file.is_some())?;
    if let Some(path) = trace_file {
        trace::write(path, found.marks(), &found.ranks)?;
    }
    if let Some(path) = &args.svg {
        let picture = svg::draw(&found.replay.timeline, &title(args, &found));
        std::fs::write(path, picture).map_err(|error| {
            Error::io("simulate", format!("cannot write {}: {error}", path.display()))
        })?;
    }
    let parameters = M::sizes(&run.model).num_parameters;
    if args.json {
        output::line(&as_json(args, &found, &cluster, parameters).to_string());
        return Ok(ExitCode::SUCCESS);
    }
    if args.timeline {
        output::print(&text::draw(&found.replay.timeline, LINE));
    }
    output::print(&summary(args, &found, &cluster, parameters));
    if args.by_kernel {
        output::print(&by_kernel(&found));
    }
    Ok(ExitCode::SUCCESS)
}

/// The run that the options describe, on the cluster that they name.
fn planned<M: TrainedModel>(
    args: &SimulateArgs,
    merged: &MergedOptions,
) -> Result<(MemoryEstimator<M>, Cluster)> {
    let MergedOptions { resumed, imported, .. } = merged;
    let cluster = named_cluster(&args.cluster, &args.train)?;
    let local = cluster.gpus_per_node;
    let vocab_size = vocab_size::<M>(&args.train, resumed.as_ref(), imported.as_ref())?;
    let run = plan::<M>(&args.train, local * args.nodes as usize, local, vocab_size)?;
    if let Some(imported) = imported {
        imported.check_config::<M>(&run.model)?;
    }
    Ok((run, cluster))
}

/// The cluster of that name, with as many GPUs on each node as `--nproc` says.
pub fn named_cluster(name: &str, train: &TrainArgs) -> Result<Cluster> {
    let mut cluster = Cluster::named(name)?;
    let local = train.parallel.ranks.nproc.unwrap_or(cluster.gpus_per_node);
    let most = if cluster.cores.is_some() { usize::MAX } else { cluster.gpus_per_node };
    if local == 0 || local > most {
        let message = format!(
            "{local} ranks, one a GPU, are not 1 to {}, the GPUs of a node of {}",
            cluster.gpus_per_node, cluster.name
        );
        return Err(Error::config("--nproc", message));
    }
    if let PlannedDevice::Cpu { threads } = cluster.gpu.device {
        check_measured(&cluster, threads, train)?;
        // Ranks share the memory of the machine.
        cluster.gpu.memory = cluster.gpu.memory * cluster.gpus_per_node as u64 / local as u64;
    }
    Ok(Cluster { gpus_per_node: local, ..cluster })
}

/// Errors if the run's kernels are not those that were measured on a processor.
fn check_measured(cluster: &Cluster, threads: usize, train: &TrainArgs) -> Result<()> {
    let remedy = "or measure again by ferrotron bench --calibrate with the same option";
    let dtype = train.device.dtype()?;
    if let Some(measured) = cluster.gpu.measured.filter(|measured| *measured != dtype) {
        let name = &cluster.name;
        let message = format!(
            "{dtype}, but kernels of {name} were measured in {measured}: give --dtype {measured}, {remedy}"
        );
        return Err(Error::config("--dtype", message));
    }
    if let Some(stated) = train.device.threads.filter(|stated| *stated != threads) {
        let name = &cluster.name;
        let message =
            format!("{stated}, but a rank of {name} has {threads}: leave it out, {remedy}");
        return Err(Error::config("--threads", message));
    }
    Ok(())
}

/// A rank's device, and the unit of its speed with its operations a second.
pub fn units(cluster: &Cluster) -> (&'static str, &'static str, f64) {
    match cluster.gpu.device {
        PlannedDevice::Cpu { .. } => ("rank", "GFLOP/s", 1e9),
        PlannedDevice::Gpu(_) => ("GPU", "TFLOP/s", 1e12),
    }
}

/// One line above the picture.
fn title(args: &SimulateArgs, found: &Prediction) -> String {
    format!(
        "{} GPUs of {}: {:.4} s a step, bubble {:.3}",
        found.world,
        args.cluster,
        found.seconds(),
        found.bubble()
    )
}

/// The step and its parts.
fn summary(args: &SimulateArgs, found: &Prediction, cluster: &Cluster, parameters: u64) -> String {
    let seconds = found.seconds();
    let (unit, speed, one) = units(cluster);
    let speed = format!("{speed} a {unit}");
    let mut text = format!(
        "{} {unit}s, {}\n\
         step            {:.4} s, {} tokens, {:.0} tokens/s\n\
         {speed:16}{:.1} with recomputation, {:.1} of the model: MFU {:.1} %\n\
         bubble          {:.4} of the rest\n",
        found.world,
        cluster.description,
        seconds,
        found.tokens,
        found.tokens_per_second(),
        found.hardware_per_gpu() / one,
        found.model_per_gpu() / one,
        100.0 * found.model_per_gpu() / found.peak,
        found.bubble(),
    );
    text +=
        &format!("{:24}{:>12}{:>9}{:>14}\n", "part, mean of the ranks", "ms", "%", "hidden, ms");
    let mut row = |name: &str, part: f64, hidden: Option<f64>| {
        let hidden = hidden.map_or(String::new(), |hidden| format!("{:14.3}", 1e3 * hidden));
        let line = format!("{name:24}{:12.3}{:9.2}{hidden}", 1e3 * part, 100.0 * part / seconds);
        text += &format!("{}\n", line.trim_end());
    };
    for part in Part::ALL {
        row(part.name(), found.mean.computing[part as usize], None);
    }
    for kind in
        Traffic::ALL.into_iter().filter(|kind| found.mean.communicating[*kind as usize] > 0.0)
    {
        let exposed = found.mean.exposed[kind as usize];
        row(&format!("communication, {}", kind.name()), exposed, Some(found.mean.hidden(kind)));
    }
    row("bubble", found.mean.bubble, None);
    let (peak, memory) = (found.peak_bytes() as u64, cluster.gpu.memory);
    let verdict = if peak > memory { "which is too much for" } else { "of" };
    text += &format!("memory          {} {verdict} {}\n", display(peak), display(memory));
    text += &stages(&found.memory, unit);
    if let Some(tokens) = args.train_tokens {
        text += &format!(
            "training        {:.1} days for {tokens:e} tokens; {:.1} days by 8 T P / (n X)\n",
            found.training_seconds(tokens) / DAY,
            found.training_seconds_by_equation(tokens, parameters as f64) / DAY,
        );
    }
    text
}

/// A line for each pipeline stage, with the bytes of one of its ranks.
fn stages(found: &[StageMemory], unit: &str) -> String {
    let mut text = format!(
        "{:8}{:>7}{:>7}{:>12}{:>12}{:>12}{:>13}{:>12}\n",
        "stage",
        "layers",
        format!("{unit}s"),
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "total"
    );
    for StageMemory { stage, layers, ranks, memory, .. } in found {
        text += &format!(
            "{stage:<8}{layers:>7}{ranks:>7}{:>12}{:>12}{:>12}{:>13}{:>12}\n",
            display(memory.weights_bytes as u64),
            display(memory.gradients_bytes as u64),
            display(memory.optimizer_bytes as u64),
            display(memory.activations_bytes as u64),
            display(memory.total_bytes as u64),
        );
    }
    text
}

/// A line for each kernel.
fn by_kernel(found: &Prediction) -> String {
    let mut text = format!(
        "\n{:44}{:>10}{:>12}{:>12}{:>12}\n",
        "kernel, of the busiest rank", "calls", "bytes", "GFLOP", "ms"
    );
    for kernel in &found.kernels {
        text += &format!(
            "{:44}{:>10}{:>12}{:>12.1}{:>12.3}\n",
            kernel.name,
            (100.0 * kernel.calls).round() / 100.0,
            display(kernel.bytes as u64),
            kernel.operations / 1e9,
            1e3 * kernel.seconds
        );
    }
    text
}

/// The same for machines.
fn as_json(args: &SimulateArgs, found: &Prediction, cluster: &Cluster, parameters: u64) -> Value {
    let named = |of: &dyn Fn(Traffic) -> f64| -> Map<String, Value> {
        Traffic::ALL.iter().map(|kind| (kind.name().to_string(), of(*kind).into())).collect()
    };
    let parts = Part::ALL.map(|part| (part.name(), found.mean.computing[part as usize]));
    let computing: Map<String, Value> =
        parts.iter().map(|(name, seconds)| (name.to_string(), (*seconds).into())).collect();
    let peak = found.peak_bytes() as u64;
    let mut report = json!({
        "cluster": cluster.name,
        "gpus": found.world,
        "parameters": parameters,
        "tokens": found.tokens,
        "s_per_step": found.seconds(),
        "tokens_per_s": found.tokens_per_second(),
        "tflops_per_gpu": found.hardware_per_gpu() / 1e12,
        "model_tflops_per_gpu": found.model_per_gpu() / 1e12,
        "mfu": found.model_per_gpu() / found.peak,
        "bubble": found.bubble(),
        "bubble_s": found.mean.bubble,
        "computing_s": computing,
        "exposed_communication_s": named(&|kind| found.mean.exposed[kind as usize]),
        "hidden_communication_s": named(&|kind| found.mean.hidden(kind)),
        "peak_bytes": peak,
        "fits": peak <= cluster.gpu.memory,
        "stages": found.memory,
    });
    if let Some(tokens) = args.train_tokens {
        report["train_days"] = json!(found.training_seconds(tokens) / DAY);
        let equation = found.training_seconds_by_equation(tokens, parameters as f64);
        report["train_days_by_equation"] = json!(equation / DAY);
    }
    if args.by_kernel {
        let kernel = |kernel: &ferrotron::planner::kernels::KernelTime| {
            json!({
                "name": kernel.name, "calls": kernel.calls, "bytes": kernel.bytes,
                "flops": kernel.operations, "ms": 1e3 * kernel.seconds,
            })
        };
        report["kernels"] = found.kernels.iter().map(kernel).collect();
    }
    report
}
