//! Runs the cases, and compares what is left of each with an undisturbed run.

use rustix::process::Signal;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::case::{Case, Kind, LAYOUTS, Layout};
use super::job::{Job, LIMIT, STEPS, Start, TRAINING};
use super::outcome::{Fault, Outcome, tell};
use super::write_faults;

/// Faults come within so much of the time of an undisturbed run.
const SPAN: f64 = 0.95;
/// Longest that a rank is stopped, or that a link holds everything back.
const HOLD: Duration = Duration::from_millis(1500);
/// Most that a piece on a delayed link waits.
const EACH: Duration = Duration::from_micros(500);
/// Most bytes of checkpoint files of a process before the disk is full: those of a few saves.
const BYTES: f64 = 1.5e6;
/// Starts of a job until its run must be done, beyond those that were disturbed. One that was cut short while it met may
/// leave a port that is in use for a moment.
const FURTHER_STARTS: usize = 2;

/// A folder for runs, and what they are compared with.
struct Soak<'a> {
    folder: &'a Path,
    /// The library for faults of the disk, if it could be compiled.
    full_disk: Option<PathBuf>,
    /// Seconds of an undisturbed run of each layout.
    undisturbed: BTreeMap<&'static str, f64>,
}

/// Runs the cases of numbers below `cases` that are not in `folder` yet, until so many seconds have passed; prints all
/// results of the folder.
pub fn all(folder: &Path, cases: u64, seconds: u64) -> Result<(), String> {
    let begun = Instant::now();
    let text: String = (0..3000).map(|i| format!("line {} of it.\n", i * 7919 % 9973)).collect();
    let wrote = std::fs::write(folder.join("text.txt"), text);
    wrote.map_err(|error| format!("the text cannot be written: {error}"))?;
    let full_disk = write_faults::compile(folder);
    let mut soak = Soak { folder, full_disk, undisturbed: BTreeMap::new() };
    let results = folder.join("cases.jsonl");
    let mut outcomes = Outcome::read(&results);
    let known: BTreeSet<u64> = outcomes.iter().map(|outcome| outcome.case).collect();
    for number in (0..cases).filter(|number| !known.contains(number)) {
        if begun.elapsed().as_secs() >= seconds {
            break;
        }
        let case = Case::new(number);
        if case.kind == Kind::FullDisk && soak.full_disk.is_none() {
            continue;
        }
        let outcome = soak.run(&case)?;
        let Outcome { starts, seconds, error, .. } = &outcome;
        let end = error.as_deref().unwrap_or("equal");
        let (kind, layout) = (case.kind.name(), case.layout.name);
        println!("{number}: {kind}, {layout}: {starts} starts, {seconds:.1} s, {end}");
        let appended = outcome.append(&results);
        appended.map_err(|error| format!("'{}': {error}", results.display()))?;
        outcomes.push(outcome);
    }
    match tell(&outcomes) {
        0 => Ok(()),
        wrong => {
            Err(format!("{wrong} cases went wrong; their folders are in {}", folder.display()))
        }
    }
}

