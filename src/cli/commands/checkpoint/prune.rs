//! `ferrotron checkpoint prune`: a run's older checkpoints deleted.

use clap::Args;
use ferrotron::models::checkpoint::{Checkpoint, Retention, clean, list};
use ferrotron::models::run_lock::RunLock;
use ferrotron::{Error, Result};
use std::path::{Path, PathBuf};

use crate::cli::output;
use crate::cli::run_folder::no_checkpoint;

#[derive(Debug, Args)]
pub struct PruneArgs {
    /// Run folder
    run: PathBuf,
    /// Checkpoints, of those written last, that stay
    #[arg(long, value_name = "N", default_value_t = 2)]
    save_retain: usize,
    /// Keep besides every checkpoint whose step is a multiple of N; 0 keeps none [default: that of the run]
    #[arg(long, value_name = "N")]
    save_retain_interval: Option<u64>,
    /// Only print what would be deleted
    #[arg(long)]
    dry_run: bool,
}

/// Deletes what `args` does not keep, if the newest checkpoint that stays is undamaged.
pub fn prune(args: &PruneArgs) -> Result<()> {
    let PruneArgs { run, dry_run, .. } = args;
    if args.save_retain == 0 {
        return Err(Error::config("--save-retain", "must be positive, got 0"));
    }
    if list(run)?.is_empty() {
        return Err(no_checkpoint(run));
    }
    // A running training deletes its own.
    let lock = if *dry_run { None } else { Some(RunLock::acquire(run)?) };
    if let Some(warning) = lock.as_ref().and_then(RunLock::warning) {
        output::note(&format!("warning: {warning}"));
    }
    let nothing = |why: String| Error::io("checkpoint", format!("{why}: nothing was deleted"));
    if !run.join("latest").exists() {
        return Err(nothing(format!("'{}' has no file latest", run.display())));
    }
    let interval = match args.save_retain_interval {
        None => remembered_interval(run)?,
        typed => typed.filter(|interval| *interval > 0),
    };
    let plan = Retention { last: args.save_retain, interval }.plan(run);
    plan.damaged.iter().for_each(|line| output::note(&format!("warning: {line}")));
    // What a killed run has left, half-written or half-deleted.
    let is_rest = |folder: &PathBuf| folder.extension().is_some();
    let rests: Vec<PathBuf> =
        list(run)?.into_iter().map(|entry| entry.folder).filter(is_rest).collect();
    let deleted = || rests.iter().chain(&plan.superseded);
    if let Some(newest) = plan.newest.as_ref().filter(|_| deleted().next().is_some()) {
        let damaged =
            |error: Error| format!("the newest checkpoint is damaged: {}", error.context());
        Checkpoint::open(newest).map_err(|error| nothing(damaged(error)))?;
    }
    if !dry_run {
        plan.delete()?;
        clean(run)?;
    }
    let verb = if *dry_run { "would delete" } else { "deleted" };
    deleted().for_each(|folder| output::line(&format!("{verb} {}", folder.display())));
    Ok(())
}

/// The `--save-retain-interval` in the newest checkpoint that can be opened.
fn remembered_interval(run: &Path) -> Result<Option<u64>> {
    let Some(newest) = list(run)?.into_iter().rfind(|entry| entry.contents.is_ok()) else {
        return Ok(None);
    };
    let checkpoint = Checkpoint::peek(&newest.folder)?;
    // A number from a file of options, text from a command line.
    let value = &checkpoint.run()["save-retain-interval"];
    let typed = || value.as_str().and_then(|text| text.parse().ok());
    let interval = value.as_u64().or_else(typed).filter(|interval| *interval > 0);
    if let Some(interval) = interval {
        let message = format!("--save-retain-interval {interval}, which the run remembers");
        output::note(&message);
    }
    Ok(interval)
}
