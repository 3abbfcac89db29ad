//! The rules that every simulated job must keep.

use std::time::Duration;

use super::faults::{Fault, Scenario};
use super::job::{End, Outcome, twin};
use super::network::KEPT_ALIVE;

/// Longest time after which a rank that is killed has ended all others, beyond their own work.
const AT_ONCE: Duration = Duration::from_secs(15);

/// Longest time, beyond the timeout, after which a rank that is silent has ended all others.
const SILENCE: Duration = Duration::from_secs(60);

/// Returns the rule that the ranks have broken, if they have.
pub fn broken_rule(scenario: &Scenario, outcome: &Outcome) -> Option<String> {
    let Outcome { ends, disk, .. } = outcome;
    let hangs = |process: &usize| {
        scenario.has(
            |fault| matches!(*fault, Fault::Hangs(rank, _) if rank == rank_of(scenario, *process)),
        )
    };
    if !outcome.stuck.iter().all(hangs) {
        return Some(format!("processes {:?} do not end", outcome.stuck));
    }
    for (process, end) in ends.iter().enumerate() {
        if let Some(End { result: Err(error), .. }) = end
            && error.contains("panicked")
        {
            return Some(format!("process {process} {error}"));
        }
    }
    let size = scenario.size;
    if disk.published.is_some_and(|shares| shares != size) {
        return Some(format!("a checkpoint of {:?} shares of {size} is published", disk.published));
    }
    if let Some(rank) = disk.shares.iter().find(|(_, count)| **count > 1) {
        return Some(format!("rank {rank:?} has written its share more than once"));
    }
    let is_well = |process: usize| ends[process].as_ref().is_some_and(|end| end.result.is_ok());
    if let Some(process) = (0..ends.len()).find(|&process| is_well(process))
        && disk.published.is_none()
    {
        return Some(format!("process {process} ends well without a checkpoint"));
    }
    let patience = (scenario.timeout / 4).min(KEPT_ALIVE * 4 / 5);
    // While ranks meet, a pause counts: they do so by the clock.
    let pauses = |(fault, at): &(Fault, Duration)| {
        matches!(fault, Fault::StopAll(pause) if *pause > patience)
            && outcome.met.is_none_or(|met| *at < met)
    };
    if outcome.happened.iter().any(pauses) {
        return None;
    }
    if scenario.faults.iter().all(|(_, fault)| fault.is_harmless(patience)) {
        return unharmed(scenario, outcome);
    }
    match &scenario.faults[..] {
        [(_, fault)] => blamed(scenario, outcome, fault),
        _ => None,
    }
}

/// The rank that a process is, perhaps for the second time.
fn rank_of(scenario: &Scenario, process: usize) -> usize {
    let mut twins = scenario.faults.iter().filter_map(|(_, fault)| twin(fault));
    match process.checked_sub(scenario.size) {
        None => process,
        Some(second) => twins.nth(second).expect("a process for each second start"),
    }
}

/// Nothing bad has happened: each rank must have ended well, once.
fn unharmed(scenario: &Scenario, outcome: &Outcome) -> Option<String> {
    for rank in 0..scenario.size {
        let of_rank =
            || (0..outcome.ends.len()).filter(move |&process| rank_of(scenario, process) == rank);
        let ended: Vec<_> =
            of_rank().filter_map(|process| outcome.ends[process].as_ref()).collect();
        if ended.iter().filter(|end| end.result.is_ok()).count() != 1 {
            return Some(format!(
                "rank {rank} does not end well, though nothing bad has happened: {ended:?}"
            ));
        }
    }
    None
}

