//! `ferrotron plan`.

use clap::Args;
use ferrotron::models::bert::Bert;
use ferrotron::models::gpt::Gpt;
use ferrotron::planner::steps::{Part, Traffic};
use ferrotron::planner::{
    Cluster, Layout, Plan, Planned, Prediction, Recomputation, Space, search,
};
use ferrotron::{Error, Result};
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use std::process::ExitCode;

use crate::cli::architecture::TrainedModel;
use crate::cli::args::model::Architecture;
use crate::cli::args::parallel::Granularity;
use crate::cli::args::train::TrainArgs;
use crate::cli::bytes::display;
use crate::cli::commands::memory::vocab_size;
use crate::cli::commands::own_file::OwnFile;
use crate::cli::commands::simulate::{named_cluster, units};
use crate::cli::options::{Options, other_optimizers};
use crate::cli::output;
use crate::cli::plan::plan as planned;
use crate::cli::progress::CountProgress;

/// Layouts that are printed.
const BEST: usize = 5;
/// How the file of the best layout begins.
const BEGIN: &str = "# Layout for ";

/// Options of a layout, which the search decides.
const DECIDED: &[&str] = &[
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--pipeline-schedule",
    "--num-virtual-stages-per-pipeline-rank",
    "--micro-batch-size",
    "--recompute-granularity",
    "--recompute-method",
    "--recompute-num-layers",
    "--recompute-modules",
    "--distribute-saved-activations",
    "--zero-stage",
    "--sequence-parallel",
    "--rampup-batch-size",
];

#[derive(Debug, Args)]
pub struct PlanArgs {
    /// The cluster: v100-32-jz, dgx-2, dgx-a100-40, dgx-a100-80, h100, h200, or a file that ends in .toml
    #[arg(long, value_name = "NAME")]
    pub cluster: String,
    /// Nodes, with --nproc ranks on each [default: 1]
    #[arg(long, value_name = "N", default_value_t = 1, hide_default_value = true, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub nodes: u32,
    /// File for the options of the best layout, which train --config reads
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Say how the best layout differs from that of the published rules
    #[arg(long)]
    pub explain: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub train: TrainArgs,
}

/// Prints the fastest layouts of a training on a cluster.
pub fn plan(args: &PlanArgs, options: &Options) -> Result<ExitCode> {
    if args.train.run.load.is_some() {
        return Err(Error::config("--load", "plan is for a new run: state its options instead"));
    }
    if let Some(name) = DECIDED.iter().find(|name| options.states_any(&[&name[2..]])) {
        let message = "plan decides it: leave it out, or use ferrotron simulate";
        return Err(Error::config(name, message));
    }
    other_optimizers::check(options)?;
    match args.train.model.architecture {
        Architecture::Gpt2 | Architecture::Llama | Architecture::Gemma2 => {
            report::<Gpt>(args, options)
        }
        Architecture::Bert => report::<Bert>(args, options),
    }
}

fn report<M: TrainedModel>(args: &PlanArgs, options: &Options) -> Result<ExitCode> {
    let cluster = named_cluster(&args.cluster, &args.train)?;
    let local = cluster.gpus_per_node;
    let Some(global_batch) = args.train.optimization.global_batch_size else {
        let message = "is needed: layouts are compared for the same samples a step";
        return Err(Error::config("--global-batch-size", message));
    };
    let vocab_size = vocab_size::<M>(&args.train, None, None)?;
    let sizes = M::sizes(&M::config(&args.train, vocab_size)?);
    if global_batch == 0 {
        return Err(Error::config("--global-batch-size", "must be positive, got 0"));
    }
    let gpus = local * args.nodes as usize;
    let contexts = match args.train.parallel.ranks.context_parallel_size {
        0 => return Err(Error::config("--context-parallel-size", "must be positive, got 0")),
        size if options.states_any(&["context-parallel-size"]) => vec![size],
        _ => Space::contexts_of(args.train.model.seq_length()?, gpus),
    };
    let space =
        Space { gpus, gpus_per_node: local, contexts, layers: sizes.num_layers, global_batch };
    let limit = args.train.run.memory_limit.unwrap_or(cluster.gpu.memory);
    let run = |layout: &Layout| {
        planned::<M>(&with_layout(&args.train, layout)?, layout.gpus, local, vocab_size)
    };
    let open = |path: &PathBuf| OwnFile::open("--output", path, BEGIN, "a layout");
    let output = args.output.as_ref().map(open).transpose()?;
    let mut shown = None;
    let progress = |done: usize, total: usize| {
        let bar = shown.get_or_insert_with(|| CountProgress::new("layouts", total as u64));
        bar.show(done as u64);
    };
    let found = search(&space, &cluster, (limit, BEST), run, progress)?;
    if let Some(bar) = shown {
        bar.finish();
    }
    let Some(best) = found.best.first() else {
        return Err(fits_nowhere(&found, space.gpus, limit));
    };
    if let Some(file) = output {
        file.replace(&for_train(args, best)?)?;
    }
    if args.json {
        output::line(&as_json(args, &found, &cluster, sizes.num_parameters).to_string());
        return Ok(ExitCode::SUCCESS);
    }
    output::print(&table(&found, &cluster));
    if args.explain {
        let mut rules = None;
        let (tensor, context) = (found.widest, space.contexts[0]);
        for pipeline in 1..=space.layers {
            // The rules know neither shards of gradients and weights nor more contexts than the sequence needs.
            let sizes = |layout: &Layout| {
                (layout.tensor, layout.pipeline, layout.context) == (tensor, pipeline, context)
            };
            let ruled = |layout: &Layout| match layout {
                Layout { chunks: 1, zero_stage: 0 | 1, .. } if sizes(layout) => run(layout),
                _ => Err(Error::config("plan", "is not that of the rules")),
            };
            if space.layers.is_multiple_of(pipeline)
                && let Ok(plan) = search(&space, &cluster, (limit, 1), ruled, |_, _| ())
                && let Some(first) = plan.best.into_iter().next()
            {
                rules = Some(first);
                break;
            }
        }
        output::print(&explanation(best, rules.as_ref(), local));
    }
    Ok(ExitCode::SUCCESS)
}

