//! Table 1 of arXiv:2104.04473: ten models on 32 to 3072 A100.
//!
//! Each row has the published TFLOP/s a GPU, the prediction with the cluster's own numbers, and the prediction with one
//! scale of the products' efficiency that is fitted to the other rows of the table.

use ferrotron_models::gpt::Recompute;
use ferrotron_nn::Sharding;
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_planner::cluster::{Cluster, Software};
use ferrotron_planner::{Layout, Offload, Prediction, Recomputation, RecordedRun, Space, search};
use ferrotron_tensor::Result;

use crate::run::{Run, cluster, fitted, print_errors, scaled, scales};

/// A row, with the settings of Megatron-LM's `examples/sc21`.
pub struct Row {
    pub name: &'static str,
    pub run: Run,
    /// Whether gradients were reduced during backward.
    overlap: bool,
    tflops: f64,
}

const fn row(
    name: &'static str,
    model: [usize; 3],
    [tensor, pipeline, micro_batch, chunks]: [usize; 4],
    [gpus, batch]: [usize; 2],
    overlap: bool,
    tflops: f64,
) -> Row {
    let layout = [tensor, pipeline, chunks];
    let run = Run { model, layout, batch: [micro_batch, batch], gpus, ..Run::MEGATRON };
    Row { name, run, overlap, tflops }
}

/// The table.
pub const ROWS: [Row; 10] = [
    row("1.7B", [24, 2304, 24], [1, 1, 16, 1], [32, 512], true, 137.0),
    row("3.6B", [30, 3072, 32], [2, 1, 16, 1], [64, 512], true, 138.0),
    row("7.5B", [36, 4096, 32], [4, 1, 16, 1], [128, 512], true, 142.0),
    row("18.4B", [40, 6144, 48], [8, 1, 8, 1], [256, 1024], true, 135.0),
    row("39.1B", [48, 8192, 64], [8, 2, 4, 1], [512, 1536], false, 138.0),
    row("76.1B", [60, 10240, 80], [8, 4, 2, 3], [1024, 1792], false, 140.0),
    row("145.6B", [80, 12288, 96], [8, 8, 2, 2], [1536, 2304], false, 148.0),
    row("310.1B", [96, 16384, 128], [8, 16, 1, 2], [1920, 2160], false, 155.0),
    // Heads of 160 elements, of which the runs had 128 and 160: kernels here take heads of at most 128.
    row("529.6B", [105, 20480, 160], [8, 35, 1, 3], [2520, 2520], false, 163.0),
    row("1008.0B", [128, 25600, 200], [8, 64, 1, 1], [3072, 3072], false, 163.0),
];

/// A row with its recording and its errors by scale.
struct Recorded {
    row: &'static Row,
    run: RecordedRun,
    cluster: Cluster,
    errors: Vec<f64>,
}

impl Recorded {
    fn new(row: &'static Row, cluster: &Cluster) -> Result<Recorded> {
        let software = Software { overlap_grad_reduce: row.overlap, ..cluster.software };
        let cluster = Cluster { software, ..cluster.clone() };
        let run = row.run.record(&cluster)?;
        let mut recorded = Recorded { row, run, cluster, errors: Vec::new() };
        recorded.errors = scales().map(|scale| recorded.error(scale)).collect::<Result<_>>()?;
        Ok(recorded)
    }

    /// The prediction with the products' efficiency multiplied by `scale`.
    fn predict(&self, scale: f64) -> Result<Prediction> {
        self.run.predict(&scaled(&self.cluster, scale), false)
    }

    /// Predicted over published TFLOP/s, less one.
    fn error(&self, scale: f64) -> Result<f64> {
        Ok(self.predict(scale)?.hardware_per_gpu() / 1e12 / self.row.tflops - 1.0)
    }
}

/// The scale that is fitted to the rows but the one that is left out.
fn fitted_without(rows: &[Recorded], left_out: Option<usize>) -> f64 {
    let others = rows.iter().enumerate().filter(|(row, _)| Some(*row) != left_out);
    fitted(others.map(|(_, row)| &row.errors))
}

