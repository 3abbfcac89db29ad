//! Curves: measured values by the bytes of a call.

/// Values by bytes, of which there is at least one; bytes ascend.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve(Vec<[f64; 2]>);

impl Curve {
    /// The curve through these points, of `[bytes, value]`. Without one it is 0 everywhere.
    pub fn new(mut points: Vec<[f64; 2]>) -> Curve {
        points.sort_by(|a, b| a[0].total_cmp(&b[0]));
        points.dedup_by(|a, b| a[0] == b[0]);
        Curve(if points.is_empty() { vec![[0.0; 2]] } else { points })
    }

    /// The points.
    pub fn points(&self) -> &[[f64; 2]] {
        &self.0
    }

    /// The value of a rate: between two points it changes with the logarithm of the bytes, beyond them it does not.
    pub fn rate(&self, bytes: f64) -> f64 {
        match self.around(bytes) {
            [None, Some(point)] | [Some(point), None] => point[1],
            [Some([x, y]), Some([u, v])] => y + (v - y) * (bytes / x).ln() / (u / x).ln(),
            [None, None] => 0.0,
        }
    }

    /// The value of a duration: between two points it changes with the bytes, behind the last as between the last two, and
    /// before the first it does not.
    pub fn seconds(&self, bytes: f64) -> f64 {
        let line = |[x, y]: [f64; 2], [u, v]: [f64; 2]| y + (v - y) * (bytes - x) / (u - x);
        match self.around(bytes) {
            [Some(from), Some(to)] => line(from, to),
            [Some(last), None] => match self.0[..] {
                [.., before, _] => line(before, last).max(last[1]),
                _ => last[1],
            },
            [None, first] => first.map_or(0.0, |point| point[1]),
        }
    }

    /// The points on both sides of `bytes`, as far as there are some.
    fn around(&self, bytes: f64) -> [Option<[f64; 2]>; 2] {
        let behind = self.0.partition_point(|point| point[0] <= bytes);
        [behind.checked_sub(1).map(|at| self.0[at]), self.0.get(behind).copied()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_lie_between_those_of_the_points() {
        let curve = Curve::new(vec![[400.0, 8.0], [100.0, 2.0]]);
        for (bytes, rate, seconds) in [
            (1.0, 2.0, 2.0),
            (100.0, 2.0, 2.0),
            (200.0, 5.0, 4.0),
            (400.0, 8.0, 8.0),
            (800.0, 8.0, 16.0),
        ] {
            assert!((curve.rate(bytes) - rate).abs() < 1e-12, "{bytes}: {}", curve.rate(bytes));
            assert!(
                (curve.seconds(bytes) - seconds).abs() < 1e-12,
                "{bytes}: {}",
                curve.seconds(bytes)
            );
        }
        let noisy = Curve::new(vec![[100.0, 3.0], [200.0, 2.0]]);
        assert_eq!((noisy.seconds(1000.0), Curve::new(vec![[1.0, 7.0]]).seconds(50.0)), (2.0, 7.0));
    }
}