/// The options of `args` in a layout.
fn with_layout(args: &TrainArgs, layout: &Layout) -> Result<TrainArgs> {
    let mut args = args.clone();
    args.optimization.micro_batch_size = layout.micro_batch;
    args.optimization.global_batch_size = Some(layout.global_batch);
    args.parallel.ranks.context_parallel_size = layout.context;
    let positions = args.model.seq_length()? / layout.context;
    let parallel = &mut args.parallel;
    parallel.ranks.tensor_model_parallel_size = layout.tensor;
    parallel.ranks.pipeline_model_parallel_size = layout.pipeline;
    parallel.num_virtual_stages_per_pipeline_rank = Some(layout.chunks);
    parallel.zero_stage = layout.zero_stage;
    parallel.sequence_parallel = layout.tensor > 1 && positions.is_multiple_of(layout.tensor);
    parallel.recompute_granularity = match layout.recompute {
        Recomputation::None => Granularity::None,
        Recomputation::Selective => Granularity::Selective,
        Recomputation::Full => Granularity::Full,
    };
    Ok(args)
}

/// The same options by name.
fn named(args: &PlanArgs, layout: &Layout) -> Result<Map<String, Value>> {
    let parallel = with_layout(&args.train, layout)?.parallel;
    let mut options = json!({
        "tensor_model_parallel_size": layout.tensor,
        "context_parallel_size": layout.context,
        "pipeline_model_parallel_size": layout.pipeline,
        "pipeline_schedule": if layout.chunks > 1 { "interleaved" } else { "1f1b" },
        "num_virtual_stages_per_pipeline_rank": layout.chunks,
        "micro_batch_size": layout.micro_batch,
        "global_batch_size": layout.global_batch,
        "recompute_granularity": layout.recompute.name(),
        "zero_stage": layout.zero_stage,
        "sequence_parallel": parallel.sequence_parallel,
    });
    if args.nodes == 1 {
        options["nproc"] = json!(layout.gpus);
    }
    Ok(options.as_object().cloned().unwrap_or_default())
}

/// The file for `train --config`.
fn for_train(args: &PlanArgs, best: &Planned) -> Result<String> {
    let Planned { layout, prediction } = best;
    let mut text = format!(
        "{BEGIN}{} GPUs of {}, by ferrotron plan: {:.4} s a step, {} of each GPU.\n",
        layout.gpus,
        args.cluster,
        prediction.seconds(),
        display(prediction.peak_bytes() as u64)
    );
    for (name, value) in named(args, layout)? {
        text += &format!("{name} = {value}\n"); // numbers, texts and flags are written as in JSON
    }
    Ok(text)
}

fn fits_nowhere(found: &Plan, gpus: usize, limit: u64) -> Error {
    let least = found.smallest.map_or(String::new(), |(layout, bytes)| {
        format!("; the least that was found is {}, with {}", display(bytes), flags(&layout))
    });
    let message = format!(
        "none of {} layouts of {gpus} GPUs fits into {} of each{least}: use more --nodes or larger GPUs",
        found.layouts,
        display(limit)
    );
    Error::config("memory", message)
}

/// A layout in a line.
fn flags(layout: &Layout) -> String {
    format!(
        "tensor {}, context {}, pipeline {}, chunks {}, data {}, micro-batch {}, recomputation {}, ZeRO {}",
        layout.tensor,
        layout.context,
        layout.pipeline,
        layout.chunks,
        layout.data(),
        layout.micro_batch,
        layout.recompute.name(),
        layout.zero_stage
    )
}

/// The parts of a step, which add up to it.
fn parts(found: &Prediction) -> Vec<(String, f64)> {
    let mean = &found.mean;
    let computing = Part::ALL.map(|part| (part.name().to_string(), mean.computing[part as usize]));
    let waits = Traffic::ALL
        .map(|kind| (format!("communication, {}", kind.name()), mean.exposed[kind as usize]));
    let bubble = [("bubble".to_string(), mean.bubble)];
    computing.into_iter().chain(waits).chain(bubble).collect()
}

