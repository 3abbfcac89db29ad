//! The outcomes of cases: one line of JSON each, and tables of all of them.

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::path::Path;

use super::case::{Case, Kind};

/// The outcome of a case.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outcome {
    pub case: u64,
    pub kind: String,
    pub layout: String,
    /// Starts of the job until the run was done.
    pub starts: usize,
    pub faults: Vec<Fault>,
    /// Seconds of the whole case.
    pub seconds: f64,
    /// The difference from an undisturbed run, or the end that came too late, if there is one.
    pub error: Option<String>,
}

/// A fault that came to a start of the job.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Fault {
    /// Seconds after the start.
    pub moment: f64,
    /// The latest checkpoint at that moment.
    pub step: u64,
    /// Whether the job was there.
    pub met: bool,
    /// The processes or links that it met.
    pub victim: String,
    /// The exit codes of the launcher, or of all ranks.
    pub codes: Vec<Option<i32>>,
    /// Seconds from the fault until the last process had ended.
    pub ended: f64,
}

impl Outcome {
    pub fn new(case: &Case) -> Outcome {
        Outcome {
            case: case.number,
            kind: case.kind.name().to_string(),
            layout: case.layout.name.to_string(),
            starts: 0,
            faults: Vec::new(),
            seconds: 0.0,
            error: None,
        }
    }

    /// Puts a line behind those of earlier cases.
    pub fn append(&self, file: &Path) -> std::io::Result<()> {
        let mut line = serde_json::to_string(self)?;
        line.push('\n');
        File::options().create(true).append(true).open(file)?.write_all(line.as_bytes())
    }

    /// The outcomes in a file. A line that was cut short by a kill counts as none.
    pub fn read(file: &Path) -> Vec<Outcome> {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }
}

/// Prints a table by kinds; returns how many cases failed.
pub fn tell(outcomes: &[Outcome]) -> usize {
    println!(
        "| fault | cases | layouts | faults that met the job | starts | slowest end after a fault, s | slowest case, s | wrong |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for kind in Kind::ALL {
        let of_kind = outcomes.iter().filter(|outcome| outcome.kind == kind.name());
        row(kind.name(), &of_kind.collect::<Vec<_>>(), kind.is_survived());
    }
    row("all", &outcomes.iter().collect::<Vec<_>>(), true);
    outcomes.iter().filter(|outcome| outcome.error.is_some()).count()
}

fn row(name: &str, outcomes: &[&Outcome], trains_on: bool) {
    let layouts: BTreeSet<&str> = outcomes.iter().map(|outcome| &*outcome.layout).collect();
    let faults = || outcomes.iter().flat_map(|outcome| &outcome.faults).filter(|fault| fault.met);
    let slowest = faults().map(|fault| fault.ended).fold(0.0, f64::max);
    println!(
        "| {name} | {} | {} | {} | {} | {} | {:.1} | {} |",
        outcomes.len(),
        layouts.len(),
        faults().count(),
        outcomes.iter().map(|outcome| outcome.starts).sum::<usize>(),
        if trains_on { String::new() } else { format!("{slowest:.1}") },
        outcomes.iter().map(|outcome| outcome.seconds).fold(0.0, f64::max),
        outcomes.iter().filter(|outcome| outcome.error.is_some()).count(),
    );
}
