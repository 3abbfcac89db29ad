//! Tables 4 and 5 of arXiv 2205.05198, and its memory formulas beside the bytes of this project.

use ferrotron_models::gpt::Recompute;
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_planner::RecordedRun;
use ferrotron_planner::cluster::Cluster;
use ferrotron_tensor::Result;

use crate::korthikanti::{MODELS, PublishedModel, Saving};
use crate::run::{Run, cluster, fitted, print_errors, scaled, scales};

/// Table 4: milliseconds of a layer of the 22B model, forward and backward.
const LAYER: [(&str, Recompute, SequenceParallel, [f64; 2]); 5] = [
    ("baseline", Recompute::None, SequenceParallel::Off, [7.7, 11.9]),
    ("sequence parallel", Recompute::None, SequenceParallel::On, [7.2, 11.8]),
    ("full", Recompute::FULL, SequenceParallel::Off, [7.7, 19.5]),
    ("selective", Recompute::SELECTIVE, SequenceParallel::Off, [7.7, 13.2]),
    ("selective, sequence", Recompute::SELECTIVE, SequenceParallel::On, [7.2, 13.1]),
];

/// Table 5: batch, seconds with full recomputation, and with selective recomputation and sequence parallelism. Heads have
/// at most 128 elements here, and 160 in the last two models.
const STEP: [(usize, [usize; 3], [f64; 2]); 4] = [
    (4, [48, 6144, 64], [1.42, 1.10]),
    (64, [96, 12288, 96], [18.13, 13.75]),
    (280, [105, 20480, 160], [49.05, 37.83]),
    (512, [128, 25600, 200], [94.42, 71.49]),
];

/// A run of table 5.
fn step(index: usize, recompute: Recompute, sequence_parallel: SequenceParallel) -> Run {
    let (batch, model, _) = STEP[index];
    let [micro_batch, stages, chunks] = MODELS[index].layout.map(|size| size as usize);
    Run {
        model,
        layout: [8, stages, chunks],
        batch: [micro_batch, batch],
        gpus: 8 * stages,
        recompute,
        sequence_parallel,
        ..Run::MEGATRON
    }
}

/// Prints the tables. The scale of table 5's rows is fitted to the other models' rows, that of table 4, a layer of the first
/// model, to those too; `scale` is that of PTD-P's table 1, whose software is older.
pub fn tables(scale: f64) -> Result<()> {
    let cluster = cluster("dgx-a100-80")?;
    let without_first = steps(&cluster, scale)?;
    layers(&scaled(&cluster, without_first))?;
    bytes(&cluster)
}

fn layers(cluster: &Cluster) -> Result<()> {
    println!("\narXiv 2205.05198, table 4: ms of a layer, forward and backward");
    let mut errors = Vec::new();
    for (name, recompute, sequence_parallel, published) in LAYER {
        let passes = |layers: usize| -> Result<[f64; 2]> {
            let mut run = step(0, recompute, sequence_parallel);
            run.model[0] = layers;
            let found = run.predict(cluster)?.replay;
            let spans = &found.timeline.ranks[0];
            Ok([0, 1].map(|pass: usize| 1e3 * (spans[pass].end - spans[pass].start)))
        };
        let (one, three) = (passes(1)?, passes(3)?);
        let found = [0, 1].map(|pass: usize| (three[pass] - one[pass]) / 2.0);
        let off = [0, 1].map(|pass: usize| found[pass] / published[pass] - 1.0);
        println!(
            "{name:20}{:>7.1}{:>7.1}  published{:>7.1}{:>7.1}  error %{:>7.1}{:>7.1}",
            found[0],
            found[1],
            published[0],
            published[1],
            100.0 * off[0],
            100.0 * off[1]
        );
        errors.extend(off);
    }
    print_errors("table 4, with a scale fitted to the larger models' steps", &errors);
    Ok(())
}

