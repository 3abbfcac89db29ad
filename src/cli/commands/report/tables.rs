//! The tables of the page.

use std::collections::BTreeSet;

use super::chart::COLOURS;
use super::escape::{count, duration, html, number};
use super::results::Results;
use super::run::ReportedRun;
use crate::cli::bytes;
use crate::cli::configuration::NOT_GIVEN;

/// The mark of a number that is not there.
const NONE: &str = "–";

/// A table with a heading for each column; cells are HTML already.
fn table(class: &str, head: &[String], rows: impl Iterator<Item = Vec<String>>) -> String {
    let cells = |tag: &str, cells: &[String]| -> String {
        cells.iter().map(|cell| format!("<{tag}>{cell}</{tag}>")).collect()
    };
    let rows: String = rows.map(|row| format!("<tr>{}</tr>\n", cells("td", &row))).collect();
    format!(
        "<div class=\"scroll\"><table class=\"{class}\"><thead><tr>{}</tr></thead><tbody>\n{rows}</tbody></table></div>\n",
        cells("th", head)
    )
}

/// The name of a run beside its colour.
pub fn chip(index: usize, run: &ReportedRun) -> String {
    format!("<span class=\"chip c{}\"></span>{}", index % COLOURS, html(&run.name))
}

/// The headings of a table with a column for each run.
fn head(first: &str, runs: &[ReportedRun]) -> Vec<String> {
    let names = runs.iter().enumerate().map(|(index, run)| chip(index, run));
    [first.to_string()].into_iter().chain(names).collect()
}

/// Results of the runs, one row each.
pub fn results(runs: &[ReportedRun]) -> String {
    let columns = [
        "run",
        "steps",
        "tokens",
        "training loss",
        "validation loss",
        "perplexity",
        "time",
        "tokens/s",
        "TFLOP/s",
        "waiting for data",
        "peak memory",
    ];
    let host = runs.iter().any(|run| run.totals.host_peak_bytes.is_some());
    let skipped = runs.iter().any(|run| run.totals.skipped > 0);
    let mut head: Vec<String> = columns.map(String::from).to_vec();
    head.extend(host.then(|| "peak of host memory".to_string()));
    head.extend(skipped.then(|| "skipped steps".to_string()));
    let some = |value: Option<String>| value.unwrap_or_else(|| NONE.to_string());
    let rows = runs.iter().enumerate().map(|(index, run)| {
        let totals = &run.totals;
        let best = totals.best;
        let loss = run.curves.loss.end();
        let mut row = vec![
            chip(index, run),
            count(totals.last_step),
            count(totals.tokens),
            some(loss.map(number)),
            some(best.map(|(step, loss)| format!("{} <small>at {step}</small>", number(loss)))),
            some(best.map(|(_, loss)| number(loss.exp()))),
            duration(totals.seconds),
            some(totals.tokens_per_second().map(|speed| count(speed.round() as u64))),
            some(totals.tflops().map(number)),
            some(totals.data_share().map(|share| format!("{:.1} %", 100.0 * share))),
            some(totals.peak_bytes.map(bytes::display)),
        ];
        row.extend(host.then(|| some(totals.host_peak_bytes.map(bytes::display))));
        row.extend(skipped.then(|| count(totals.skipped)));
        row
    });
    table("numbers", &head, rows)
}

/// The options in which runs differ, or that they have in common.
pub fn options(runs: &[ReportedRun], differing: bool) -> Option<String> {
    let known = runs.iter().filter_map(|run| run.options.as_ref());
    let names: BTreeSet<&String> = known.clone().flat_map(|options| options.keys()).collect();
    let value = |run: &ReportedRun, name: &String| {
        run.options.as_ref().map(|options| options.get(name).cloned().unwrap_or_default())
    };
    let rows: Vec<Vec<String>> = names
        .into_iter()
        .filter_map(|name| {
            let values: Vec<Option<String>> = runs.iter().map(|run| value(run, name)).collect();
            let mut found = values.iter().flatten();
            let first = found.next()?;
            let differs = found.any(|value| value != first);
            if !differs && first == NOT_GIVEN {
                return None;
            }
            (differs == differing).then(|| {
                let shown = if differing { &values[..] } else { &values[..1] };
                let cells = shown.iter().map(|value| match (value, differing) {
                    (_, false) => html(first),
                    (Some(value), true) if value == NOT_GIVEN => "default".to_string(),
                    (Some(value), true) if !value.is_empty() => html(value),
                    _ => NONE.to_string(),
                });
                [format!("<code>{}</code>", html(name))].into_iter().chain(cells).collect()
            })
        })
        .collect();
    let head = match differing {
        true => head("option", runs),
        false => vec!["option".to_string(), "value".to_string()],
    };
    (!rows.is_empty()).then(|| table("options", &head, rows.into_iter()))
}

/// The last evaluations of the runs, by step.
pub fn evaluations(runs: &[ReportedRun]) -> Option<String> {
    let steps: BTreeSet<u64> =
        runs.iter().flat_map(|run| &run.totals.evaluations).map(|(step, _)| *step).collect();
    let rows = steps.iter().map(|step| {
        let losses = runs.iter().map(|run| {
            let found = run.totals.evaluations.iter().find(|(at, _)| at == step);
            found.map_or(NONE.to_string(), |(_, loss)| {
                format!("{} <small>ppl {}</small>", number(*loss), number(loss.exp()))
            })
        });
        [count(*step)].into_iter().chain(losses).collect()
    });
    (!steps.is_empty()).then(|| table("numbers", &head("step", runs), rows))
}

/// The last losses of validation sets and numbers of tasks, by run and step.
pub fn named(runs: &[ReportedRun]) -> Option<String> {
    let found = || runs.iter().flat_map(|run| &run.totals.named);
    let names: BTreeSet<&String> = found().flat_map(|(_, numbers)| numbers.keys()).collect();
    let titles = names.iter().map(|name| html(name));
    let head: Vec<String> = ["run", "step"].map(String::from).into_iter().chain(titles).collect();
    let rows = runs.iter().enumerate().flat_map(|(index, run)| {
        let names = &names;
        run.totals.named.iter().map(move |(step, numbers)| {
            let cells = names.iter().map(|name| {
                numbers.get(*name).map_or_else(|| NONE.to_string(), |value| number(*value))
            });
            [chip(index, run), count(*step)].into_iter().chain(cells).collect()
        })
    });
    (!names.is_empty()).then(|| table("numbers", &head, rows))
}

/// The results of files of `--eval`, a row for each.
pub fn files(results: &[Results]) -> Option<String> {
    let mut names: Vec<&String> = Vec::new();
    for (name, _) in results.iter().flat_map(|found| &found.values) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let titles = names.iter().map(|name| html(name));
    let head: Vec<String> = ["file".to_string()].into_iter().chain(titles).collect();
    let rows = results.iter().map(|found| {
        let cells = names.iter().map(|name| {
            let value = found.values.iter().find(|(other, _)| other == *name);
            match value.map(|(_, value)| (value, value.as_f64(), value.as_str())) {
                None => NONE.to_string(),
                Some((value, _, _)) if value.is_u64() => count(value.as_u64().unwrap_or(0)),
                Some((_, Some(value), _)) => number(value),
                Some((_, _, Some(text))) => html(text),
                Some((value, ..)) => html(&value.to_string()),
            }
        });
        [html(&found.name)].into_iter().chain(cells).collect()
    });
    (!results.is_empty()).then(|| table("numbers", &head, rows))
}
