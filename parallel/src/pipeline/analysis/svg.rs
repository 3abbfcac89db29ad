//! Draws a timeline as SVG, in the style of figure 4 of arXiv:2104.04473. It has one row per rank, one box with the
//! micro-batch number per computation, one shade per chunk.

use std::fmt::Write;

use crate::pipeline::analysis::simulate::Timeline;
use crate::pipeline::analysis::text::{parts, rounded, time_unit};
use crate::pipeline::schedule::instruction::Instruction;

const ROW: f64 = 30.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 62.0;
const LEGEND: f64 = 74.0;
/// Width of the shortest computation, unless the picture would exceed [`WIDEST`].
const BOX: f64 = 24.0;
const WIDEST: f64 = 6000.0;
const NARROWEST: f64 = 640.0;
const FONT: f64 = 12.0;
/// Width of a digit in units of the font size, in common sans-serif fonts.
const DIGIT: f64 = 0.56;

/// Names and RGB colours of the kinds of computations.
const KINDS: [(&str, [f64; 3]); 4] = [
    ("forward", [38.0, 92.0, 170.0]),
    ("backward", [40.0, 128.0, 74.0]),
    ("backward, input", [18.0, 134.0, 140.0]),
    ("backward, weights", [190.0, 104.0, 20.0]),
];

/// The row of [`KINDS`] for an instruction.
fn kind(instruction: &Instruction) -> usize {
    match instruction {
        Instruction::Backward { .. } => 1,
        Instruction::BackwardInput { .. } => 2,
        Instruction::BackwardWeight { .. } => 3,
        _ => 0,
    }
}

/// The fill colour of a kind, lighter for later chunks, and the colour of its number.
fn colours(kind: usize, chunk: usize, chunks: usize) -> (String, &'static str) {
    let light = 0.72 * chunk as f64 / (chunks.max(2) - 1) as f64;
    let [red, green, blue] = KINDS[kind].1.map(|part| (part + (255.0 - part) * light).round());
    (format!("rgb({red},{green},{blue})"), if light > 0.4 { "#111" } else { "#fff" })
}

/// Draws a timeline as SVG. `title` is one line of text.
pub fn draw(timeline: &Timeline, title: &str) -> String {
    let total = timeline.total();
    let durations = (0..timeline.ranks.len())
        .flat_map(|rank| timeline.computations(rank))
        .map(|span| span.end - span.start);
    let shortest = durations.filter(|&duration| duration > 0.0).fold(total, f64::min);
    let scale = (BOX / shortest).min(WIDEST / total).max(NARROWEST / total);
    let x = |time: f64| LEFT + time * scale;
    let bottom = TOP + ROW * timeline.ranks.len() as f64;
    let (width, height) = (x(total) + RIGHT, bottom + LEGEND);

    let mut svg = Svg(String::new());
    svg.line(format_args!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
         viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"Helvetica, Arial, sans-serif\" font-size=\"{FONT}\">"
    ));
    svg.line(format_args!("<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>"));
    svg.text(LEFT, 28.0, "start", "font-size=\"16\" fill=\"#111\"", title);
    for rank in 0..timeline.ranks.len() {
        let y = TOP + ROW * rank as f64;
        svg.text(LEFT - 10.0, y + ROW / 2.0 + 4.0, "end", "fill=\"#111\"", &format!("rank {rank}"));
        svg.rect([LEFT, y, total * scale, ROW], "#eceef1", "#fff");
    }
    for rank in 0..timeline.ranks.len() {
        let y = TOP + ROW * rank as f64;
        for span in timeline.computations(rank) {
            let Some((_, microbatch, chunk)) = parts(&span.instruction) else { continue };
            let (left, wide) = (x(span.start), (span.end - span.start) * scale);
            let (fill, ink) = colours(kind(&span.instruction), chunk, timeline.chunks);
            svg.rect([left, y, wide, ROW], &fill, "#fff");
            let number = microbatch.to_string();
            if DIGIT * FONT * number.len() as f64 + 2.0 <= wide {
                let fill = format!("fill=\"{ink}\"");
                svg.text(left + wide / 2.0, y + ROW / 2.0 + 4.0, "middle", &fill, &number);
            }
        }
    }
    axis(&mut svg, total, scale, bottom);
    legend(&mut svg, timeline, bottom + 56.0);
    svg.line(format_args!("</svg>"));
    svg.0
}

