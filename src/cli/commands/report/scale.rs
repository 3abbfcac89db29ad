//! Axes: the range of values that a picture shows, and the marks on it.

/// The way in which values become distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleKind {
    Linear,
    /// Powers of ten; values that are not positive have no place.
    Logarithmic,
}

/// A range of values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scale {
    pub kind: ScaleKind,
    /// The value at the beginning and the one at the end.
    pub ends: [f64; 2],
}

impl Scale {
    /// A scale of `kind` on which the values from `low` to `high` have a margin.
    pub fn around(kind: ScaleKind, [low, high]: [f64; 2]) -> Scale {
        let ends = match kind {
            ScaleKind::Linear => {
                let margin = if high > low { (high - low) * 0.06 } else { high.abs() * 0.1 };
                let margin = if margin > 0.0 { margin } else { 1.0 };
                // No margin reaches below 0 where no value does.
                let bottom = if low >= 0.0 { (low - margin).max(0.0) } else { low - margin };
                [bottom, high + margin]
            }
            ScaleKind::Logarithmic => {
                let ratio = (high / low).powf(0.06).max(1.1);
                [low / ratio, high * ratio]
            }
        };
        Scale { kind, ends }
    }

    /// The place of a value, 0 at the beginning and 1 at the end.
    pub fn place(&self, value: f64) -> f64 {
        let of = |value: f64| match self.kind {
            ScaleKind::Linear => value,
            ScaleKind::Logarithmic => value.max(f64::MIN_POSITIVE).log10(),
        };
        let [low, high] = self.ends.map(of);
        (of(value) - low) / (high - low)
    }

    /// Round values within the range, about `wanted` of them.
    pub fn marks(&self, wanted: usize) -> Vec<f64> {
        let [low, high] = self.ends;
        match self.kind {
            ScaleKind::Logarithmic if high / low > 30.0 => {
                let powers = low.log10().ceil() as i32..=high.log10().floor() as i32;
                let every = (powers.clone().count()).div_ceil(wanted.max(1)).max(1);
                powers.step_by(every).map(|power| 10_f64.powi(power)).collect()
            }
            _ => {
                let step = round_up((high - low) / wanted.max(1) as f64);
                let first = (low / step).ceil() as i64;
                let last = (high / step).floor() as i64;
                (first..=last).map(|index| index as f64 * step).collect()
            }
        }
    }
}

/// The next of 1, 2 and 5 times a power of ten.
fn round_up(step: f64) -> f64 {
    let power = 10_f64.powf(step.log10().floor());
    let found = [1.0, 2.0, 5.0].into_iter().find(|digit| digit * power >= step * (1.0 - 1e-9));
    found.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_round_and_inside() {
        let scale = Scale { kind: ScaleKind::Linear, ends: [0.0, 1200.0] };
        assert_eq!(scale.marks(6), [0.0, 200.0, 400.0, 600.0, 800.0, 1000.0, 1200.0]);
        let scale = Scale { kind: ScaleKind::Logarithmic, ends: [0.02, 300.0] };
        assert_eq!(scale.marks(5), [0.1, 1.0, 10.0, 100.0]);
        assert_eq!(scale.place(0.02), 0.0);
        assert!((scale.place(300.0) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn one_value_has_a_range_too() {
        for value in [0.0, -2.0, 1e-300, 7.0] {
            let scale = Scale::around(ScaleKind::Linear, [value; 2]);
            assert!(scale.ends[0] < scale.ends[1], "{scale:?}");
            assert!(!scale.marks(5).is_empty() && scale.marks(5).len() < 20, "{scale:?}");
        }
        let scale = Scale::around(ScaleKind::Logarithmic, [3.0; 2]);
        assert!(!scale.marks(4).is_empty());
    }
}