impl Soak<'_> {
    fn run(&mut self, case: &Case) -> Result<Outcome, String> {
        let usual = self.undisturbed(case.layout)?;
        let folder = self.folder.join(format!("case-{}", case.number));
        fresh(&folder)?;
        let begun = Instant::now();
        let mut outcome = Outcome::new(case);
        let ended = self.until_done(case, &folder, usual, &mut outcome);
        let error = ended.and_then(|()| self.compare(case.layout, &folder)).err();
        outcome.seconds = rounded(begun.elapsed());
        if error.is_none() {
            // What is left of a wrong one is kept.
            let _ = std::fs::remove_dir_all(&folder);
        }
        Ok(Outcome { error, ..outcome })
    }

    /// Starts the job until the run is done.
    fn until_done(
        &self,
        case: &Case,
        folder: &Path,
        usual: f64,
        outcome: &mut Outcome,
    ) -> Result<(), String> {
        for number in 0..case.disturbed + FURTHER_STARTS {
            outcome.starts += 1;
            let is_disturbed = number < case.disturbed;
            let [moment, victim, amount] = case.draw(number);
            let full_disk = self.full_disk.as_deref().map(|library| (library, amount * BYTES));
            let mut job = Job::new(&Start {
                layout: case.layout,
                folder: folder.to_path_buf(),
                mark: format!("{}-{}-{number}", std::process::id(), case.number),
                through_links: case.kind.is_of_links(),
                full_disk: full_disk.filter(|_| is_disturbed && case.kind == Kind::FullDisk),
            })?;
            let (begun, mut limit, mut fault) = (Instant::now(), TRAINING, None);
            if is_disturbed && case.kind != Kind::FullDisk {
                sleep(Duration::from_secs_f64(moment * SPAN * usual));
                let (moment, met) = (rounded(begun.elapsed()), !job.has_ended());
                let step = latest(folder);
                let victim = disturb(&mut job, case.kind, victim, amount);
                fault = Some(Fault { moment, step, met, victim, codes: Vec::new(), ended: 0.0 });
                if !case.kind.is_survived() && met {
                    limit = LIMIT;
                }
            }
            let Some(end) = job.end(limit) else {
                return Err(format!("start {number} still runs, {limit:?} later"));
            };
            let is_done = end.codes.iter().all(|code| *code == Some(0));
            if is_disturbed && case.kind == Kind::FullDisk {
                let (step, victim) = (latest(folder), format!("{:.0} bytes", amount * BYTES));
                let moment = rounded(begun.elapsed());
                fault =
                    Some(Fault { moment, step, met: !is_done, victim, codes: vec![], ended: 0.0 });
            }
            if let Some(fault) = fault {
                let (codes, ended) = (end.codes.clone(), rounded(end.took));
                outcome.faults.push(Fault { codes, ended, ..fault });
            }
            if is_done {
                return Ok(());
            }
            if !is_disturbed || case.kind.is_survived() {
                let codes = end.codes;
                return Err(format!("start {number} ends with {codes:?}: {}", last_line(folder)));
            }
        }
        Err("the run is not done".to_string())
    }

    /// Trains an undisturbed run of a layout, if there is none; returns how many seconds it took.
    fn undisturbed(&mut self, layout: &'static Layout) -> Result<f64, String> {
        if let Some(seconds) = self.undisturbed.get(layout.name) {
            return Ok(*seconds);
        }
        let folder = self.undisturbed_folder(layout);
        let known = std::fs::read_to_string(folder.join("seconds"));
        if let Some(seconds) = known.ok().and_then(|text| text.trim().parse().ok()) {
            self.undisturbed.insert(layout.name, seconds);
            return Ok(seconds);
        }
        fresh(&folder)?;
        let begun = Instant::now();
        let mark = format!("{}-undisturbed", std::process::id());
        let (through_links, full_disk) = (false, None);
        let start = Start { layout, folder: folder.clone(), mark, through_links, full_disk };
        let end = Job::new(&start)?.end(TRAINING).ok_or("an undisturbed run does not end")?;
        if end.codes != [Some(0)] {
            let (name, codes) = (layout.name, end.codes);
            return Err(format!(
                "{name}, undisturbed, ends with {codes:?}: {}",
                last_line(&folder)
            ));
        }
        let seconds = rounded(begun.elapsed());
        let wrote = std::fs::write(folder.join("seconds"), seconds.to_string());
        wrote.map_err(|error| format!("the seconds cannot be written: {error}"))?;
        println!("{}, undisturbed: {seconds:.1} s", layout.name);
        self.undisturbed.insert(layout.name, seconds);
        Ok(seconds)
    }

    fn undisturbed_folder(&self, layout: &Layout) -> PathBuf {
        let at = LAYOUTS.iter().position(|one| one.name == layout.name).unwrap_or_default();
        self.folder.join(format!("undisturbed-{at}"))
    }

    /// Errors unless a run equals the undisturbed one, to the last bit, and has left nothing else.
    fn compare(&self, layout: &Layout, folder: &Path) -> Result<(), String> {
        let (own, want) = (folder.join("run"), self.undisturbed_folder(layout).join("run"));
        for run in [&own, &want] {
            if latest(run.parent().unwrap_or(run)) != STEPS as u64 {
                return Err(format!("'{}' is not at step {STEPS}", run.display()));
            }
        }
        let mut diff = Command::new(env!("CARGO_BIN_EXE_ferrotron"));
        let diff = diff.args(["checkpoint", "diff"]).args([&own, &want]).output();
        let diff = diff.map_err(|error| format!("no comparison: {error}"))?;
        if !diff.status.success() {
            return Err(format!("the end differs: {}", String::from_utf8_lossy(&diff.stdout)));
        }
        let (losses, wanted) = (metrics(&own)?, metrics(&want)?);
        if let Some(at) =
            (0..losses.len().max(wanted.len())).find(|&i| losses.get(i) != wanted.get(i))
        {
            return Err(format!("metrics.jsonl differs in line {}", at + 1));
        }
        let (entries, wanted) = (entries(&own)?, entries(&want)?);
        match entries == wanted {
            true => Ok(()),
            false => Err(format!("the run's folder has {entries:?} instead of {wanted:?}")),
        }
    }
}

