//! One picture with a curve of each run, as SVG with classes in place of colours, and its numbers for the script.

use serde_json::{Value, json};
use std::fmt::Write;

use super::escape::{html, number};
use super::scale::{Scale, ScaleKind};
use super::series::Series;
use crate::cli::bytes;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 320.0;
const LEFT: f64 = 62.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 34.0;

/// Number of colours, which runs take in turn.
pub const COLOURS: usize = 8;

/// Buckets from which on a curve is drawn pale, with its running mean.
const NOISY: usize = 60;

/// The unit in which values are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    Plain,
    Bytes,
}

impl Unit {
    /// A value in this unit.
    pub fn text(self, value: f64) -> String {
        match self {
            Unit::Plain => number(value),
            Unit::Bytes => bytes::display(value as u64),
        }
    }

    /// A value at an axis, where room is small.
    fn mark(self, value: f64) -> String {
        match self {
            Unit::Bytes if value > 0.0 => bytes::display(value as u64).replace(".00", ""),
            Unit::Bytes => "0".to_string(),
            Unit::Plain => short(value),
        }
    }
}

/// A number at an axis: thousands as k, millions as M, and so on.
fn short(value: f64) -> String {
    let units = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    match units.into_iter().find(|(size, _)| value.abs() >= *size) {
        Some((size, unit)) if value.abs() < 1e15 => format!("{}{unit}", number(value / size)),
        _ => number(value),
    }
}

/// The way in which the points of a curve are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// A line.
    Exact,
    /// A pale line and its running mean.
    Noisy,
    /// A line, and a dot at each point.
    Dots,
}

/// A picture.
pub struct Chart<'a> {
    pub title: &'a str,
    pub subtitle: &'a str,
    /// The name of what goes to the right.
    pub x_name: &'a str,
    pub kind: ScaleKind,
    pub unit: Unit,
    /// The end of what goes to the right; it begins with 0.
    pub last_step: u64,
    /// The curve of each run, with the run's index.
    pub curves: Vec<(usize, &'a Series)>,
    pub style: Style,
}

