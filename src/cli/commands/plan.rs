//! `ferrotron plan`.

mod args;
mod explain;
mod report;

pub use args::PlanArgs;

use ferrotron::models::bert::Bert;
use ferrotron::models::gpt::Gpt;
use ferrotron::planner::{Layout, Offload, Space, enough, search};
use ferrotron::{Error, Result};
use std::path::PathBuf;
use std::process::ExitCode;

use crate::cli::architecture::TrainedModel;
use crate::cli::args::model::Architecture;
use crate::cli::commands::memory::vocab_size;
use crate::cli::commands::own_file::OwnFile;
use crate::cli::commands::simulate::named_cluster;
use crate::cli::options::{Options, other_optimizers};
use crate::cli::output;
use crate::cli::plan::plan as planned;
use crate::cli::progress::CountProgress;
use args::{BEGIN, BEST, with_layout};
use explain::{Searched, explanation};
use report::{as_json, fits_nowhere, for_train, table};

/// Options of what waits in host memory, which the search decides unless they are given.
const OFFLOADED: &[&str] = &["offload-optimizer-states", "cpu-offloading-num-layers"];

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

/// Prints the fastest layouts of a training on a cluster.
pub fn plan(args: &PlanArgs, options: &Options) -> Result<ExitCode> {
    if args.train.run.load.is_some() {
        return Err(Error::config("--load", "plan is for a new run: state its options instead"));
    }
    if let Some(name) = DECIDED.iter().find(|name| options.states_any(&[&name[2..]])) {
        let message = "plan decides it: leave it out, or use ferrotron simulate";
        return Err(Error::config(name, message));
    }
    if args.train.parallel.async_data_parallel {
        let message =
            "plan compares layouts with the same losses: leave it out, or use ferrotron simulate";
        return Err(Error::config("--async-data-parallel", message));
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
    let offloads = match cluster.gpu.host.is_some() && !options.states_any(OFFLOADED) {
        true => Offload::ALL.to_vec(),
        false => vec![Offload::None],
    };
    let layers = sizes.num_layers;
    let space = Space { gpus, gpus_per_node: local, contexts, layers, global_batch, offloads };
    let limit = args.train.run.memory_limit.unwrap_or(cluster.gpu.memory);
    let run = |layout: &Layout| {
        planned::<M>(&with_layout(&args.train, layers, layout), layout.gpus, local, vocab_size)
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
        let more = enough(&space, &cluster, limit, run);
        return Err(fits_nowhere(&found, more, space.gpus, limit));
    };
    if let Some(file) = output {
        file.replace(&for_train(args, layers, best))?;
    }
    if args.json {
        output::line(&as_json(args, &found, &cluster, &sizes).to_string());
        return Ok(ExitCode::SUCCESS);
    }
    output::print(&table(args, &found, &cluster));
    if args.explain {
        let searched = Searched { space: &space, cluster: &cluster, limit, run };
        output::print(&explanation(&searched, &found)?);
    }
    Ok(ExitCode::SUCCESS)
}