/// Lets a fault of this kind happen to the job; returns what it happened to.
fn disturb(job: &mut Job, kind: Kind, choice: f64, amount: f64) -> String {
    let ranks = job.ranks();
    let victim = ranks.get((choice * ranks.len() as f64) as usize).copied();
    let to_victim =
        |signal| victim.into_iter().for_each(|rank| super::processes::send(signal, rank));
    let hold = HOLD.mul_f64(amount);
    match kind {
        Kind::KillRank => to_victim(Signal::KILL),
        Kind::KillLauncher => job.signal_launcher(Signal::KILL),
        Kind::KillAll => {
            job.signal_launcher(Signal::KILL);
            ranks.iter().for_each(|&rank| super::processes::send(Signal::KILL, rank));
        }
        Kind::Pause => {
            to_victim(Signal::STOP);
            sleep(hold);
            to_victim(Signal::CONT);
        }
        Kind::StopAndTerminate => {
            to_victim(Signal::STOP);
            sleep(hold);
            job.signal_launcher(Signal::TERM);
            // A launcher continues its ranks; a rank alone is continued by whoever asks it to end.
            if ranks.len() == 1 {
                to_victim(Signal::CONT);
            }
        }
        Kind::Terminate => job.signal_launcher(Signal::TERM),
        Kind::FullDisk => {}
        Kind::CutLink | Kind::DelayLinks => {
            let Some(links) = &job.links else { return String::new() };
            let link = match kind {
                Kind::CutLink => links.cut(choice),
                _ => Some(links.delay(choice, hold, EACH)),
            };
            return link.map_or_else(String::new, |[a, b]| format!("ranks {a} and {b}"));
        }
    }
    format!("{} of {} ranks", victim.map_or("none", |_| "one"), ranks.len())
}

/// Makes an empty folder.
fn fresh(folder: &Path) -> Result<(), String> {
    let _ = std::fs::remove_dir_all(folder); // there may be none
    let made = std::fs::create_dir_all(folder);
    made.map_err(|error| format!("cannot make '{}': {error}", folder.display()))
}

fn rounded(time: Duration) -> f64 {
    (time.as_secs_f64() * 1000.0).round() / 1000.0
}

/// The step of the latest checkpoint of the run in `folder`.
fn latest(folder: &Path) -> u64 {
    let name = std::fs::read_to_string(folder.join("run/latest")).unwrap_or_default();
    name.trim().trim_start_matches("iter_").parse().unwrap_or(0)
}

fn last_line(folder: &Path) -> String {
    let log = std::fs::read_to_string(folder.join("log")).unwrap_or_default();
    log.lines().last().unwrap_or_default().to_string()
}

/// The step, loss and gradient norm of each line, as bits.
fn metrics(run: &Path) -> Result<Vec<[u64; 3]>, String> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl"));
    let text = text.map_err(|error| format!("metrics.jsonl cannot be read: {error}"))?;
    let numbers = |line: &str| {
        let values: serde_json::Value = serde_json::from_str(line).ok()?;
        let [step, loss, norm] = ["step", "loss", "grad_norm"].map(|name| values[name].as_f64());
        Some([step?, loss?, norm?].map(f64::to_bits))
    };
    let lines = text.lines().map(|line| numbers(line).ok_or("metrics.jsonl has a bad line"));
    Ok(lines.collect::<Result<_, _>>()?)
}

/// All files and folders of a run, but for checkpoints that are older than the last: signals add such.
fn entries(run: &Path) -> Result<BTreeSet<String>, String> {
    let last = format!("iter_{STEPS:07}");
    let list = |folder: &Path| -> Result<Vec<String>, String> {
        let listed = std::fs::read_dir(folder);
        let listed = listed.map_err(|error| format!("'{}': {error}", folder.display()))?;
        Ok(listed.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
    };
    let is_older = |name: &String| {
        let step = name.strip_prefix("iter_").unwrap_or_default();
        *name != last && step.len() == 7 && step.bytes().all(|byte| byte.is_ascii_digit())
    };
    let mut all: BTreeSet<String> = list(run)?.into_iter().filter(|name| !is_older(name)).collect();
    all.extend(list(&run.join(&last))?.into_iter().map(|name| format!("{last}/{name}")));
    Ok(all)
}
