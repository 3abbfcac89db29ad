//! Draws loss curves.

use ferrotron_parallel::output_file::{self, unwritable};
use ferrotron_tensor::{Error, Result};
use plotters::coord::Shift;
use plotters::coord::types::{RangedCoordf64, RangedCoordu64};
use plotters::prelude::*;
use std::io::{self, Write};
use std::path::Path;

use crate::training::loss_curve::LossCurve;

const OPERATION: &str = "plot";

const TRAINING: RGBColor = RGBColor(150, 170, 200);
const SMOOTHED: RGBColor = RGBColor(30, 80, 160);
const VALIDATION: RGBColor = RGBColor(210, 90, 30);

/// Colours of several runs, in turn.
const RUNS: [RGBColor; 4] = [SMOOTHED, TRAINING, VALIDATION, RGBColor(240, 170, 120)];

/// The first bytes of every picture.
const BEGIN: &[u8] = b"<svg width=\"900\" height=\"500\"";

/// A chart of losses over steps.
type Chart<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<RangedCoordu64, RangedCoordf64>>;

/// The result of a drawing function.
type Drawn<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Draws the curve as SVG: steps in a pale colour, their running mean in a dark one, evaluations as dots. Replaces
/// nothing but an earlier picture.
pub fn plot(curve: &LossCurve, path: &Path) -> Result<()> {
    match curve.training.is_empty() {
        true => Ok(()),
        false => write_picture(|svg| draw(curve, svg), path),
    }
}

/// Draws the running means of the training losses of several runs, each with its name, as SVG. Replaces nothing but an
/// earlier picture.
///
/// # Errors
/// A file that cannot be written, or that holds something else.
pub fn plot_runs(runs: &[(String, LossCurve)], path: &Path) -> Result<()> {
    write_picture(|svg| draw_runs(runs, svg), path)
}

fn write_picture(draw: impl FnOnce(&mut String) -> Drawn<()>, path: &Path) -> Result<()> {
    let mut svg = String::new();
    draw(&mut svg).map_err(|error| Error::io(OPERATION, error.to_string()))?;
    let fail = |error: io::Error| unwritable(OPERATION, path, &error);
    let mut file = output_file::open(OPERATION, path)?;
    let found = output_file::beginning(&mut file, BEGIN.len() as u64).map_err(fail)?;
    if !BEGIN.starts_with(&found) {
        return Err(output_file::not_own(OPERATION, path, "a loss curve"));
    }
    output_file::truncate(&file, 0).and_then(|()| file.write_all(svg.as_bytes())).map_err(fail)
}

fn draw(curve: &LossCurve, svg: &mut String) -> Drawn<()> {
    let area = SVGBackend::with_string(svg, (900, 500)).into_drawing_area();
    let mut chart = axes(&area, &[&curve.training, &curve.validation])?;
    chart.draw_series(LineSeries::new(curve.training.iter().copied(), TRAINING.stroke_width(1)))?;
    draw_mean(&mut chart, "training, running mean", smoothed(&curve.training), SMOOTHED)?;
    if !curve.validation.is_empty() {
        let dots = curve.validation.iter().map(|&point| Circle::new(point, 4, VALIDATION.filled()));
        chart
            .draw_series(dots)?
            .label("validation")
            .legend(|(x, y)| Circle::new((x + 10, y), 4, VALIDATION.filled()));
    }
    draw_legend(&mut chart)?;
    area.present()?;
    Ok(())
}

fn draw_runs(runs: &[(String, LossCurve)], svg: &mut String) -> Drawn<()> {
    let area = SVGBackend::with_string(svg, (900, 500)).into_drawing_area();
    let means: Vec<_> = runs.iter().map(|(_, curve)| smoothed(&curve.training)).collect();
    let mut chart = axes(&area, &means.iter().map(Vec::as_slice).collect::<Vec<_>>())?;
    for (((name, _), mean), colour) in runs.iter().zip(means).zip(RUNS.into_iter().cycle()) {
        draw_mean(&mut chart, name, mean, colour)?;
    }
    draw_legend(&mut chart)?;
    area.present()?;
    Ok(())
}