/// The largest part beside matrix products, with its share.
fn binds(found: &Prediction) -> (String, f64) {
    let others = parts(found).into_iter().filter(|(name, _)| name != Part::Products.name());
    let most = others.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or_default();
    (most.0, most.1 / found.seconds())
}

/// Names the reason for which a layout is slower than the best one.
fn lost(best: &Prediction, other: &Prediction) -> String {
    let mut gaps: Vec<(String, f64)> = parts(other)
        .into_iter()
        .zip(parts(best))
        .map(|((name, theirs), (_, ours))| (name, theirs - ours))
        .collect();
    gaps.sort_by(|a, b| b.1.total_cmp(&a.1));
    let (name, more) = &gaps[0];
    let slower = 100.0 * (other.seconds() / best.seconds() - 1.0);
    let mut text = format!("{slower:.2} % slower: {name} {:+.3} ms", 1e3 * more);
    if let Some((name, less)) = gaps.last().filter(|(_, less)| *less < 0.0) {
        text += &format!(", against {name} {:+.3} ms", 1e3 * less);
    }
    text
}

fn table(found: &Plan, cluster: &Cluster) -> String {
    let Some(best) = found.best.first() else { return String::new() };
    let (unit, speed, one) = units(cluster);
    let mut text = format!(
        "{} {unit}s, {}\n{} layouts: {} take too much memory, {} simulated, the others have bounds above the best {BEST}\n",
        best.layout.gpus, cluster.description, found.layouts, found.too_large, found.simulated
    );
    if let Some((layout, error)) = &found.failure {
        let (count, first) = (found.failed, flags(layout));
        text += &format!("{count} left out, whose dry step failed; the first, {first}: {error}\n");
    }
    text += &format!(
        "{:>7}{:>8}{:>9}{:>7}{:>6}{:>6}{:>11}{:>5}{:>11}{:>9}{:>8}{:>11}  {}\n",
        "tensor",
        "context",
        "pipeline",
        "chunks",
        "data",
        "micro",
        "recompute",
        "ZeRO",
        "s a step",
        speed,
        "bubble",
        "memory",
        "largest part beside products"
    );
    for Planned { layout, prediction } in &found.best {
        let (name, share) = binds(prediction);
        text += &format!(
            "{:>7}{:>8}{:>9}{:>7}{:>6}{:>6}{:>11}{:>5}{:>11.4}{:>9.1}{:>8.4}{:>11}  {name} {:.1} %\n",
            layout.tensor,
            layout.context,
            layout.pipeline,
            layout.chunks,
            layout.data(),
            layout.micro_batch,
            layout.recompute.name(),
            layout.zero_stage,
            prediction.seconds(),
            prediction.model_per_gpu() / one,
            prediction.bubble(),
            display(prediction.peak_bytes() as u64),
            100.0 * share
        );
    }
    if let Some(second) = found.best.get(1) {
        text += &format!("the second is {}\n", lost(&best.prediction, &second.prediction));
    }
    text
}

/// The rules of arXiv:2104.04473, section 5.4, and what the plan does instead.
fn explanation(best: &Planned, rules: Option<&Planned>, node: usize) -> String {
    let mut text = format!(
        "\nrules of arXiv:2104.04473: tensor parallel up to a node ({node} GPUs), then pipeline until the model fits, data \
         parallel for the rest, the micro-batch by simulation\n\
         plan:  {}\n",
        flags(&best.layout)
    );
    let Some(rules) = rules else {
        return text + "rules: no such layout fits\n";
    };
    text += &format!("rules: {}\n", flags(&rules.layout));
    text += &match rules.layout == best.layout {
        true => "the plan follows the rules\n".to_string(),
        false => format!("the rules' is {}\n", lost(&best.prediction, &rules.prediction)),
    };
    text
}

/// The same for machines.
fn as_json(args: &PlanArgs, found: &Plan, cluster: &Cluster, parameters: u64) -> Value {
    let best = found.best.iter().map(|Planned { layout, prediction }| {
        let (name, share) = binds(prediction);
        json!({
            "options": named(args, layout).unwrap_or_default(),
            "data_parallel_size": layout.data(),
            "s_per_step": prediction.seconds(),
            "tokens_per_s": prediction.tokens_per_second(),
            "tflops_per_gpu": prediction.hardware_per_gpu() / 1e12,
            "model_tflops_per_gpu": prediction.model_per_gpu() / 1e12,
            "mfu": prediction.model_per_gpu() / prediction.peak,
            "bubble": prediction.bubble(),
            "peak_bytes": prediction.peak_bytes(),
            "largest_part": name,
            "largest_share": share,
        })
    });
    let lost = found.best.get(1).map(|second| lost(&found.best[0].prediction, &second.prediction));
    json!({
        "cluster": cluster.name,
        "gpus": found.best.first().map(|best| best.layout.gpus),
        "parameters": parameters,
        "layouts": found.layouts,
        "too_large": found.too_large,
        "simulated": found.simulated,
        "failed": found.failed,
        "failure": found.failure.as_ref().map(|(layout, error)| format!("{}: {error}", flags(layout))),
        "best": best.collect::<Vec<Value>>(),
        "runner_up": lost,
    })
}