/// Prints the table; returns the scale that is fitted to all rows, for other runs on this cluster.
pub fn table() -> Result<f64> {
    let cluster = cluster("dgx-a100-80")?;
    let rows: Vec<Recorded> =
        ROWS.iter().map(|row| Recorded::new(row, &cluster)).collect::<Result<_>>()?;
    println!(
        "{:10}{:>10}{:>10}{:>9}{:>8}{:>10}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}",
        "model",
        "published",
        "predicted",
        "error %",
        "scale",
        "left out",
        "error %",
        "bubble",
        "memory %",
        "tp %",
        "dp %",
        "GB"
    );
    let mut errors = [Vec::new(), Vec::new()];
    for (left_out, row) in rows.iter().enumerate() {
        let scale = fitted_without(&rows, Some(left_out));
        let (plain, scaled) = (row.predict(1.0)?, row.predict(scale)?);
        let found = [row.error(1.0)?, row.error(scale)?];
        let exposed = |kind: usize| 100.0 * scaled.mean.exposed[kind] / scaled.seconds();
        println!(
            "{:10}{:>10.0}{:>10.1}{:>9.1}{:>8.3}{:>10.1}{:>9.1}{:>9.3}{:>9.1}{:>9.1}{:>9.1}{:>9.1}",
            row.row.name,
            row.row.tflops,
            plain.hardware_per_gpu() / 1e12,
            100.0 * found[0],
            scale,
            scaled.hardware_per_gpu() / 1e12,
            100.0 * found[1],
            scaled.bubble(),
            100.0 * (scaled.mean.computing[1] + scaled.mean.computing[2]) / scaled.seconds(),
            exposed(0),
            exposed(2),
            scaled.peak_bytes() as f64 / 1e9
        );
        errors.iter_mut().zip(found).for_each(|(errors, found)| errors.push(found));
    }
    print_errors("with the cluster's own numbers", &errors[0]);
    print_errors("with a scale fitted to the other rows", &errors[1]);
    let scale = fitted_without(&rows, None);
    println!("fitted to all rows: {scale:.3}");
    Ok(scale)
}

/// Prints the plan of each row beside the published layout, both simulated.
pub fn plans(scale: f64) -> Result<()> {
    println!("\nPTD-P's rows, planned: seconds a step, simulated");
    let node = scaled(&cluster("dgx-a100-80")?, scale);
    for row in &ROWS {
        let software = Software { overlap_grad_reduce: row.overlap, ..node.software };
        let cluster = Cluster { software, ..node.clone() };
        let published = row.run.predict(&cluster)?.seconds();
        let space = Space {
            gpus: row.run.gpus,
            gpus_per_node: cluster.gpus_per_node,
            contexts: vec![1],
            layers: row.run.model[0],
            global_batch: row.run.batch[1],
            offloads: vec![Offload::None],
        };
        let run = |layout: &Layout| in_layout(&row.run, layout).estimator();
        let limit = cluster.gpu.memory;
        let plan = search(&space, &cluster, (limit, 1), run, |_, _| ())?;
        let Some(best) = plan.best.first() else {
            println!("{:10} nothing fits: MISSED", row.name);
            continue;
        };
        let (found, layout) = (best.prediction.seconds(), &best.layout);
        println!(
            "{:10} published {published:.3}, plan {found:.3}, {}: tensor {} sequence {} pipeline {} {} chunks {} micro-batch {} {} \
             ZeRO {}",
            row.name,
            if found <= published { "no slower" } else { "MISSED" },
            layout.tensor,
            layout.sequence_parallel,
            layout.pipeline,
            layout.schedule,
            layout.chunks,
            layout.micro_batch,
            layout.recompute.name(),
            layout.zero_stage
        );
    }
    Ok(())
}

/// A run in another layout.
fn in_layout(run: &Run, layout: &Layout) -> Run {
    Run {
        layout: [layout.tensor, layout.pipeline, layout.chunks],
        batch: [layout.micro_batch, layout.global_batch],
        gpus: layout.gpus,
        recompute: match layout.recompute {
            Recomputation::None => Recompute::None,
            Recomputation::Selective => Recompute::SELECTIVE,
            Recomputation::Full => Recompute::FULL,
        },
        zero_bubble: layout.schedule.splits_backward(),
        sequence_parallel: match layout.sequence_parallel {
            false => SequenceParallel::Off,
            true => SequenceParallel::On,
        },
        sharding: Sharding::ALL[usize::from(layout.zero_stage)],
        ..*run
    }
}