/// Axes that all finite points fit in.
fn axes<'a>(
    area: &DrawingArea<SVGBackend<'a>, Shift>,
    series: &[&[(u64, f64)]],
) -> Drawn<Chart<'a>> {
    area.fill(&WHITE)?;
    let points = || series.iter().copied().flatten();
    let (low, high) = points()
        .map(|point| point.1)
        .filter(|y| y.is_finite())
        .fold((f64::MAX, f64::MIN), |(low, high), y| (low.min(y), high.max(y)));
    let margin = ((high - low) * 0.05).max(1e-3);
    let last = points().map(|point| point.0).max().unwrap_or(1).max(1);
    let mut chart = ChartBuilder::on(area)
        .caption("Training loss", ("sans-serif", 22))
        .margin(15)
        .x_label_area_size(45)
        .y_label_area_size(60)
        .build_cartesian_2d(0..last, low - margin..high + margin)?;
    chart
        .configure_mesh()
        .x_desc("step")
        .y_desc("cross-entropy (nats per token)")
        .label_style(("sans-serif", 14))
        .light_line_style(BLACK.mix(0.04))
        .bold_line_style(BLACK.mix(0.1))
        .draw()?;
    Ok(chart)
}

fn draw_mean(
    chart: &mut Chart,
    name: &str,
    points: Vec<(u64, f64)>,
    colour: RGBColor,
) -> Drawn<()> {
    chart
        .draw_series(LineSeries::new(points, colour.stroke_width(2)))?
        .label(name)
        .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], colour.stroke_width(2)));
    Ok(())
}

fn draw_legend(chart: &mut Chart) -> Drawn<()> {
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.9))
        .border_style(BLACK.mix(0.2))
        .label_font(("sans-serif", 14))
        .draw()?;
    Ok(())
}

/// Exponential running mean over about a fiftieth of the run, with bias correction.
fn smoothed(points: &[(u64, f64)]) -> Vec<(u64, f64)> {
    let keep = 1.0 - 1.0 / (points.len() as f64 / 50.0).max(1.0);
    let (mut sum, mut weight) = (0.0, 0.0);
    let mean = |&(step, loss): &(u64, f64)| {
        sum = sum * keep + loss;
        weight = weight * keep + 1.0;
        (step, sum / weight)
    };
    points.iter().map(mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_becomes_an_svg_with_axes_and_legend() {
        let training = (1..=100).map(|step| (step, 4.0 / step as f64)).collect();
        let mut svg = String::new();
        draw(&LossCurve { training, validation: vec![(50, 1.0)] }, &mut svg).unwrap();
        for part in ["<svg", "Training loss", "cross-entropy", "validation", "</svg>"] {
            assert!(svg.contains(part), "{part} is missing");
        }
    }

    #[test]
    fn several_runs_share_axes_and_are_named() {
        let curve = |loss: f64| LossCurve {
            training: (1..=100).map(|step| (step, loss)).collect(),
            validation: Vec::new(),
        };
        let runs = [1.0, 2.0, 3.0, 4.0, 5.0].map(|loss| (format!("run {loss}"), curve(loss)));
        let mut svg = String::new();
        draw_runs(&runs, &mut svg).unwrap();
        assert!(runs.iter().all(|(name, _)| svg.contains(name.as_str())), "{svg}");
        assert!(svg.matches("<polyline").count() >= 2 * runs.len());
    }

    #[test]
    fn a_picture_replaces_a_picture_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("loss.svg");
        let curve = |steps: u64| LossCurve {
            training: (1..=steps).map(|step| (step, 1.0)).collect(),
            validation: Vec::new(),
        };
        let read = || std::fs::read_to_string(&path).unwrap();
        plot(&curve(9), &path).unwrap();
        let nine = read();
        plot(&curve(90), &path).unwrap();
        assert_ne!(read(), nine);
        plot(&curve(9), &path).unwrap();
        assert_eq!(read(), nine);
        for foreign in ["<svg width=\"90\" height=\"500\"/>", "notes"] {
            std::fs::write(&path, foreign).unwrap();
            let refused = plot(&curve(9), &path).unwrap_err().to_string();
            assert!(refused.contains("something else than a loss curve"), "{refused}");
            assert_eq!(read(), foreign);
        }
    }

    #[test]
    fn the_running_mean_of_a_constant_is_the_constant() {
        let points: Vec<_> = (0..500).map(|step| (step, 2.5)).collect();
        assert!(smoothed(&points).iter().all(|point| (point.1 - 2.5).abs() < 1e-12));
    }
}