impl Chart<'_> {
    /// The picture in a figure with its title; nothing if no curve has a point.
    pub fn figure(&self) -> Option<String> {
        let curves: Vec<_> =
            self.curves.iter().filter(|curve| !curve.1.buckets().is_empty()).collect();
        let ranges = curves.iter().filter_map(|(_, series)| series.range());
        let range = ranges.reduce(|all, one| [all[0].min(one[0]), all[1].max(one[1])])?;
        let kind = if range[0] > 0.0 { self.kind } else { ScaleKind::Linear };
        let y = Scale::around(kind, range);
        let x = Scale { kind: ScaleKind::Linear, ends: [0.0, self.last_step.max(1) as f64] };

        let mut svg = format!(
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">\n",
            html(self.title)
        );
        self.axes(&mut svg, &x, &y);
        for (run, series) in &curves {
            self.curve(&mut svg, (&x, &y), run % COLOURS, series);
        }
        svg += "<g class=\"hover\"></g></svg>";
        let data = super::escape::json(&self.data(&curves, (&x, &y)));
        let title = html(self.title);
        let thinned = |series: &Series| series.buckets().iter().any(|b| b.steps[0] < b.steps[1]);
        let band =
            if curves.iter().any(|curve| thinned(curve.1)) { "band: least to largest" } else { "" };
        let notes = [self.subtitle, band].into_iter().filter(|note| !note.is_empty());
        let subtitle = html(&notes.collect::<Vec<_>>().join("; "));
        Some(format!(
            "<figure class=\"chart\"><figcaption><b>{title}</b> <span>{subtitle}</span></figcaption>\n{svg}\n\
             <script type=\"application/json\">{data}</script></figure>\n"
        ))
    }

    fn axes(&self, svg: &mut String, x: &Scale, y: &Scale) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for mark in y.marks(5) {
            let place = y_place(y, mark);
            let text = html(&self.unit.mark(mark));
            let _ = writeln!(
                svg,
                "<path class=\"grid\" d=\"M{LEFT} {place:.1}H{right}\"/>\
                 <text class=\"y\" x=\"{}\" y=\"{:.1}\">{text}</text>",
                LEFT - 8.0,
                place + 4.0
            );
        }
        for mark in x.marks(6).into_iter().filter(|mark| mark.fract() == 0.0) {
            let place = x_place(x, mark);
            let text = short(mark);
            let _ = writeln!(
                svg,
                "<text class=\"x\" x=\"{place:.1}\" y=\"{}\">{text}</text>",
                bottom + 17.0
            );
        }
        let _ = writeln!(
            svg,
            "<path class=\"axis\" d=\"M{LEFT} {bottom}H{right}\"/>\
             <text class=\"name\" x=\"{right}\" y=\"{}\">{}</text>",
            HEIGHT - 2.0,
            html(self.x_name)
        );
    }

    fn curve(&self, svg: &mut String, (x, y): (&Scale, &Scale), colour: usize, series: &Series) {
        let buckets = series.buckets();
        let at = |step: u64, value: f64| (x_place(x, step as f64), y_place(y, value));
        let middle = |steps: [u64; 2]| steps[0].midpoint(steps[1]);
        let line = |values: &mut dyn Iterator<Item = (u64, f64)>| {
            let mut path = String::new();
            for (index, (step, value)) in values.enumerate() {
                let (x, y) = at(step, value);
                let _ = write!(path, "{}{x:.1} {y:.1}", if index == 0 { "M" } else { "L" });
            }
            path
        };
        let means = line(&mut buckets.iter().map(|bucket| (middle(bucket.steps), bucket.mean())));
        let noisy = self.style == Style::Noisy && buckets.len() >= NOISY;
        if buckets.iter().any(|bucket| bucket.high > bucket.low) {
            // The band between the least and the largest value of each bucket.
            let up = line(&mut buckets.iter().map(|bucket| (middle(bucket.steps), bucket.high)));
            let back = buckets.iter().rev().map(|bucket| (middle(bucket.steps), bucket.low));
            let down = line(&mut { back }).replacen('M', "L", 1);
            let _ = writeln!(svg, "<path class=\"band c{colour}\" d=\"{up}{down}Z\"/>");
        }
        let class = if noisy { "line pale" } else { "line" };
        let _ = writeln!(svg, "<path class=\"{class} c{colour}\" d=\"{means}\"/>");
        if noisy {
            let steps = buckets.iter().map(|bucket| middle(bucket.steps));
            let smoothed = line(&mut steps.zip(series.smoothed()));
            let _ = writeln!(svg, "<path class=\"line c{colour}\" d=\"{smoothed}\"/>");
        }
        if self.style == Style::Dots && buckets.len() <= 100 || buckets.len() == 1 {
            for bucket in buckets {
                let (x, y) = at(middle(bucket.steps), bucket.mean());
                let _ = write!(
                    svg,
                    "<circle class=\"dot c{colour}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"/>"
                );
            }
            svg.push('\n');
        }
    }

    /// The numbers that the script shows under the pointer.
    fn data(&self, curves: &[&(usize, &Series)], (x, y): (&Scale, &Scale)) -> Value {
        let curve = |(run, series): &(usize, &Series)| {
            let rows: Vec<Value> = series
                .buckets()
                .iter()
                .map(|bucket| {
                    let text = match bucket.high > bucket.low {
                        false => self.unit.text(bucket.mean()),
                        true => format!(
                            "{} ({} to {})",
                            self.unit.text(bucket.mean()),
                            self.unit.text(bucket.low),
                            self.unit.text(bucket.high)
                        ),
                    };
                    let place = y_place(y, bucket.mean());
                    json!([bucket.steps[0], bucket.steps[1], (place * 10.0).round() / 10.0, text])
                })
                .collect();
            json!({ "run": run, "rows": rows })
        };
        json!({
            "x": x.ends,
            "left": LEFT,
            "right": WIDTH - RIGHT,
            "top": TOP,
            "bottom": HEIGHT - BOTTOM,
            "x_name": self.x_name,
            "curves": curves.iter().map(|found| curve(found)).collect::<Vec<_>>(),
        })
    }
}

fn x_place(scale: &Scale, value: f64) -> f64 {
    LEFT + scale.place(value) * (WIDTH - RIGHT - LEFT)
}

fn y_place(scale: &Scale, value: f64) -> f64 {
    HEIGHT - BOTTOM - scale.place(value) * (HEIGHT - BOTTOM - TOP)
}
