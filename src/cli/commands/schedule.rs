//! `ferrotron schedule`.

use clap::Args;
use ferrotron::parallel::pipeline::{
    Instruction, PeakActivations, PipelineConfig, PipelineSchedule, ScheduleKind, Span, StageTimes,
    Timeline, formula, simulate, svg, text, validate, weight_versions,
};
use ferrotron::{Error, Result};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::ExitCode;

use crate::cli::output;

/// Characters of a line of the timeline.
const LINE: usize = 120;

#[derive(Debug, Args)]
pub struct ScheduleArgs {
    /// Schedule: naive, gpipe, 1f1b, interleaved or zb-h1; without a flush pipedream, pipedream-vertical-sync or
    /// pipedream-2bw
    #[arg(long, value_name = "NAME", default_value = "1f1b")]
    pipeline_schedule: String,
    /// Ranks of the pipeline, p
    #[arg(long, value_name = "N", default_value_t = 4)]
    stages: usize,
    /// Microbatches of a step, m; interleaved: a multiple of the stages; pipedream: 1 [default: 8, or 1]
    #[arg(long, value_name = "N")]
    microbatches: Option<usize>,
    /// Steps until a schedule without a flush is drained; the formulas count the microbatches of all of them [default: 8
    /// without a flush, else 1]
    #[arg(long, value_name = "N")]
    steps: Option<usize>,
    /// Chunks of the model on each rank, v [default: 2 if interleaved, else 1]
    #[arg(long, value_name = "N")]
    chunks: Option<usize>,
    /// Seconds of a microbatch's forward on a rank; each chunk takes a v-th of it
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    tf: f64,
    /// Seconds of its gradient of the input. A backward that is not split takes tb + tw: where a paper
    /// knows one backward time only, as in (b'/b + p - 1)(tf + tb), that is this sum
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    tb: f64,
    /// Seconds of its gradients of the weights
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    tw: f64,
    /// Seconds that a tensor is on its way between two ranks; the formulas know none
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    tcomm: f64,
    /// File for a picture of the timeline
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Prints and draws the timeline of a step, its bubble, its duration and what lives on each rank.
pub fn schedule(args: &ScheduleArgs) -> Result<ExitCode> {
    let kind: ScheduleKind = args.pipeline_schedule.parse()?;
    let chunks = args.chunks.unwrap_or(if kind == ScheduleKind::Interleaved { 2 } else { 1 });
    let default = match kind {
        ScheduleKind::PipeDream | ScheduleKind::PipeDreamVerticalSync => 1,
        _ => 8,
    };
    let microbatches = args.microbatches.unwrap_or(default);
    let steps = args.steps.unwrap_or(if kind.flushes() { 1 } else { 8 });
    let config = PipelineConfig { kind, stages: args.stages, microbatches, chunks };
    let times = StageTimes {
        forward: args.tf,
        backward_input: args.tb,
        backward_weight: args.tw,
        communication: args.tcomm,
    };
    let schedule = PipelineSchedule::over_steps(&config, steps)?;
    let peaks = validate(&schedule)?;
    let versions = weight_versions(&schedule)?;
    let config = PipelineConfig { microbatches: schedule.microbatches(), ..config };
    let timeline = simulate(&schedule, &times)?;
    if let Some(path) = &args.svg {
        let picture = svg::draw(&timeline, &title(&config, &timeline));
        std::fs::write(path, picture).map_err(|error| {
            Error::io("schedule", format!("cannot write {}: {error}", path.display()))
        })?;
    }
    if args.json {
        let mut report = report(&config, &times, &timeline, &peaks);
        if !kind.flushes() {
            report["steps"] = steps.into();
            for (rank, versions) in versions.iter().enumerate() {
                report["ranks"][rank]["weight_versions"] = (*versions).into();
                report["ranks"][rank]["weights"] = weights(schedule.instructions(rank));
            }
        }
        output::line(&report.to_string());
        return Ok(ExitCode::SUCCESS);
    }
    output::print(&text::draw(&timeline, LINE));
    output::print(&summary(&config, &times, &timeline, &peaks));
    if !kind.flushes() {
        output::print("weight versions of each rank, the newest included\n");
        for (rank, versions) in versions.iter().enumerate() {
            output::print(&format!("  rank {rank:<8} {versions}\n"));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Bubble, duration and activations, each beside its formula.
fn summary(
    config: &PipelineConfig,
    times: &StageTimes,
    timeline: &Timeline,
    peaks: &[PeakActivations],
) -> String {
    let kind = config.kind;
    let ideal = timeline.ideal();
    let (bubble, bubble_formula) = (timeline.bubble(), formula::bubble(config, times));
    let bound = if formula::is_exact(kind, times) { "" } else { ", a lower bound for these times" };
    let share = formula::bubble_share_text(kind).map_or(String::new(), |text| format!("{text} = "));
    let mut text = format!(
        "\n\
         bubble          {} s, {:.4} of the ideal {} s\n  \
         formula       {} = {} s, {share}{:.4}{bound}\n\
         iteration time  {} s\n  \
         formula       {} = {} s{bound}\n",
        seconds(bubble),
        bubble / ideal,
        seconds(ideal),
        formula::bubble_text(kind),
        seconds(bubble_formula),
        bubble_formula / ideal,
        seconds(timeline.total()),
        formula::iteration_text(kind),
        seconds(formula::iteration_time(config, times)),
    );
    text += match config.chunks {
        1 => "peak activations of each rank, in microbatches\n",
        _ => "peak activations of each rank, in microbatches of one chunk\n",
    };
    for (rank, peak) in peaks.iter().enumerate() {
        text += &format!("  rank {rank:<8} {}", peak.total);
        if kind.splits_backward() {
            let PeakActivations { activations, deferred, .. } = peak;
            text += &format!(
                ": {activations} waiting for backward and {deferred} for weight gradients at most"
            );
        }
        text.push('\n');
    }
    text
}

/// The same for machines, and when each computation runs.
fn report(
    config: &PipelineConfig,
    times: &StageTimes,
    timeline: &Timeline,
    peaks: &[PeakActivations],
) -> Value {
    let ranks: Vec<Value> = peaks
        .iter()
        .enumerate()
        .map(|(rank, peak)| {
            json!({
                "peak_activations": peak.activations,
                "peak_deferred": peak.deferred,
                "peak_total": peak.total,
                "timeline": timeline.computations(rank).map(span).collect::<Vec<_>>(),
            })
        })
        .collect();
    json!({
        "pipeline_schedule": config.kind.to_string(),
        "stages": config.stages,
        "microbatches": config.microbatches,
        "chunks": config.chunks,
        "tf": times.forward,
        "tb": times.backward_input,
        "tw": times.backward_weight,
        "tcomm": times.communication,
        "iteration_s": timeline.total(),
        "iteration_formula_s": formula::iteration_time(config, times),
        "ideal_s": timeline.ideal(),
        "bubble_s": timeline.bubble(),
        "bubble_share": timeline.bubble() / timeline.ideal(),
        "bubble_formula_s": formula::bubble(config, times),
        "formula_is_exact": formula::is_exact(config.kind, times),
        "ranks": ranks,
    })
}

/// The version of the weights that each computation uses, in their order.
fn weights(instructions: &[Instruction]) -> Value {
    let mut selected = 0;
    let used = instructions.iter().filter_map(|instruction| match *instruction {
        Instruction::UseWeights { version } => {
            selected = version;
            None
        }
        Instruction::Update { step } => {
            selected = step + 1;
            None
        }
        _ => instruction.microbatch_and_chunk().map(|_| selected),
    });
    used.collect::<Vec<usize>>().into()
}

/// One line above the picture.
fn title(config: &PipelineConfig, timeline: &Timeline) -> String {
    let PipelineConfig { kind, stages, microbatches, chunks } = *config;
    let chunked = if chunks > 1 { format!(", {chunks} chunks") } else { String::new() };
    format!(
        "{kind}, {stages} stages, {microbatches} microbatches{chunked}: bubble {} s, {:.3} of the ideal {} s",
        seconds(timeline.bubble()),
        timeline.bubble() / timeline.ideal(),
        seconds(timeline.ideal()),
    )
}

/// A computation as JSON: F, B and W are named as the instructions are.
fn span(span: &Span) -> Value {
    let (name, microbatch, chunk) = match span.instruction {
        Instruction::Forward { microbatch, chunk } => ("forward", microbatch, chunk),
        Instruction::Backward { microbatch, chunk } => ("backward", microbatch, chunk),
        Instruction::BackwardInput { microbatch, chunk } => ("backward_input", microbatch, chunk),
        Instruction::BackwardWeight { microbatch, chunk } => ("backward_weight", microbatch, chunk),
        _ => return Value::Null,
    };
    json!({ "op": name, "microbatch": microbatch, "chunk": chunk, "start": span.start, "end": span.end })
}

/// A duration without the noise of its last bits.
fn seconds(time: f64) -> String {
    // Differences of equal times may be a negative zero.
    format!("{}", (time * 1e9).round() / 1e9 + 0.0)
}
