//! Predicts steps of this machine beside measured ones: `cargo bench --bench own_runs [-- ROUNDS] [KEPT_FOLDER]`.
//!
//! Each round calibrates the machine (`ferrotron bench --calibrate`), and then trains 16 layouts of 1 to 4 ranks of one
//! thread for some steps. All of it is bound to two cores (`taskset`), so that at most two threads are busy at any time, also
//! where a layout has four ranks. A probe before and behind each of them tells the speed of the machine: products of both
//! cores at once. `ferrotron simulate` predicts the steps with the calibration of the same round. Medians over rounds are compared:
//!
//! - The error of a layout is predicted over measured seconds, less 1. It should be at most 15 % on average.
//! - Kendall's tau counts pairs of layouts in the same order, less those in the other, over all. Pairs whose measured times
//!   differ by less than the noise of both are left out; a pair with equal predictions counts 0. It should be at least 0.8.
//! - Waits are those of a traced run, mean over ranks and steps: exposed communication, and the bubble of pipelines. Beside
//!   them are those of the simulated step.
//!
//! Results are in `docs/planning.md`.

use ferrotron::models::bench::median;
use ferrotron::tensor::RandomKey;
use ferrotron::tensor::ops::matmul::matmul;
use ferrotron::{DType, Device, Result, Tensor};
use serde_json::Value;
use std::cmp::Ordering;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// The model: 3.7 million parameters.
const MODEL: &str = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 1024 \
                     --dtype f32 --threads 1";
const VOCAB: f64 = 1024.0;
/// Samples of a step, and of a micro-batch on one rank.
const BATCH: &str = "--global-batch-size 16 --micro-batch-size";

