//! The options of `ferrotron plan`, and those of a layout that it finds.

use clap::Args;
use ferrotron::planner::{Layout, Offload, Recomputation};
use std::path::PathBuf;

use crate::cli::args::parallel::Granularity;
use crate::cli::args::train::TrainArgs;

/// Layouts that are printed.
pub const BEST: usize = 5;
/// How the file of the best layout begins.
pub const BEGIN: &str = "# Layout for ";

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

/// What waits in host memory in a run of `layout`: what `args` state, and what the search decided.
pub fn in_host_memory(args: &TrainArgs, layout: &Layout) -> Offload {
    let states = args.offload.offload_optimizer_states || layout.offload.has_states();
    let activations =
        args.offload.cpu_offloading_num_layers > 0 || layout.offload.has_activations();
    match (states, activations) {
        (false, false) => Offload::None,
        (true, false) => Offload::States,
        (false, true) => Offload::Activations,
        (true, true) => Offload::All,
    }
}

/// The options of `args` in a layout of a model of so many `layers`.
pub fn with_layout(args: &TrainArgs, layers: usize, layout: &Layout) -> TrainArgs {
    let mut args = args.clone();
    args.optimization.micro_batch_size = layout.micro_batch;
    args.optimization.global_batch_size = Some(layout.global_batch);
    args.parallel.ranks.context_parallel_size = layout.context;
    if layout.offload.has_states() {
        args.offload.offload_optimizer_states = true;
    }
    if layout.offload.has_activations() {
        let chunks = layout.pipeline * layout.chunks;
        args.offload.cpu_offloading_num_layers = (layers / chunks).max(1);
    }
    let parallel = &mut args.parallel;
    parallel.ranks.tensor_model_parallel_size = layout.tensor;
    parallel.ranks.pipeline_model_parallel_size = layout.pipeline;
    parallel.pipeline_schedule = Some(layout.schedule.to_string());
    parallel.num_virtual_stages_per_pipeline_rank = Some(layout.chunks);
    parallel.zero_stage = layout.zero_stage;
    parallel.sequence_parallel = layout.sequence_parallel;
    parallel.recompute_granularity = match layout.recompute {
        Recomputation::None => Granularity::None,
        Recomputation::Selective => Granularity::Selective,
        Recomputation::Full => Granularity::Full,
    };
    args
}
