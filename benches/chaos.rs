//! Runs that are left alone while their processes, disks and links fail.
//!
//! `cargo bench --bench chaos -- FOLDER [CASES] [SECONDS]` disturbs small runs in several layouts. Each case has a kind of
//! fault ([`Kind`]), which comes once or twice at random moments; the same command line starts the job again until the run
//! is done. Then its last checkpoint and its losses must equal those of an undisturbed run to the last bit, no temporary
//! file and no process may be left, and every end has to come within a bound ([`job::LIMIT`]). `FOLDER/cases.jsonl` has a
//! line for each case. A case whose number is there is not run again, so the bench may be interrupted and repeated.
//!
//! `cargo bench --bench chaos -- saves small|gpt2-124m FOLDER [SAVES] [SECONDS]` disturbs a run that saves after every step
//! (`chaos/saves.rs`), until so many checkpoints are saved or so many seconds have passed. It goes on with what is in the
//! folder. Results of both are in `docs/results/soak-results.md`.
//!
//! [`Kind`]: case::Kind

#[path = "chaos/case.rs"]
mod case;
#[path = "chaos/job.rs"]
mod job;
#[path = "chaos/links.rs"]
mod links;
#[path = "chaos/outcome.rs"]
mod outcome;
#[path = "chaos/processes.rs"]
mod processes;
#[path = "chaos/run.rs"]
mod run;
#[path = "chaos/saves.rs"]
mod saves;
#[path = "chaos/write_faults.rs"]
mod write_faults;

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let number = |numbers: &[&str], at: usize, otherwise: u64| {
        numbers.get(at).and_then(|word| word.parse().ok()).unwrap_or(otherwise)
    };
    let ended = match &words[..] {
        ["saves", name, folder, numbers @ ..] => {
            let (saves, seconds) = (number(numbers, 0, 500), number(numbers, 1, 1200));
            in_folder(folder, |folder| saves::soak(name, folder, saves, seconds))
        }
        [folder, numbers @ ..] => {
            let (cases, seconds) = (number(numbers, 0, 300), number(numbers, 1, 1200));
            in_folder(folder, |folder| run::all(folder, cases, seconds))
        }
        [] => {
            println!("name a folder, which keeps the results: cargo bench --bench chaos -- FOLDER");
            return ExitCode::SUCCESS;
        }
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Calls `soak` with the absolute path of `folder`, which is made if need be.
fn in_folder(folder: &str, soak: impl FnOnce(&Path) -> Result<(), String>) -> Result<(), String> {
    std::fs::create_dir_all(folder).map_err(|error| format!("cannot make '{folder}': {error}"))?;
    let folder = std::fs::canonicalize(folder);
    soak(&folder.map_err(|error| format!("the folder cannot be found: {error}"))?)
}
