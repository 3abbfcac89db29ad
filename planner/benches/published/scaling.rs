//! Scaling of Megatron-LM in 2019, and ZeRO-3 in table 2 of PTD-P.

use ferrotron_nn::Sharding;
use ferrotron_planner::cluster::{Cluster, Link, Software};
use ferrotron_tensor::{DType, Result};

use crate::run::{Run, cluster, print_errors, scaled};

/// Table 1 and figure 5 of arXiv:1909.08053: layers, hidden size, heads, tensor-parallel size; share of linear scaling
/// without and with 64 data-parallel ranks.
const MEGATRON: [([usize; 4], [f64; 2]); 4] = [
    ([40, 1536, 16, 1], [1.00, 0.96]),
    ([54, 1920, 20, 2], [0.95, 0.83]),
    ([64, 2304, 24, 4], [0.82, 0.79]),
    ([72, 3072, 32, 8], [0.77, 0.74]),
];
/// Table 8: the first model with a batch of 8 on more GPUs, times as fast as on one.
const STRONG: [(usize, f64); 3] = [(2, 1.64), (4, 2.34), (8, 2.98)];

/// Prints the scaling from 1 to 512 V100.
pub fn megatron() -> Result<()> {
    let cluster = cluster("dgx-2")?;
    // Megatron-LM's README of 2019: reducing gradients during backward made the two smaller models slower.
    let overlapped = |tensor: usize| {
        let software = Software {
            overlap_grad_reduce: tensor > 2,
            copies_gradients: true,
            ..cluster.software
        };
        Cluster { software, ..cluster.clone() }
    };
    let run = |[layers, hidden, heads, tensor]: [usize; 4], data: usize| Run {
        model: [layers, hidden, heads],
        layout: [tensor, 1, 1],
        batch: [8, 8 * data],
        gpus: tensor * data,
        seq_length: 1024,
        dtype: DType::F16,
        ..Run::MEGATRON
    };
    println!("\narXiv:1909.08053, table 1 and figure 5: share of linear scaling");
    let base = run(MEGATRON[0].0, 1).tflops(&cluster)?;
    println!("one V100: {base:.1} TFLOP/s, published 39");
    println!("{:>6}{:>11}{:>11}{:>9}{:>9}", "GPUs", "published", "predicted", "error %", "TFLOP/s");
    let mut errors = Vec::new();
    for (data, column) in [(1, 0), (64, 1)] {
        for (model, published) in MEGATRON {
            let run = run(model, data);
            let tflops = run.tflops(&overlapped(model[3]))?;
            let error = tflops / base / published[column] - 1.0;
            println!(
                "{:>6}{:>11.2}{:>11.3}{:>9.1}{:>9.1}",
                run.gpus,
                published[column],
                tflops / base,
                100.0 * error,
                tflops
            );
            if run.gpus > 1 {
                errors.push(error);
            }
        }
    }
    print_errors("scaling of Megatron-LM 2019", &errors);
    let mut errors = Vec::new();
    let alone = run(MEGATRON[0].0, 1).predict(&cluster)?.seconds();
    for (tensor, published) in STRONG {
        let [layers, hidden, heads, _] = MEGATRON[0].0;
        let seconds = run([layers, hidden, heads, tensor], 1).predict(&cluster)?.seconds();
        let error = alone / seconds / published - 1.0;
        println!("{tensor} GPUs: {:.2} times as fast, published {published}", alone / seconds);
        errors.push(error);
    }
    print_errors("strong scaling, table 8", &errors);
    Ok(())
}

/// ZeRO-3's rows of table 2 of arXiv:2104.04473, by model: GPUs, micro-batch, batch, TFLOP/s a GPU.
type ZeroRows = [([usize; 3], f64); 3];
const ZERO: [(&str, [usize; 3], ZeroRows); 2] = [
    (
        "174.6B",
        [96, 12288, 96],
        [([384, 4, 1536], 144.0), ([768, 2, 1536], 88.0), ([1536, 1, 1536], 44.0)],
    ),
    (
        "529.6B",
        [105, 20480, 160],
        [([640, 4, 2560], 138.0), ([1120, 2, 2240], 98.0), ([2240, 1, 2240], 48.0)],
    ),
];

/// Shares of the network's bandwidth that are tried.
const SHARES: usize = 80;

/// Prints ZeRO-3's rows. One number is fitted to the rows of the other model: the share of the network's bandwidth that
/// gathers of single parameters reach.
pub fn zero(scale: f64) -> Result<()> {
    let cluster = scaled(&cluster("dgx-a100-80")?, scale);
    let share = |index: usize| 0.05 * 1.03_f64.powi(index as i32);
    let with = |share: f64| -> Cluster {
        let network = Link { bandwidth: share * cluster.network.bandwidth, ..cluster.network };
        Cluster { network, ..cluster.clone() }
    };
    println!("\narXiv:2104.04473, table 2, ZeRO-3: TFLOP/s a GPU");
    // Errors by model, row and share, and those of the cluster's own network.
    let mut found: Vec<Vec<(f64, Vec<f64>)>> = Vec::new();
    for (_, model, rows) in ZERO {
        let mut of_model = Vec::new();
        for ([gpus, micro, batch], tflops) in rows {
            let run = Run {
                model,
                batch: [micro, batch],
                gpus,
                sharding: Sharding::Weights,
                ..Run::MEGATRON
            };
            let recorded = run.record(&cluster)?;
            let error = |cluster: &Cluster| -> Result<f64> {
                let step = recorded.predict(cluster, false)?;
                Ok(step.hardware_per_gpu() / 1e12 / tflops - 1.0)
            };
            let errors: Vec<f64> =
                (0..SHARES).map(|index| error(&with(share(index)))).collect::<Result<_>>()?;
            of_model.push((error(&cluster)?, errors));
        }
        found.push(of_model);
    }
    println!(
        "{:10}{:>6}{:>7}{:>11}{:>11}{:>9}{:>8}{:>10}{:>9}",
        "model", "GPUs", "micro", "published", "whole", "error %", "share", "left out", "error %"
    );
    let mut errors = Vec::new();
    for (index, (name, _, rows)) in ZERO.into_iter().enumerate() {
        let others = &found[1 - index];
        let loss =
            |share: usize| -> f64 { others.iter().map(|(_, errors)| errors[share].powi(2)).sum() };
        let best = (0..SHARES).min_by(|a, b| loss(*a).total_cmp(&loss(*b))).unwrap_or(0);
        for (([gpus, micro, _], tflops), (whole, by_share)) in rows.iter().zip(&found[index]) {
            println!(
                "{name:10}{gpus:>6}{micro:>7}{tflops:>11.0}{:>11.1}{:>9.1}{:>8.3}{:>10.1}{:>9.1}",
                tflops * (1.0 + whole),
                100.0 * whole,
                share(best),
                tflops * (1.0 + by_share[best]),
                100.0 * by_share[best]
            );
            errors.push(by_share[best]);
        }
    }
    print_errors("ZeRO-3, with a share fitted to the other model", &errors);
    Ok(())
}
