//! The picture of a run's pipeline schedule.

use ferrotron::parallel::pipeline::{
    PipelineConfig, PipelineSchedule, ScheduleKind, StageTimes, simulate, svg,
};

use super::escape::number;
use crate::cli::args::train::TrainArgs;

/// Steps that are drawn of a pipeline without a flush.
const STEPS: usize = 4;

/// Boxes beyond which a picture is no picture.
const MOST_BOXES: usize = 4096;

/// The pipeline of a run with these options, if it has one and the number of ranks is known.
pub fn pipeline(args: &TrainArgs) -> Option<PipelineConfig> {
    let parallel = &args.parallel;
    let stages = parallel.ranks.pipeline_model_parallel_size;
    let named: Option<ScheduleKind> = match &parallel.pipeline_schedule {
        Some(name) => Some(name.parse().ok()?),
        None => None,
    };
    let default = if named == Some(ScheduleKind::Interleaved) { 2 } else { 1 };
    let chunks = parallel.num_virtual_stages_per_pipeline_rank.unwrap_or(default);
    let implied = if chunks > 1 { ScheduleKind::Interleaved } else { ScheduleKind::OneFOneB };
    let ranks =
        stages * parallel.ranks.tensor_model_parallel_size * parallel.ranks.context_parallel_size;
    let data_parallel = parallel.ranks.nproc.unwrap_or(ranks) / ranks.max(1);
    let unit = args.optimization.micro_batch_size * data_parallel.max(1);
    let microbatches = args.optimization.global_batch_size.unwrap_or(unit) / unit.max(1);
    let kind = named.unwrap_or(implied);
    (stages > 1).then_some(PipelineConfig { kind, stages, microbatches, chunks })
}

/// The pictures of all `pipelines`, each once, with a heading.
pub fn pictures(pipelines: impl Iterator<Item = PipelineConfig>) -> Vec<(String, String)> {
    let mut configs: Vec<PipelineConfig> = Vec::new();
    for config in pipelines {
        if !configs.contains(&config) {
            configs.push(config);
        }
    }
    configs.iter().filter_map(picture).collect()
}

fn picture(config: &PipelineConfig) -> Option<(String, String)> {
    let PipelineConfig { kind, stages, microbatches, chunks } = *config;
    if stages * microbatches * chunks > MOST_BOXES {
        return None;
    }
    // Both halves of backward take as long as forward.
    let times =
        StageTimes { forward: 1.0, backward_input: 1.0, backward_weight: 1.0, communication: 0.0 };
    let steps = if kind.flushes() { 1 } else { STEPS };
    let timeline = simulate(&PipelineSchedule::over_steps(config, steps).ok()?, &times).ok()?;
    let share = number((1000.0 * timeline.bubble() / timeline.ideal()).round() / 10.0);
    let heading = format!(
        "{kind}, {stages} stages, {microbatches} micro-batches{}: {}",
        if chunks > 1 { format!(", {chunks} chunks") } else { String::new() },
        match kind.flushes() {
            true => format!("bubble {share} % of the ideal time"),
            false => format!("{steps} steps until the pipeline is drained"),
        },
    );
    Some((heading, svg::draw(&timeline, "")))
}
