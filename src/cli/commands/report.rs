//! `ferrotron report`: runs in one page of HTML.

mod chart;
mod escape;
mod page;
mod results;
mod run;
mod scale;
mod schedule;
mod series;
mod tables;

use clap::Args;
use ferrotron::Result;
use ferrotron::parallel::output_file;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::cli::definition::Definition;
use crate::cli::{output, run_folder};
use results::Results;
use run::ReportedRun;

const OPERATION: &str = "report";

#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Run folders, or files of metrics [default: the newest of runs/]
    run: Vec<PathBuf>,
    /// The page; replaces nothing but an earlier one
    #[arg(long, value_name = "FILE", default_value = "report.html")]
    output: PathBuf,
    /// Files with what `ferrotron eval --json` has printed, for the table of evaluations
    #[arg(long, value_name = "FILE", num_args = 1..)]
    eval: Vec<PathBuf>,
}

/// Writes the page.
pub fn report(args: &ReportArgs, definition: &Definition) -> Result<ExitCode> {
    let newest = || run_folder::newest_run_with(OPERATION, "metrics.jsonl", "file of metrics");
    let paths = if args.run.is_empty() { vec![newest()?] } else { args.run.clone() };
    let runs = paths.iter().map(|path| ReportedRun::read(path, definition));
    let mut runs = runs.collect::<Result<Vec<_>>>()?;
    run::number_equal_names(&mut runs);
    let results = args.eval.iter().map(|path| Results::read(path)).collect::<Result<Vec<_>>>()?;
    write(&page::page(&runs, &results), &args.output)?;
    output::line(&args.output.display().to_string());
    Ok(ExitCode::SUCCESS)
}

/// Writes the page over an earlier one, or into a new file.
fn write(page: &str, path: &Path) -> Result<()> {
    let fail = |error| output_file::unwritable(OPERATION, path, &error);
    let mut file = output_file::open(OPERATION, path)?;
    let begin = page::BEGIN.as_bytes();
    let found = output_file::beginning(&mut file, begin.len() as u64).map_err(fail)?;
    if !begin.starts_with(&found) {
        return Err(output_file::not_own(OPERATION, path, "a report"));
    }
    output_file::truncate(&file, 0).and_then(|()| file.write_all(page.as_bytes())).map_err(fail)
}
