//! What `ferrotron plan` prints and writes.

use ferrotron::Error;
use ferrotron::models::support::ModelSizes;
use ferrotron::planner::steps::{Part, Traffic};
use ferrotron::planner::{Cluster, Layout, Offload, Plan, Planned, Prediction};
use serde_json::{Map, Value, json};

use super::args::{BEGIN, BEST, PlanArgs, in_host_memory, with_layout};
use crate::cli::bytes::display;
use crate::cli::commands::simulate::units;

/// The same options by name.
fn named(args: &PlanArgs, layers: usize, layout: &Layout) -> Map<String, Value> {
    let train = with_layout(&args.train, layers, layout);
    let mut options = json!({
        "tensor_model_parallel_size": layout.tensor,
        "context_parallel_size": layout.context,
        "pipeline_model_parallel_size": layout.pipeline,
        "pipeline_schedule": layout.schedule.to_string(),
        "num_virtual_stages_per_pipeline_rank": layout.chunks,
        "micro_batch_size": layout.micro_batch,
        "global_batch_size": layout.global_batch,
        "recompute_granularity": layout.recompute.name(),
        "zero_stage": layout.zero_stage,
        "sequence_parallel": layout.sequence_parallel,
    });
    if layout.offload.has_states() {
        options["offload_optimizer_states"] = json!(true);
    }
    if layout.offload.has_activations() {
        options["cpu_offloading_num_layers"] = json!(train.offload.cpu_offloading_num_layers);
    }
    if args.nodes == 1 {
        options["nproc"] = json!(layout.gpus);
    }
    options.as_object().cloned().unwrap_or_default()
}

/// The file for `train --config`.
pub fn for_train(args: &PlanArgs, layers: usize, best: &Planned) -> String {
    let Planned { layout, prediction } = best;
    let mut text = format!(
        "{BEGIN}{} GPUs of {}, by ferrotron plan: {:.4} s a step, {} of each GPU.\n",
        layout.gpus,
        args.cluster,
        prediction.seconds(),
        display(prediction.peak_bytes() as u64)
    );
    for (name, value) in named(args, layers, layout) {
        text += &format!("{name} = {value}\n"); // numbers, texts and flags are written as in JSON
    }
    text
}

/// The error of a model that is too large: the smallest layout, and one of more GPUs that fits, with their bytes.
pub fn fits_nowhere(found: &Plan, enough: Option<(Layout, u64)>, gpus: usize, limit: u64) -> Error {
    let least = found.smallest.map_or(String::new(), |(layout, bytes)| {
        format!("; the least that was found is {}, with {}", display(bytes), flags(&layout))
    });
    let remedy = match enough {
        Some((layout, bytes)) => {
            format!("{} GPUs are enough, with {}: {}", layout.gpus, display(bytes), flags(&layout))
        }
        None => "use more --nodes or larger GPUs".to_string(),
    };
    let message = format!(
        "none of {} layouts of {gpus} GPUs fits into {} of each{least}: {remedy}",
        found.layouts,
        display(limit)
    );
    Error::config("memory", message)
}

/// A layout in a line.
pub fn flags(layout: &Layout) -> String {
    let mut text = format!(
        "tensor {}, context {}, pipeline {}, {}, chunks {}, data {}, micro-batch {}, recomputation {}, ZeRO {}",
        layout.tensor,
        layout.context,
        layout.pipeline,
        layout.schedule,
        layout.chunks,
        layout.data(),
        layout.micro_batch,
        layout.recompute.name(),
        layout.zero_stage
    );
    if layout.sequence_parallel {
        text += ", sequence parallel";
    }
    if layout.offload != Offload::None {
        text += &format!(", in host memory {}", layout.offload.name());
    }
    text
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
pub fn lost(best: &Prediction, other: &Prediction) -> String {
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

/// The best layouts, and how many were left out for which reason.
pub fn table(args: &PlanArgs, found: &Plan, cluster: &Cluster) -> String {
    let Some(best) = found.best.first() else { return String::new() };
    let (unit, speed, one) = units(cluster);
    let mut text = format!(
        "{} {unit}s, {}\n{} layouts: {} take too much memory, {} simulated",
        best.layout.gpus, cluster.description, found.layouts, found.too_large, found.simulated
    );
    for (count, reason) in [
        (found.not_compared, "not compared since they use host memory without need"),
        (found.failed, "failed"),
    ] {
        if count > 0 {
            text += &format!(", {count} {reason}");
        }
    }
    text += &format!(", the others have bounds above the best {BEST}\n");
    if let Some((layout, error)) = &found.failure {
        let (count, first) = (found.failed, flags(layout));
        text += &format!("{count} left out, whose dry step failed; the first, {first}: {error}\n");
    }
    text += &format!(
        "{:>7}{:>9}{:>8}{:>9}{:>12}{:>7}{:>6}{:>6}{:>11}{:>5}{:>12}{:>11}{:>9}{:>8}{:>11}  {}\n",
        "tensor",
        "sequence",
        "context",
        "pipeline",
        "schedule",
        "chunks",
        "data",
        "micro",
        "recompute",
        "ZeRO",
        "host memory",
        "s a step",
        speed,
        "bubble",
        "memory",
        "largest part beside products"
    );
    for Planned { layout, prediction } in &found.best {
        let (name, share) = binds(prediction);
        text += &format!(
            "{:>7}{:>9}{:>8}{:>9}{:>12}{:>7}{:>6}{:>6}{:>11}{:>5}{:>12}{:>11.4}{:>9.1}{:>8.4}{:>11}  {name} {:.1} %\n",
            layout.tensor,
            if layout.sequence_parallel { "cut" } else { "whole" },
            layout.context,
            layout.pipeline,
            layout.schedule,
            layout.chunks,
            layout.data(),
            layout.micro_batch,
            layout.recompute.name(),
            layout.zero_stage,
            in_host_memory(&args.train, layout).name(),
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

/// The same for machines.
pub fn as_json(args: &PlanArgs, found: &Plan, cluster: &Cluster, sizes: &ModelSizes) -> Value {
    let best = found.best.iter().map(|Planned { layout, prediction }| {
        let (name, share) = binds(prediction);
        json!({
            "options": named(args, sizes.num_layers, layout),
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
        "parameters": sizes.num_parameters,
        "layouts": found.layouts,
        "too_large": found.too_large,
        "simulated": found.simulated,
        "not_compared": found.not_compared,
        "failed": found.failed,
        "failure": found.failure.as_ref().map(|(layout, error)| format!("{}: {error}", flags(layout))),
        "best": best.collect::<Vec<Value>>(),
        "runner_up": lost,
    })
}