/// Name, ranks, samples of a micro-batch, options.
type Layout = (&'static str, usize, usize, &'static str);
const LAYOUTS: [Layout; 16] = [
    ("1 rank", 1, 8, ""),
    ("1 rank, full recomputation", 1, 8, "--recompute-granularity full"),
    ("1 rank, micro-batch 1", 1, 1, ""),
    ("data 2", 2, 8, ""),
    ("data 2, ZeRO 3, micro-batch 1", 2, 1, "--zero-stage 3"),
    ("data 2, full recomputation", 2, 8, "--recompute-granularity full"),
    ("tensor 2", 2, 8, "--tensor-model-parallel-size 2"),
    ("tensor 2, sequence", 2, 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    ("context 2", 2, 8, "--context-parallel-size 2"),
    ("pipeline 2", 2, 4, "--pipeline-model-parallel-size 2"),
    ("pipeline 2, naive", 2, 4, "--pipeline-model-parallel-size 2 --pipeline-schedule naive"),
    ("pipeline 2, zb-h1", 2, 2, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
    ("data 4, ZeRO 1", 4, 4, "--zero-stage 1"),
    (
        "tensor 4, full recomputation",
        4,
        2,
        "--tensor-model-parallel-size 4 --recompute-granularity full",
    ),
    (
        "tensor 2, pipeline 2",
        4,
        4,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    ),
    ("pipeline 4", 4, 8, "--pipeline-model-parallel-size 4"),
];
/// Steps of a run; the first ones do not count.
const STEPS: usize = 14;
const WARMUP: usize = 4;
/// Cores of all runs, calibrations and probes.
const CORES: usize = 2;
/// Rows and columns of the probe's products.
const PROBE: usize = 512;

/// The results of a layout's rounds.
#[derive(Default)]
struct Found {
    measured: Vec<f64>,
    predicted: Vec<f64>,
    /// Products of the probe, 10^9 operations a second.
    probes: Vec<f64>,
    /// Waits of the last round, measured and predicted.
    waits: [f64; 2],
}

fn main() -> Result<()> {
    // `cargo test` runs benches too, without this argument.
    if !std::env::args().any(|argument| argument == "--bench") {
        return Ok(());
    }
    bind_to_cores();
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let rounds: usize = words.iter().find_map(|word| word.parse().ok()).unwrap_or(3);
    assert!(rounds >= 2, "{rounds} rounds tell no noise: ask for at least 2");
    let kept = words.iter().find(|word| word.parse::<usize>().is_err());
    let temporary = tempfile::tempdir().expect("a folder");
    let folder = kept.map_or(temporary.path(), Path::new);
    std::fs::create_dir_all(folder).expect("the folder can be made");
    write_tokens(folder);
    let started = Instant::now();
    let mut found: Vec<Found> = LAYOUTS.iter().map(|_| Found::default()).collect();
    let mut calibrated = Vec::new();
    for round in 0..rounds {
        let cluster = format!("own-{round}.toml");
        let before = probe()?;
        run(folder, &format!("bench --calibrate {cluster} --threads 1 --dtype f32"));
        calibrated.push((before + probe()?) / 2.0);
        for (found, layout) in found.iter_mut().zip(LAYOUTS) {
            measure(folder, layout, found, round + 1 == rounds)?;
            predict(folder, layout, found, &cluster);
        }
        println!("round {} of {rounds}: {:.0} s", round + 1, started.elapsed().as_secs_f64());
    }
    report(&found, &calibrated);
    Ok(())
}

/// Binds this process, and with it all that it starts, to the first of the cores that it may use.
fn bind_to_cores() {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux tells the cores");
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let first = allowed.expect("Linux tells the cores").trim().split(',').flat_map(|range| {
        let (from, to) = range.split_once('-').unwrap_or((range, range));
        let core = |text: &str| text.parse::<usize>().expect("a core is a number");
        core(from)..=core(to)
    });
    let first: Vec<String> = first.take(CORES).map(|core| core.to_string()).collect();
    let process = std::process::id().to_string();
    let bound = Command::new("taskset")
        .args(["--all-tasks", "--cpu-list", "--pid", &first.join(","), &process])
        .output()
        .expect("taskset of util-linux binds to cores: install it");
    assert!(bound.status.success(), "{}", String::from_utf8_lossy(&bound.stderr));
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    assert!(cores <= CORES, "{cores} cores are left by taskset");
}

/// Runs the program in `folder`, and returns its output.
fn run(folder: &Path, words: &str) -> String {
    let mut program = Command::new(env!("CARGO_BIN_EXE_ferrotron"));
    let output = program.args(words.split_whitespace()).current_dir(folder).output();
    let output = output.expect("the program starts");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ferrotron {words}: {complaint}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Tokens that no model can learn.
fn write_tokens(folder: &Path) {
    let key = RandomKey::new(0, 0, "own runs");
    let tokens = (0..100_000).map(|at| (key.uniform(at) * VOCAB) as u16);
    let bytes: Vec<u8> = tokens.flat_map(u16::to_le_bytes).collect();
    std::fs::write(folder.join("tokens.bin"), bytes).expect("tokens can be written");
}

/// 10^9 operations a second that the products of all these cores reach together.
fn probe() -> Result<f64> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let device = Device::cpu(cores)?;
    let matrix = Tensor::full(&device, DType::F32, &[PROBE, PROBE], 0.5)?;
    let mut seconds = Vec::new();
    for _ in 0..30 {
        let started = Instant::now();
        matmul(&matrix, &matrix)?;
        seconds.push(started.elapsed().as_secs_f64());
    }
    Ok(2.0 * (PROBE as f64).powi(3) / median(seconds) / 1e9)
}

/// Trains some steps; the last round does it again with a trace.
fn measure(
    folder: &Path,
    (_, ranks, micro, options): Layout,
    found: &mut Found,
    last: bool,
) -> Result<()> {
    let metrics = folder.join("metrics.jsonl");
    let train = format!(
        "train {MODEL} {BATCH} {micro} {options} --nproc {ranks} --data tokens.bin --train-iters {STEPS} --eval-interval 0 \
         --metrics metrics.jsonl"
    );
    let before = probe()?;
    let _ = std::fs::remove_file(&metrics);
    run(folder, &train);
    found.probes.push((before + probe()?) / 2.0);
    let lines = std::fs::read_to_string(&metrics).expect("there are metrics");
    let steps = lines.lines().skip(WARMUP).map(|line| {
        let step: Value = serde_json::from_str(line).expect("a line is JSON");
        step["step_ms"].as_f64().expect("a duration") / 1e3
    });
    found.measured.push(median(steps.collect()));
    if last && ranks > 1 {
        let _ = std::fs::remove_file(&metrics);
        let traced = WARMUP + 1..=STEPS;
        run(folder, &format!("{train} --trace run.json --trace-steps {}-{STEPS}", WARMUP + 1));
        found.waits[0] = waits(&folder.join("run.json")) / (ranks * traced.count()) as f64;
    }
    Ok(())
}

/// Seconds of all waits of a trace.
fn waits(path: &Path) -> f64 {
    let text = std::fs::read_to_string(path).expect("there is a trace");
    let trace: Value = serde_json::from_str(&text).expect("a trace is JSON");
    let events = trace["traceEvents"].as_array().into_iter().flatten();
    let waits = events.filter(|event| event["cat"] == "wait");
    waits.filter_map(|event| event["dur"].as_f64()).sum::<f64>() / 1e6
}

fn predict(folder: &Path, (_, ranks, micro, options): Layout, found: &mut Found, cluster: &str) {
    let words = format!(
        "simulate --cluster {cluster} --json {MODEL} {BATCH} {micro} {options} --nproc {ranks} --data tokens.bin"
    );
    let report: Value = serde_json::from_str(&run(folder, &words)).expect("the report is JSON");
    let number = |key: &str| report[key].as_f64().expect("a number");
    found.predicted.push(number("s_per_step"));
    let exposed = report["exposed_communication_s"].as_object().into_iter().flatten();
    let exposed: f64 = exposed.filter_map(|(_, seconds)| seconds.as_f64()).sum();
    found.waits[1] = exposed + number("bubble_s");
}

/// Half of the difference between the slowest and the fastest round, over the median.
fn noise(rounds: &[f64]) -> f64 {
    let (least, most) = rounds
        .iter()
        .fold((f64::INFINITY, 0.0_f64), |(least, most), &of| (least.min(of), most.max(of)));
    (most - least) / 2.0 / median(rounds.to_vec())
}

fn report(found: &[Found], calibrated: &[f64]) {
    println!(
        "{:32}{:>6}{:>14}{:>9}{:>15}{:>9}{:>8}{:>22}{:>11}",
        "layout",
        "ranks",
        "measured, ms",
        "noise %",
        "predicted, ms",
        "error %",
        "probe",
        "waits, ms: measured",
        "predicted"
    );
    let mut errors = Vec::new();
    for ((name, ranks, ..), found) in LAYOUTS.iter().zip(found) {
        let [measured, predicted] =
            [&found.measured, &found.predicted].map(|rounds| median(rounds.clone()));
        let error = predicted / measured - 1.0;
        errors.push(error.abs());
        println!(
            "{name:32}{ranks:>6}{:>14.1}{:>9.1}{:>15.1}{:>9.1}{:>8.0}{:>22.1}{:>11.1}",
            1e3 * measured,
            100.0 * noise(&found.measured),
            1e3 * predicted,
            100.0 * error,
            median(found.probes.clone()),
            1e3 * found.waits[0],
            1e3 * found.waits[1]
        );
    }
    let worst = errors.iter().fold(0.0_f64, |worst, error| worst.max(*error));
    let mean = errors.iter().sum::<f64>() / errors.len() as f64;
    let (tau, pairs) = kendall(found);
    println!("mean error {:.1} %, to be at most 15; worst {:.1} %", 100.0 * mean, 100.0 * worst);
    let all = found.len() * (found.len() - 1) / 2;
    println!("Kendall's tau {tau:.3} over {pairs} of {all} pairs, to be at least 0.8");
    let probes: Vec<f64> = found.iter().flat_map(|found| found.probes.clone()).collect();
    for (of, probes) in [("calibrations", calibrated), ("runs", &probes)] {
        println!(
            "probe beside {of}: {:.0} GFLOP/s, noise {:.1} %",
            median(probes.to_vec()),
            100.0 * noise(probes)
        );
    }
}

/// Kendall's tau, over so many pairs that differ by more than their noise.
fn kendall(found: &[Found]) -> (f64, usize) {
    let (mut sum, mut pairs) = (0.0, 0);
    for (index, a) in found.iter().enumerate() {
        for b in &found[..index] {
            let [x, y] = [a, b].map(|of| median(of.measured.clone()));
            if (x - y).abs() <= noise(&a.measured) * x + noise(&b.measured) * y {
                continue;
            }
            let [p, q] = [a, b].map(|of| median(of.predicted.clone()));
            sum += match p.total_cmp(&q) {
                Ordering::Equal => 0.0,
                predicted if predicted == x.total_cmp(&y) => 1.0,
                _ => -1.0,
            };
            pairs += 1;
        }
    }
    (sum / f64::max(pairs as f64, 1.0), pairs)
}
