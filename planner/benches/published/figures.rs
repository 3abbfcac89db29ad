//! The claims that the text of arXiv:2104.04473 makes on its figures. Plotted values are in no text.

use ferrotron_models::gpt::Recompute;
use ferrotron_planner::cluster::{Cluster, Software};
use ferrotron_tensor::Result;

use crate::run::{Run, cluster, scaled};

/// Prints a claim, whether it holds, and the numbers.
fn claim(figure: &str, text: &str, holds: bool, numbers: &str) {
    println!("{figure:4}{:9}{text}: {numbers}", if holds { "holds" } else { "MISSED" });
}

fn list(numbers: &[f64]) -> String {
    numbers.iter().map(|number| format!("{number:.1}")).collect::<Vec<_>>().join(", ")
}

/// The place of the largest number.
fn best(numbers: &[f64]) -> usize {
    (0..numbers.len()).max_by(|a, b| numbers[*a].total_cmp(&numbers[*b])).unwrap_or(0)
}

fn falls(numbers: &[f64]) -> bool {
    numbers.windows(2).all(|pair| pair[1] < pair[0])
}

/// Prints all claims, predicted with the products' efficiency multiplied by `scale`.
pub fn table(scale: f64) -> Result<()> {
    let cluster = scaled(&cluster("dgx-a100-80")?, scale);
    let software = Software { overlap_grad_reduce: false, ..cluster.software };
    let cluster = Cluster { software, ..cluster };
    println!("\narXiv:2104.04473, claims of the text on figures; TFLOP/s a GPU");
    micro_batches(&cluster)?;
    pipelines(&cluster)?;
    tensor_or_pipeline(&cluster)?;
    data_and_others(&cluster)?;
    recomputation(&cluster)?;
    scatter_gather(&cluster)
}

/// Figures 7, 8 and 16.
fn micro_batches(cluster: &Cluster) -> Result<()> {
    let sizes = [1, 2, 4, 8, 16];
    let run = |micro| Run { model: [4, 4096, 128], batch: [micro, micro], ..Run::MEGATRON };
    let steps = sizes.map(|micro| run(micro).predict(cluster));
    let steps = steps.into_iter().collect::<Result<Vec<_>>>()?;
    let tflops: Vec<f64> = steps.iter().map(|step| step.hardware_per_gpu() / 1e12).collect();
    let gain = tflops[best(&tflops)] / tflops[0];
    let text = "a larger micro-batch is up to 1.3 times as fast";
    claim("7", text, (1.2..1.35).contains(&gain), &format!("{gain:.2}, {}", list(&tflops)));
    // Equation (1) with the same times and (p, t) = (8, 8).
    for batch in [128.0, 512.0] {
        let rates: Vec<f64> = sizes
            .iter()
            .zip(&steps)
            .map(|(micro, step)| {
                let passes = step.mean.computing.iter().sum::<f64>() - step.mean.computing[3];
                batch / ((batch / *micro as f64 + 7.0) * passes)
            })
            .collect();
        let most = sizes[best(&rates)];
        let text = format!("the best micro-batch of a batch of {batch} is 4");
        claim("8", &text, most == 4, &format!("{most}, samples/s {}", list(&rates)));
    }
    for batch in [128, 512] {
        let sizes = [1, 2, 4, 8];
        let run = |micro| Run {
            model: [32, 15360, 120],
            layout: [8, 8, 1],
            batch: [micro, batch],
            gpus: 64,
            ..Run::MEGATRON
        };
        let tflops = sizes.map(|micro| run(micro).tflops(cluster));
        let tflops = tflops.into_iter().collect::<Result<Vec<f64>>>()?;
        let most = sizes[best(&tflops)];
        let text = format!("the best micro-batch of a batch of {batch} is 2");
        claim("16", &text, most == 2, &format!("{most}, {}", list(&tflops)));
    }
    Ok(())
}

/// Figures 11 and 12.
fn pipelines(cluster: &Cluster) -> Result<()> {
    let mut kept = Vec::new();
    for batch in [8, 128] {
        let run = |stages: usize| Run {
            model: [3 * stages, 20480, 160],
            layout: [8, stages, 1],
            batch: [1, batch],
            gpus: 8 * stages,
            ..Run::MEGATRON
        };
        let tflops = [1, 2, 4, 8].map(|stages| run(stages).tflops(cluster));
        let tflops = tflops.into_iter().collect::<Result<Vec<f64>>>()?;
        println!("     batch {batch}, 1 to 8 stages: {}", list(&tflops));
        kept.push(tflops[3] / tflops[0]);
    }
    let text = "a batch of 128 scales better than one of 8";
    claim(
        "11",
        text,
        kept[1] > kept[0],
        &format!("8 stages keep {:.2} and {:.2}", kept[1], kept[0]),
    );
    let mut gaps = Vec::new();
    for batch in (12..=60).step_by(12) {
        let run = |chunks| Run { layout: [8, 12, chunks], ..gpt_3(batch) };
        let [interleaved, plain] = [4, 1].map(|chunks| run(chunks).tflops(cluster));
        gaps.push(interleaved? / plain?);
    }
    let holds = gaps[gaps.len() - 1] > 1.0 && falls(&gaps);
    let text = "interleaving is faster, less so with larger batches";
    let ratios: Vec<f64> = gaps.iter().map(|gap| 100.0 * (gap - 1.0)).collect();
    claim("12", text, holds, &format!("by % {}", list(&ratios)));
    Ok(())
}

