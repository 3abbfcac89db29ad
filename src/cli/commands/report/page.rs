//! The page: pictures and tables in one document that needs nothing else.
//!
//! Colours are variables of the style sheet, with one set for light and one for dark. The script shows the values under
//! the pointer; without it the page lacks nothing else. A policy in the head forbids every request.

use serde_json::Value;
use std::collections::BTreeSet;
use std::fmt::Write;

use super::chart::{Chart, Style, Unit};
use super::escape::{html, json};
use super::results::Results;
use super::run::{Curves, ReportedRun};
use super::scale::ScaleKind;
use super::series::Series;
use super::{schedule, tables};

/// The beginning of every page.
pub const BEGIN: &str = "<!doctype html>\n<html lang=\"en\" data-made-by=\"ferrotron report\">\n";

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// Forbids everything but what stands in the page.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'";

/// A picture of one curve of every run.
struct Picture {
    title: &'static str,
    subtitle: &'static str,
    kind: ScaleKind,
    unit: Unit,
    style: Style,
    curve: fn(&Curves) -> &Series,
}

const PICTURES: [Picture; 7] = [
    Picture {
        title: "Training loss",
        subtitle: "each step pale, running mean dark",
        kind: ScaleKind::Linear,
        unit: Unit::Plain,
        style: Style::Noisy,
        curve: |curves| &curves.loss,
    },
    Picture {
        title: "Validation loss",
        subtitle: "nats per token",
        kind: ScaleKind::Linear,
        unit: Unit::Plain,
        style: Style::Dots,
        curve: |curves| &curves.validation_loss,
    },
    Picture {
        title: "Learning rate",
        subtitle: "",
        kind: ScaleKind::Linear,
        unit: Unit::Plain,
        style: Style::Exact,
        curve: |curves| &curves.learning_rate,
    },
    Picture {
        title: "Gradient norm",
        subtitle: "before clipping",
        kind: ScaleKind::Logarithmic,
        unit: Unit::Plain,
        style: Style::Noisy,
        curve: |curves| &curves.grad_norm,
    },
    Picture {
        title: "Throughput",
        subtitle: "tokens per second",
        kind: ScaleKind::Linear,
        unit: Unit::Plain,
        style: Style::Noisy,
        curve: |curves| &curves.tokens_per_second,
    },
    Picture {
        title: "Peak memory",
        subtitle: "of the first rank's device",
        kind: ScaleKind::Linear,
        unit: Unit::Bytes,
        style: Style::Exact,
        curve: |curves| &curves.memory,
    },
    Picture {
        title: "Loss scale",
        subtitle: "",
        kind: ScaleKind::Logarithmic,
        unit: Unit::Plain,
        style: Style::Exact,
        curve: |curves| &curves.loss_scale,
    },
];

/// The page of these runs and results.
pub fn page(runs: &[ReportedRun], results: &[Results]) -> String {
    let title = match runs {
        [run] => run.name.clone(),
        _ => format!("{} runs", runs.len()),
    };
    let mut page = format!(
        "{BEGIN}<head><meta charset=\"utf-8\">\n<meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{0} · Ferrotron</title>\n<style>\n{STYLE}</style></head>\n\
         <body><header><h1>{0}</h1><p>Ferrotron {1}</p></header>\n<main>\n",
        html(&title),
        env!("CARGO_PKG_VERSION"),
    );
    section(&mut page, "Results", &tables::results(runs));
    section(&mut page, "Curves", &curves(runs));
    if let Some(table) = tables::options(runs, true) {
        section(&mut page, "Options that differ", &table);
    }
    if let Some(table) = tables::evaluations(runs) {
        section(&mut page, "Evaluations during training", &table);
    }
    if let Some(table) = tables::named(runs) {
        section(&mut page, "Validation sets and tasks", &table);
    }
    if let Some(table) = tables::files(results) {
        section(&mut page, "Evaluations", &table);
    }
    let pictures = schedule::pictures(runs.iter().filter_map(|run| run.pipeline));
    if !pictures.is_empty() {
        let figures = pictures.iter().map(|(heading, svg)| {
            format!(
                "<figure><figcaption><b>{}</b> <span>forward and both halves of backward take equal times</span></figcaption>\
                 <div class=\"scroll paper\">{svg}</div></figure>\n",
                html(heading)
            )
        });
        section(&mut page, "Pipeline schedule", &figures.collect::<String>());
    }
    if let Some(table) = tables::options(runs, false) {
        let summary = if runs.len() > 1 { "Options in common" } else { "Options" };
        let _ = writeln!(page, "<details><summary>{summary}</summary>\n{table}</details>");
    }
    for run in runs {
        if let Some(note) = &run.note {
            let _ = writeln!(
                page,
                "<p class=\"note\">The options of {} are not known: {}</p>",
                html(&run.name),
                html(note)
            );
        }
    }
    let names: Value = runs.iter().map(|run| run.name.as_str()).collect();
    let _ = write!(
        page,
        "</main>\n<div id=\"tip\" hidden></div>\n\
         <script type=\"application/json\" id=\"runs\">{}</script>\n<script>\n{SCRIPT}</script></body></html>\n",
        json(&names)
    );
    page
}

fn section(page: &mut String, heading: &str, content: &str) {
    let _ = writeln!(page, "<section><h2>{heading}</h2>\n{content}</section>");
}

/// The legend and all pictures that have a curve.
fn curves(runs: &[ReportedRun]) -> String {
    let mut text = String::from("<p class=\"legend\">");
    for (index, run) in runs.iter().enumerate() {
        let _ = write!(text, "<span>{}</span>", tables::chip(index, run));
    }
    text += "</p>\n<div class=\"charts\">\n";
    let chart = |picture: &Picture, x_name: &str, last_step: Option<u64>| {
        let last_step = last_step.unwrap_or(0);
        let curves = runs.iter().map(|run| (picture.curve)(&run.curves)).enumerate().collect();
        let Picture { title, subtitle, kind, unit, style, .. } = *picture;
        Chart { title, subtitle, x_name, kind, unit, last_step, curves, style }.figure()
    };
    let steps = runs.iter().map(|run| run.totals.last_step).max();
    text.extend(PICTURES.iter().filter_map(|picture| chart(picture, "step", steps)));
    let named: BTreeSet<&String> = runs.iter().flat_map(|run| run.curves.named.keys()).collect();
    text.extend(named.into_iter().filter_map(|name| {
        let found = runs.iter().enumerate();
        let curves = found.filter_map(|(index, run)| Some((index, run.curves.named.get(name)?)));
        let (curves, last_step) = (curves.collect(), steps.unwrap_or(0));
        Chart {
            title: name,
            subtitle: "",
            x_name: "step",
            kind: ScaleKind::Linear,
            unit: Unit::Plain,
            last_step,
            curves,
            style: Style::Dots,
        }
        .figure()
    }));
    // Steps of runs with other batches cannot be compared.
    let batches = || runs.iter().map(|run| run.totals.tokens_per_step);
    if batches().min() != batches().max() {
        let by_tokens = Picture {
            title: "Training loss by tokens",
            subtitle: "of runs with unlike batches",
            curve: |curves| &curves.loss_by_tokens,
            ..PICTURES[0]
        };
        let tokens = runs.iter().map(|run| run.totals.tokens).max();
        text.extend(chart(&by_tokens, "tokens", tokens));
    }
    text + "</div>\n"
}