/// Exactly one thing has gone wrong: all must end in time, and name the rank that it has befallen.
fn blamed(scenario: &Scenario, outcome: &Outcome, fault: &Fault) -> Option<String> {
    let happened = outcome.happened.first().map(|(_, at)| *at);
    // Ranks fail by themselves without an event.
    let at = match fault {
        Fault::Kill(_) | Fault::Off(_) | Fault::Stop(..) | Fault::Cut(..) | Fault::Reset(_) => {
            happened?
        }
        _ => Duration::ZERO,
    };
    // Of many ranks some wait for a packet that was lost in each call.
    let weather = match scenario.weather.lost > 0.0 {
        true => scenario.weather.resent * scenario.size as u32,
        false => Duration::ZERO,
    };
    let pause = match *fault {
        Fault::Stop(_, pause) | Fault::Cut(_, pause) => pause.unwrap_or_default(),
        _ => Duration::ZERO,
    };
    // A meeting, three steps and an end: the connections of groups alone take dozens of waits, one behind the other.
    let busy = scenario.busy * 200;
    let work = 3 * scenario.starts + 10 * scenario.work + weather + pause + busy;
    let has_met = outcome.met.is_some_and(|met| happened.is_none_or(|at| met < at));
    let bound = match fault {
        Fault::Kill(_) | Fault::Reset(_) if has_met => AT_ONCE,
        Fault::Stop(_, None) if has_met => scenario.timeout,
        Fault::Fails(..) | Fault::Disagrees(_) | Fault::DiskFull(_) => AT_ONCE,
        // The deadline of the meeting, or that of a call.
        _ => 2 * scenario.timeout + SILENCE,
    };
    let culprits = culprits(scenario, outcome, fault);
    for (process, end) in outcome.ends.iter().enumerate() {
        let Some(End { result, at: end }) = end else { continue };
        if *end > at + work + bound {
            return Some(format!(
                "process {process} ends {end:?} after the start, the fault was at {at:?}"
            ));
        }
        let Err(error) = result else { continue };
        // Of ranks that end while the others meet not all hear why.
        if fault.culprit() == Some(process) || !has_met && !matches!(fault, Fault::Absent(_)) {
            continue;
        }
        // A rank that goes on at that moment answers that it waits as the others do.
        let goes_on = !pause.is_zero() && error.contains("though all ranks entered it");
        if fault.culprit().is_some()
            && !goes_on
            && !named(error, "rank").iter().any(|rank| culprits.contains(rank))
        {
            return Some(format!("process {process} does not name {culprits:?}: {error}"));
        }
        let silent = silent(error);
        if fault.culprit().is_some() && silent.iter().any(|rank| !culprits.contains(rank)) {
            return Some(format!("process {process} blames another than {culprits:?}: {error}"));
        }
    }
    None
}

/// The ranks that have caused the end of the job.
fn culprits(scenario: &Scenario, outcome: &Outcome, fault: &Fault) -> Vec<usize> {
    let victims = (0..scenario.size).filter(|&rank| outcome.victims[rank]);
    victims.chain(fault.culprit()).collect()
}

/// Numbers behind "rank" or "ranks".
fn named(text: &str, word: &str) -> Vec<usize> {
    let behind = text.match_indices(word).map(|(at, _)| &text[at + word.len()..]);
    behind.flat_map(|rest| numbers(rest.trim_start_matches('s'))).collect()
}

/// The numbers of a list such as " 3, 5" or " [3, 5]" at the start of a text.
fn numbers(text: &str) -> Vec<usize> {
    let end = text.find(|c: char| !(c.is_ascii_digit() || " ,[]".contains(c)));
    let list = &text[..end.unwrap_or(text.len())];
    list.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect()
}

/// Ranks that a text says do not answer, or are gone.
fn silent(text: &str) -> Vec<usize> {
    let mut found = Vec::new();
    for (at, _) in text.match_indices("rank") {
        let rest = text[at + 4..].trim_start_matches('s');
        let list = numbers(rest);
        let end = rest.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(rest.len());
        let verb = &rest[end..];
        if ["does not answer", "do not answer", "is gone"].iter().any(|what| verb.starts_with(what))
        {
            found.extend(list);
        }
    }
    found
}