/// 175 billion parameters on 96 GPUs.
fn gpt_3(batch: usize) -> Run {
    Run { model: [96, 12288, 96], layout: [8, 12, 4], batch: [1, batch], gpus: 96, ..Run::MEGATRON }
}

/// Figure 13.
fn tensor_or_pipeline(cluster: &Cluster) -> Result<()> {
    for batch in [32, 128] {
        let sizes = [2, 4, 8, 16, 32];
        let run = |tensor: usize| Run {
            model: [32, 20480, 160],
            layout: [tensor, 64 / tensor, 1],
            batch: [1, batch],
            gpus: 64,
            ..Run::MEGATRON
        };
        let tflops = sizes.map(|tensor| run(tensor).tflops(cluster));
        let tflops = tflops.into_iter().collect::<Result<Vec<f64>>>()?;
        let most = sizes[best(&tflops)];
        let text = format!("with a batch of {batch} the best tensor-parallel size is 8");
        claim("13", &text, most == 8, &format!("{most}, {}", list(&tflops)));
    }
    Ok(())
}

/// Figures 14 and 15.
fn data_and_others(cluster: &Cluster) -> Result<()> {
    for batch in [32, 128, 512] {
        let run = |layout: [usize; 3]| Run {
            model: [32, 3840, 32],
            layout,
            batch: [1, batch],
            gpus: 64,
            ..Run::MEGATRON
        };
        // At most as many data-parallel ranks as samples.
        let sizes: Vec<usize> =
            [2, 4, 8, 16, 32].into_iter().filter(|size| 64 / size <= batch).collect();
        let of = |layout: &dyn Fn(usize) -> [usize; 3]| -> Result<Vec<f64>> {
            sizes.iter().map(|size| run(layout(*size)).tflops(cluster)).collect()
        };
        let pipeline = of(&|size| [1, size, 1])?;
        let text = format!("with a batch of {batch} throughput falls with the stages");
        claim("14", &text, falls(&pipeline), &list(&pipeline));
        let tensor = of(&|size| [size, 1, 1])?;
        let within = tensor[2] / tensor[1];
        let across = tensor[3] / tensor[2];
        let text =
            format!("with a batch of {batch} it falls with tensor parallelism, most off the node");
        claim("15", &text, falls(&tensor) && across < within, &list(&tensor));
    }
    Ok(())
}

/// Figure 17.
fn recomputation(cluster: &Cluster) -> Result<()> {
    let run = |batch, recompute| Run {
        model: [80, 12288, 96],
        layout: [8, 16, 1],
        batch: [1, batch],
        gpus: 128,
        recompute,
        ..Run::MEGATRON
    };
    let sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256];
    let rate = |batch: usize, recompute| -> Result<f64> {
        Ok(batch as f64 / run(batch, recompute).predict(cluster)?.seconds())
    };
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for batch in sizes {
        with.push(rate(batch, Recompute::FULL)?);
        without.push(rate(batch, Recompute::None)?);
    }
    let slower: Vec<f64> =
        with.iter().zip(&without).map(|(with, without)| 100.0 * (1.0 - with / without)).collect();
    let most = slower.iter().fold(0.0, |most: f64, percent| most.max(*percent));
    let text = "recomputation is up to 33 % slower";
    claim("17", text, (20.0..33.5).contains(&most), &format!("by % {}", list(&slower)));
    // Which batches fit without recomputation is not in the text.
    let ratios: Vec<f64> = without[..5].iter().map(|without| with[8] / without).collect();
    println!(
        "17  not judged: 256 with it over 1, 2, 4, 8, 16 without it, times as fast: {}",
        list(&ratios)
    );
    Ok(())
}

/// Figure 18.
fn scatter_gather(cluster: &Cluster) -> Result<()> {
    let software = Software { scatter_gather: false, ..cluster.software };
    let whole = Cluster { software, ..cluster.clone() };
    let mut gains = Vec::new();
    for batch in (12..=60).step_by(12) {
        gains.push(100.0 * (gpt_3(batch).tflops(cluster)? / gpt_3(batch).tflops(&whole)? - 1.0));
    }
    let most = gains.iter().fold(0.0, |most: f64, gain| most.max(*gain));
    let text = "sending shards between stages is up to 11 % faster";
    claim("18", text, (5.0..15.0).contains(&most), &format!("by % {}", list(&gains)));
    Ok(())
}