/// Draws the time axis, with marks at 1, 2 or 5 times a power of ten.
fn axis(svg: &mut Svg, total: f64, scale: f64, y: f64) {
    let (per_second, name) = time_unit(total);
    let least = 44.0 / scale;
    let power = 10f64.powf(least.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power);
    let step = steps.into_iter().find(|&step| step >= least).unwrap_or(least);
    for mark in 0..=(total / step).floor() as usize {
        let (time, x) = (mark as f64 * step, LEFT + mark as f64 * step * scale);
        svg.line(format_args!(
            "<line x1=\"{x:.1}\" y1=\"{y:.1}\" x2=\"{x:.1}\" y2=\"{:.1}\" stroke=\"#555\"/>",
            y + 5.0
        ));
        let label = rounded(time * per_second).to_string();
        svg.text(x, y + 18.0, "middle", "fill=\"#555\"", &label);
    }
    svg.text(LEFT - 10.0, y + 18.0, "end", "fill=\"#555\"", &format!("time/{name}"));
}

/// Draws the legend: the kinds that occur, with a box per chunk.
fn legend(svg: &mut Svg, timeline: &Timeline, y: f64) {
    let mut x = LEFT;
    for (row, (name, _)) in KINDS.iter().enumerate() {
        let occurs = |rank| {
            let mut spans = timeline.computations(rank);
            spans.any(|span| kind(&span.instruction) == row)
        };
        if !(0..timeline.ranks.len()).any(occurs) {
            continue;
        }
        for chunk in 0..timeline.chunks {
            svg.rect([x, y - 11.0, 14.0, 14.0], &colours(row, chunk, timeline.chunks).0, "#fff");
            x += 15.0;
        }
        svg.text(x + 6.0, y, "start", "fill=\"#111\"", name);
        x += 30.0 + DIGIT * FONT * name.len() as f64;
    }
    if timeline.chunks > 1 {
        let last = timeline.chunks - 1;
        svg.text(x, y, "start", "fill=\"#555\"", &format!("dark: chunk 0, light: chunk {last}"));
    }
}

/// The SVG text under construction.
struct Svg(String);

impl Svg {
    fn line(&mut self, arguments: std::fmt::Arguments) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "{arguments}");
    }

    fn rect(&mut self, [x, y, width, height]: [f64; 4], fill: &str, stroke: &str) {
        self.line(format_args!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{fill}\" \
             stroke=\"{stroke}\"/>"
        ));
    }

    fn text(&mut self, x: f64, y: f64, anchor: &str, attributes: &str, text: &str) {
        let text = text.replace('&', "&amp;").replace('<', "&lt;");
        self.line(format_args!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" {attributes}>{text}</text>"
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::{PipelineConfig, PipelineSchedule, ScheduleKind, StageTimes, simulate};

    #[test]
    fn every_computation_has_a_box_and_a_number() {
        let kind = ScheduleKind::ZbH1;
        let config = PipelineConfig { kind, stages: 4, microbatches: 8, chunks: 1 };
        let schedule = PipelineSchedule::new(&config).unwrap();
        let svg = draw(&simulate(&schedule, &StageTimes::default()).unwrap(), "a < b & c");
        // The background, 4 rows, 3 computations of 8 microbatches on 4 ranks, 3 rows of the legend.
        assert_eq!(svg.matches("<rect").count(), 1 + 4 + 4 * 8 * 3 + 3, "{svg}");
        assert_eq!(svg.matches(">7</text>").count(), 4 * 3, "{svg}");
        for part in ["<svg ", "a &lt; b &amp; c", "rank 3", "backward, weights", "</svg>"] {
            assert!(svg.contains(part), "{part} is missing: {svg}");
        }
    }
}
