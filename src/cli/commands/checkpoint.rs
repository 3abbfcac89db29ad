//! `ferrotron checkpoint`: a run's checkpoints listed, verified, compared and deleted.

use clap::{Args, Subcommand};
use ferrotron::models::bert::Bert;
use ferrotron::models::checkpoint::{
    Checkpoint, CheckpointSummary, Comparison, Retention, TensorDifference, TensorDifferenceKind,
    Tolerance, clean, list,
};
use ferrotron::models::gpt::Gpt;
use ferrotron::models::run_lock::RunLock;
use ferrotron::models::trainer::Model;
use ferrotron::{Error, Result};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

use crate::cli::{bytes, output, run_folder};

/// Exit code for checkpoints that differ, as diff(1) has it.
const DIFFERENT: u8 = 1;

/// Exit code for checkpoints that cannot be compared, as diff(1) has it.
const TROUBLE: u8 = 2;

#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub struct CheckpointArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List the checkpoints of a run
    Ls {
        /// Run folder [default: the newest of runs/]
        run: Option<PathBuf>,
        /// Print one JSON array
        #[arg(long)]
        json: bool,
    },
    /// Read checkpoints once and compare every checksum
    Verify {
        /// Checkpoints, or run folders, whose latest is verified [default: the newest of runs/]
        path: Vec<PathBuf>,
        /// Verify every checkpoint of the run folders
        #[arg(long)]
        all: bool,
    },
    /// Compare configuration, progress and every tensor of two checkpoints; exit code 1 if they differ
    Diff {
        /// Run folder or checkpoint
        first: PathBuf,
        /// Run folder or checkpoint
        second: PathBuf,
        /// Largest absolute difference of two equal values
        #[arg(long, value_name = "X", default_value_t = 0.0)]
        atol: f64,
        /// Largest difference of two equal values, relative to the second
        #[arg(long, value_name = "X", default_value_t = 0.0)]
        rtol: f64,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Delete a run's older checkpoints; the one that `latest` names always stays
    Prune {
        /// Run folder
        run: PathBuf,
        /// Checkpoints, of those written last, that stay
        #[arg(long, value_name = "N", default_value_t = 2)]
        save_retain: usize,
        /// Keep besides every checkpoint whose step is a multiple of N; 0 keeps none
        #[arg(long, value_name = "N", default_value_t = 0)]
        save_retain_interval: u64,
        /// Only print what would be deleted
        #[arg(long)]
        dry_run: bool,
    },
}

/// Does what `args` asks for.
pub fn checkpoint(args: &CheckpointArgs) -> Result<ExitCode> {
    match &args.action {
        Action::Ls { run, json } => ls(&run_or_newest(run.as_deref())?, *json),
        Action::Verify { path, all } => verify(path, *all),
        Action::Diff { first, second, atol, rtol, json } => {
            let tolerance = Tolerance { atol: *atol, rtol: *rtol };
            return diff(first, second, tolerance, *json).or_else(|error| {
                output::failed("", &error);
                Ok(ExitCode::from(TROUBLE))
            });
        }
        Action::Prune { run, save_retain, save_retain_interval, dry_run } => {
            let interval = Some(*save_retain_interval).filter(|interval| *interval > 0);
            let retention = Retention { last: *save_retain, interval };
            prune(run, retention, *dry_run)
        }
    }
    .map(|()| ExitCode::SUCCESS)
}

fn run_or_newest(run: Option<&Path>) -> Result<PathBuf> {
    run.map_or_else(|| run_folder::newest_run("checkpoint"), |run| Ok(run.to_path_buf()))
}

fn ls(run: &Path, as_json: bool) -> Result<()> {
    let entries = list(run)?;
    if as_json {
        output::line(&Value::from_iter(entries.iter().map(object)).to_string());
        return Ok(());
    }
    if entries.is_empty() {
        let message = format!("'{}' holds no checkpoint", run.display());
        return Err(Error::io("checkpoint", message));
    }
    output::line(&format!(
        "{:<20} {:<20} {:>10} {:>14}  {:<5}  {:<9}",
        "checkpoint", "written (UTC)", "size", "parameters", "dtype", "optimizer"
    ));
    entries.iter().for_each(|entry| output::line(row(entry).trim_end()));
    Ok(())
}

/// A checkpoint as a line of the table.
fn row(entry: &CheckpointSummary) -> String {
    let start = format!("{:<20} {:<20}", name(&entry.folder), written(entry.written));
    match &entry.contents {
        Ok(contents) => format!(
            "{start} {:>10} {:>14}  {:<5}  {:<9}  {}",
            bytes::display(contents.bytes),
            contents.parameters,
            contents.dtype,
            if contents.optimizer { "yes" } else { "no" },
            if entry.latest { "latest" } else { "" },
        ),
        Err(fault) => format!("{start} {fault}"),
    }
}

/// A checkpoint as a JSON object.
fn object(entry: &CheckpointSummary) -> Value {
    let mut object = json!({
        "folder": entry.folder.display().to_string(),
        "step": entry.step,
        "written": humantime::format_rfc3339_seconds(entry.written).to_string(),
        "latest": entry.latest,
    });
    match &entry.contents {
        Ok(contents) => object["contents"] = json!(contents),
        Err(fault) => object["fault"] = json!(fault),
    }
    object
}

fn name(folder: &Path) -> String {
    folder.file_name().unwrap_or(folder.as_os_str()).to_string_lossy().into_owned()
}

fn written(time: SystemTime) -> String {
    let text = humantime::format_rfc3339_seconds(time).to_string();
    text.trim_end_matches('Z').replace('T', " ")
}

