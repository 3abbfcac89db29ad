//! `ferrotron bench`.

use clap::Args;
use ferrotron::models::bench::{BenchConfig, bench as measure};
use ferrotron::models::profile::{Profile, ProfileCeilings};
use ferrotron::models::trainer::ExecutionMode;
use ferrotron::planner::calibrate::{Calibration, calibrate};
use ferrotron::tensor::gemm::limit_instruction_set;
use ferrotron::{Error, Result};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::cli::args::device::{DeviceArgs, DeviceChoice, ExecutionArgs};
use crate::cli::args::model::ModelArgs;
use crate::cli::commands::own_file::OwnFile;
use crate::cli::output;

#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Number of token ids [default: 50304, GPT-2's 50257 padded to a multiple of 128]
    #[arg(long, value_name = "N", default_value_t = 50_304, hide_default_value = true)]
    vocab_size: usize,
    /// Samples per step
    #[arg(long, value_name = "N", default_value_t = 4)]
    micro_batch_size: usize,
    /// Timed steps
    #[arg(long, value_name = "N", default_value_t = 5)]
    steps: usize,
    /// Steps before those
    #[arg(long, value_name = "N", default_value_t = 2)]
    warmup: usize,
    /// Best instruction set to use, to compare processors on one: portable, avx2, avx512, avx512-bf16 or amx [default: the best of this
    /// processor]
    #[arg(long, value_name = "NAME")]
    instruction_set: Option<String>,
    /// Print the time and work of each operation of a step, on a GPU of each kernel, beside the ceilings of this processor or GPU and
    /// its memory
    #[arg(long)]
    profile: bool,
    /// File for a description of this machine, which --cluster of simulate and plan reads: measure it instead of a model
    #[arg(long, value_name = "FILE", conflicts_with_all = ["profile", "json"])]
    calibrate: Option<PathBuf>,
    /// Print one JSON object, which is what bench prints without --profile
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    execution: ExecutionArgs,
}

/// Prints one JSON line, or the table of a profile.
pub fn bench(args: &BenchArgs) -> Result<ExitCode> {
    if args.steps == 0 || args.micro_batch_size == 0 || args.vocab_size == 0 {
        return Err(Error::config(
            "bench",
            "--steps, --micro-batch-size and --vocab-size must be positive",
        ));
    }
    if let Some(name) = &args.instruction_set {
        limit_instruction_set(name)
            .map_err(|error| Error::config("--instruction-set", error.context().to_string()))?;
    }
    if let Some(path) = &args.calibrate {
        return calibrated(path, args);
    }
    let execution = args.execution.execution(&args.device)?;
    if args.profile && execution != ExecutionMode::Eager {
        let message = "times work as the GPU is given it, and a graph is given as a whole: leave --enable-cuda-graph out";
        return Err(Error::config("--profile", message));
    }
    let device = args.device.open_with(args.execution.algorithms(&args.device)?)?;
    let config = BenchConfig {
        micro_batch_size: args.micro_batch_size,
        seq_length: args.model.seq_length()?,
        steps: args.steps,
        warmup: args.warmup,
        dtype: args.device.dtype()?,
        execution,
        profile: args.profile,
        ..BenchConfig::new(args.model.config(args.vocab_size)?)
    };
    let report = measure(&config, &device)?;
    if let Some(profile) = report.profile.as_ref().filter(|_| !args.json) {
        let threads = (!device.is_gpu()).then_some(report.threads);
        output::print(&table(profile, threads));
        return Ok(ExitCode::SUCCESS);
    }
    let line =
        serde_json::to_string(&report).map_err(|error| Error::io("bench", error.to_string()))?;
    output::line(&line);
    Ok(ExitCode::SUCCESS)
}

/// Measures this machine, and writes it as a cluster.
fn calibrated(path: &Path, args: &BenchArgs) -> Result<ExitCode> {
    if args.device.place()? != DeviceChoice::Cpu {
        return Err(Error::config("--calibrate", "measures a processor: give --device cpu"));
    }
    const NAME: &str = "--calibrate";
    if path.extension().is_none_or(|end| end != "toml") {
        let message = format!(
            "--cluster reads files that end in .toml: name it {}.toml instead",
            path.display()
        );
        return Err(Error::config(NAME, message));
    }
    let file = OwnFile::open(NAME, path, Calibration::BEGIN, "a calibrated machine")?;
    let text = calibrate(&args.device.open()?, args.device.dtype()?)?.to_toml();
    file.replace(&text)?;
    output::print(&text);
    Ok(ExitCode::SUCCESS)
}