/// Prints table 5; returns the scale that is fitted to all models but the first.
fn steps(cluster: &Cluster, older: f64) -> Result<f64> {
    println!("\narXiv 2205.05198, table 5: seconds of a step");
    let forms = [
        ("full", Recompute::FULL, SequenceParallel::Off),
        ("selective, sequence", Recompute::SELECTIVE, SequenceParallel::On),
    ];
    // By model and form: the recording, and errors by scale.
    let mut rows: Vec<(usize, usize, RecordedRun, Vec<f64>)> = Vec::new();
    for (index, (_, _, published)) in STEP.iter().enumerate() {
        for (form, (_, recompute, sequence_parallel)) in forms.into_iter().enumerate() {
            let run = step(index, recompute, sequence_parallel).record(cluster)?;
            let error = |scale| -> Result<f64> {
                let found = run.predict(&scaled(cluster, scale), false)?;
                Ok(found.seconds() / published[form] - 1.0)
            };
            let errors = scales().map(error).collect::<Result<_>>()?;
            rows.push((index, form, run, errors));
        }
    }
    let without =
        |left_out: usize| fitted(rows.iter().filter(|row| row.0 != left_out).map(|row| &row.3));
    let mut errors = [Vec::new(), Vec::new()];
    for (index, form, run, _) in &rows {
        let published = STEP[*index].2[*form];
        let scale = without(*index);
        let found = run.predict(&scaled(cluster, scale), false)?;
        let error = found.seconds() / published - 1.0;
        let old = run.predict(&scaled(cluster, older), false)?.seconds() / published - 1.0;
        let share = |seconds: f64| 100.0 * seconds / found.seconds();
        println!(
            "{:5} {:20}{:>7.2}  scale {scale:.3}{:>7.2}  error %{:>6.1}  older scale {:>6.1}  products {:.1} % \
             memory {:.1} % attention {:.1} % tensor {:.1} % pipeline {:.1} % bubble {:.1} %",
            MODELS[*index].name,
            forms[*form].0,
            published,
            found.seconds(),
            100.0 * error,
            100.0 * old,
            share(found.mean.computing[0]),
            share(found.mean.computing[2]),
            share(found.mean.computing[1]),
            share(found.mean.exposed[0]),
            share(found.mean.exposed[3]),
            share(found.mean.bubble)
        );
        errors[0].push(error);
        errors[1].push(old);
    }
    print_errors("table 5, with a scale fitted to the other models", &errors[0]);
    print_errors("table 5, with the scale of PTD-P's table 1", &errors[1]);
    Ok(without(0))
}

/// Formulas beside exact bytes of the first stage.
fn bytes(cluster: &Cluster) -> Result<()> {
    const GIB: f64 = (1_u64 << 30) as f64;
    println!(
        "\narXiv 2205.05198, figures 1 and 7: GiB of the first stage, percent of tensor parallelism"
    );
    println!("{:6}{:22}{:>12}{:>12}{:>12}", "model", "form", "published", "formula", "here");
    let forms = [
        ("tensor", Saving::Tensor, Recompute::None, SequenceParallel::Off),
        ("sequence", Saving::Sequence, Recompute::None, SequenceParallel::On),
        ("selective", Saving::Selective, Recompute::SELECTIVE, SequenceParallel::Off),
        ("both", Saving::Both, Recompute::SELECTIVE, SequenceParallel::On),
        ("full", Saving::Full, Recompute::FULL, SequenceParallel::Off),
    ];
    for (index, model) in MODELS.iter().enumerate() {
        let PublishedModel { name, figure_1: [states, none, both], figure_7, .. } = model;
        let first = |recompute, sequence_parallel| {
            step(index, recompute, sequence_parallel).first_stage(cluster)
        };
        let memory = first(Recompute::None, SequenceParallel::Off)?;
        let here = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes;
        let (formula, here) = (model.states(), here as f64 / GIB);
        println!("{name:6}{:22}{states:>12.2}{formula:>12.2}{here:>12.2}", "states");
        let whole = memory.activations_bytes as f64;
        for (place, (form, saving, recompute, sequence_parallel)) in forms.into_iter().enumerate() {
            let bytes = first(recompute, sequence_parallel)?.activations_bytes as f64;
            let published = [Some(*none), None, None, Some(*both), None][place];
            let published = published.map_or("-".to_string(), |gib| format!("{gib:.2}"));
            let formula = model.activations(saving);
            println!("{name:6}{form:22}{published:>12}{formula:>12.2}{:>12.2}", bytes / GIB);
            if let Some(published) = place.checked_sub(1).map(|place| figure_7[place]) {
                let formula = 100.0 * formula / model.activations(Saving::Tensor);
                let here = 100.0 * bytes / whole;
                println!("{:6}{:22}{published:>12.2}{formula:>12.2}{here:>12.2}", "", "  %");
            }
        }
    }
    Ok(())
}