/// Verifies all before it reports the first fault.
fn verify(paths: &[PathBuf], all: bool) -> Result<()> {
    let named = match paths {
        [] => vec![run_or_newest(None)?],
        paths => paths.to_vec(),
    };
    let mut checkpoints = Vec::new();
    for path in named {
        if !path.exists() {
            let message = format!("there is no '{}': name a checkpoint or a run", path.display());
            return Err(Error::io("checkpoint", message));
        }
        match all && !path.join("index.json").exists() {
            true => {
                let whole = list(&path)?.into_iter().map(|entry| entry.folder);
                let whole: Vec<PathBuf> =
                    whole.filter(|folder| folder.extension().is_none()).collect();
                if whole.is_empty() {
                    let message = format!("'{}' holds no checkpoint", path.display());
                    return Err(Error::io("checkpoint", message));
                }
                checkpoints.extend(whole);
            }
            false => checkpoints.push(path),
        }
    }
    let mut damaged = 0;
    for path in &checkpoints {
        match Checkpoint::open(path) {
            Ok(checkpoint) => output::line(&format!("{}: ok", checkpoint.folder().display())),
            Err(error) => {
                damaged += 1;
                output::line(&format!("{}: {}", path.display(), error.context()));
            }
        }
    }
    match damaged {
        0 => Ok(()),
        _ => {
            let message = format!("{damaged} of {} checkpoints are damaged", checkpoints.len());
            Err(Error::io("checkpoint", message))
        }
    }
}

fn diff(first: &Path, second: &Path, tolerance: Tolerance, as_json: bool) -> Result<ExitCode> {
    for (flag, value) in [("--atol", tolerance.atol), ("--rtol", tolerance.rtol)] {
        if !(value >= 0.0 && value.is_finite()) {
            return Err(Error::config(flag, format!("must be at least 0, got {value}")));
        }
    }
    let (first, second) = (Checkpoint::open(first)?, Checkpoint::open(second)?);
    let mut compared = Comparison::new(&first, &second, tolerance)?;
    let configurations = [with_defaults(&first), with_defaults(&second)];
    compared.fields.retain(|field| !is_default(&field.name, &configurations));
    if as_json {
        output::line(&json!(compared).to_string());
    } else {
        for field in &compared.fields {
            let [a, b] = &field.values;
            output::line(&format!("{}: {a} | {b}", field.name));
        }
        let folders = [first.folder(), second.folder()];
        compared.tensors.iter().for_each(|tensor| output::line(&difference(tensor, folders)));
        output::line(&format!(
            "{} of {} tensors are equal",
            compared.equal_tensors,
            compared.equal_tensors + compared.tensors.len()
        ));
    }
    Ok(if compared.is_equal() { ExitCode::SUCCESS } else { ExitCode::from(DIFFERENT) })
}

/// The configuration of a checkpoint's model, with the defaults of fields that an earlier version did not have.
fn with_defaults(checkpoint: &Checkpoint) -> Value {
    let gpt = Gpt::config_from(checkpoint).map(|config| json!(config));
    gpt.or_else(|_| Bert::config_from(checkpoint).map(|config| json!(config))).unwrap_or_default()
}

/// Whether a field of the model's configuration has the same value in both.
fn is_default(name: &str, configurations: &[Value; 2]) -> bool {
    let value = |configuration: &Value| configuration.get(name.strip_prefix("model.")?).cloned();
    let [a, b] = configurations.each_ref().map(value);
    a.is_some() && a == b
}

/// A tensor that differs, as a line.
fn difference(tensor: &TensorDifference, folders: [&Path; 2]) -> String {
    let name = &tensor.name;
    match &tensor.kind {
        TensorDifferenceKind::Missing { from } => {
            format!("{name}: missing in '{}'", folders[*from].display())
        }
        TensorDifferenceKind::Shape { shapes: [a, b] } => format!("{name}: shape {a:?} | {b:?}"),
        TensorDifferenceKind::Values { dtypes: [a, b], differing, numel, largest } => {
            let dtypes = if a == b { String::new() } else { format!("{a} | {b}, ") };
            format!(
                "{name}: {dtypes}{differing} of {numel} values differ, by {largest:.3e} at most"
            )
        }
    }
}

fn prune(run: &Path, retention: Retention, dry_run: bool) -> Result<()> {
    if list(run)?.is_empty() {
        let message = format!("'{}' holds no checkpoint", run.display());
        return Err(Error::io("checkpoint", message));
    }
    // A running training deletes its own.
    let lock = if dry_run { None } else { Some(RunLock::acquire(run)?) };
    if let Some(warning) = lock.as_ref().and_then(RunLock::warning) {
        output::note(&format!("warning: {warning}"));
    }
    if !run.join("latest").exists() {
        let message = format!("'{}' has no file latest: nothing was deleted", run.display());
        return Err(Error::io("checkpoint", message));
    }
    let superseded = retention.superseded(run);
    let verb = if dry_run { "would delete" } else { "deleted" };
    // What a killed run has left, half-written or half-deleted.
    let is_rest = |folder: &PathBuf| folder.extension().is_some();
    let rests: Vec<PathBuf> =
        list(run)?.into_iter().map(|entry| entry.folder).filter(is_rest).collect();
    if !dry_run {
        retention.apply(run)?;
        clean(run)?;
    }
    let deleted = rests.iter().chain(&superseded);
    deleted.for_each(|folder| output::line(&format!("{verb} {}", folder.display())));
    Ok(())
}