/// Three significant digits, and no fraction from 100 on.
fn milliseconds(ms: f64) -> String {
    let digits = if ms > 0.0 { (2.0 - ms.log10().floor()).clamp(0.0, 6.0) } else { 0.0 };
    format!("{ms:.0$}", digits as usize)
}

/// The operations of a step as rows, the longest first, with the rest of the step and its sum.
fn table(profile: &Profile, threads: Option<usize>) -> String {
    let Profile { steps, s_per_step, operations, other_ms, ceilings, .. } = profile;
    let step_ms = 1e3 * s_per_step;
    let heads = ["operation", "pass", "calls", "ms", "%", "GFLOP/s", "GB/s", "of ceiling"];
    let row = |out: &mut String, cells: [&str; 8]| {
        let [name, pass, rest @ ..] = cells;
        let _ = write!(out, "{name:<24} {pass:<8}");
        rest.iter().for_each(|cell| out.push_str(&format!(" {cell:>10}")));
        out.truncate(out.trim_end().len());
        out.push('\n');
    };
    let share = |ms: f64| format!("{:.1}", 100.0 * ms / step_ms);
    let number = |x: Option<f64>| x.map_or("-".into(), |x| format!("{x:.1}"));
    let mut out = String::new();
    row(&mut out, heads);
    for it in operations {
        let of_ceiling = it.of_ceiling.map_or("-".into(), |x| format!("{:.0} %", 100.0 * x));
        let (calls, ms) = (format!("{:.1}", it.calls), milliseconds(it.ms));
        let (gflops, gb) = (number(it.gflops), number(it.gb_per_s));
        let cells = [&it.operation, it.pass, &calls, &ms, &share(it.ms), &gflops, &gb, &of_ceiling];
        row(&mut out, cells);
    }
    let [other, step] = [*other_ms, step_ms].map(milliseconds);
    row(&mut out, ["outside of operations", "", "", &other, &share(*other_ms), "", "", ""]);
    row(&mut out, ["step", "", "", &step, &share(step_ms), "", "", ""]);
    let reach = match threads {
        Some(1) => "1 thread reaches".into(),
        Some(threads) => format!("{threads} threads reach"),
        None => "The GPU reaches".into(),
    };
    let ProfileCeilings { f32_gflops, f64_gflops, bf16_gflops, f16_gflops, .. } = ceilings;
    let ProfileCeilings { read_gb_per_s, update_gb_per_s, .. } = ceilings;
    let _ = writeln!(
        out,
        "means of {steps} steps. {reach} {f32_gflops:.0} GFLOP/s in f32, {f64_gflops:.0} in f64, \
         {bf16_gflops:.0} in bf16, {f16_gflops:.0} in f16;\nmemory {read_gb_per_s:.1} GB/s read, {update_gb_per_s:.1} GB/s read and written"
    );
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrotron::models::profile::OperationProfile;

    #[test]
    fn a_profile_is_a_table_with_the_rest_and_the_sum() {
        let ceilings = ProfileCeilings {
            f32_gflops: 270.0,
            f64_gflops: 135.0,
            bf16_gflops: 4000.0,
            f16_gflops: 270.0,
            read_gb_per_s: 21.0,
            update_gb_per_s: 36.5,
        };
        let operation = |operation: &str, pass, ms, gflops| OperationProfile {
            operation: operation.into(),
            pass,
            calls: 12.0,
            ms,
            gflops,
            gb_per_s: Some(1.0),
            of_ceiling: gflops.map(|gflops| gflops / 4000.0),
        };
        let operations = vec![
            operation("linear", "forward", 75.0, Some(3000.0)),
            operation("view", "backward", 5.0, None),
        ];
        let profile = Profile { steps: 5, s_per_step: 0.1, ceilings, operations, other_ms: 20.0 };
        let told = table(&profile, Some(2));
        let lines: Vec<Vec<&str>> =
            told.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0][..4], ["operation", "pass", "calls", "ms"]);
        assert_eq!(
            lines[1],
            ["linear", "forward", "12.0", "75.0", "75.0", "3000.0", "1.0", "75", "%"]
        );
        assert_eq!(lines[2], ["view", "backward", "12.0", "5.00", "5.0", "-", "1.0", "-"]);
        assert_eq!(lines[3], ["outside", "of", "operations", "20.0", "20.0"]);
        assert_eq!(lines[4], ["step", "100", "100.0"]);
        assert!(told.contains("2 threads reach 270 GFLOP/s in f32"), "{told}");
    }

    #[test]
    fn milliseconds_have_three_significant_digits() {
        let told = [0.0, 0.001_234, 0.0567, 1.0, 5.678, 56.78, 567.8, 5678.9].map(milliseconds);
        assert_eq!(told, ["0", "0.00123", "0.0567", "1.00", "5.68", "56.8", "568", "5679"]);
    }
}
