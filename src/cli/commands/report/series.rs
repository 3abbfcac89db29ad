//! Thins a curve of any length to a bounded number of points while it is read.
//!
//! Consecutive points share a bucket, which keeps their mean, least and largest value. When there are too many buckets,
//! neighbours merge in pairs and the following ones take twice as many points.

/// Largest number of buckets, about the width of a picture.
pub const MOST_BUCKETS: usize = 800;

/// Several points in one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bucket {
    /// The first and the last step.
    pub steps: [u64; 2],
    count: u64,
    sum: f64,
    /// The least value.
    pub low: f64,
    /// The largest value.
    pub high: f64,
}

impl Bucket {
    /// The mean value.
    pub fn mean(&self) -> f64 {
        self.sum / self.count as f64
    }

    fn join(self, later: Bucket) -> Bucket {
        Bucket {
            steps: [self.steps[0], later.steps[1]],
            count: self.count + later.count,
            sum: self.sum + later.sum,
            low: self.low.min(later.low),
            high: self.high.max(later.high),
        }
    }
}

/// A curve.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    buckets: Vec<Bucket>,
    /// Points of each bucket but the last.
    width: u64,
}

impl Default for Series {
    fn default() -> Series {
        Series { buckets: Vec::new(), width: 1 }
    }
}

impl Series {
    /// Adds a point; one that is not finite is left out.
    pub fn push(&mut self, step: u64, value: f64) {
        if !value.is_finite() {
            return;
        }
        let point = Bucket { steps: [step; 2], count: 1, sum: value, low: value, high: value };
        match self.buckets.last_mut() {
            Some(bucket) if bucket.count < self.width => *bucket = bucket.join(point),
            _ => self.buckets.push(point),
        }
        if self.buckets.len() > MOST_BUCKETS {
            let pairs = self.buckets.chunks(2);
            self.buckets =
                pairs.map(|pair| pair.iter().copied().reduce(Bucket::join).expect("one")).collect();
            self.width *= 2;
        }
    }

    /// The buckets in order.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// The least and the largest value.
    pub fn range(&self) -> Option<[f64; 2]> {
        let ranges = self.buckets.iter().map(|bucket| [bucket.low, bucket.high]);
        ranges.reduce(|all, one| [all[0].min(one[0]), all[1].max(one[1])])
    }

    /// The mean over about a fiftieth of the curve around each point, over less near both ends.
    pub fn smoothed(&self) -> Vec<f64> {
        let means: Vec<f64> = self.buckets.iter().map(Bucket::mean).collect();
        let window = means.len() / 100;
        let around = |index: usize| {
            let reach = window.min(index).min(means.len() - 1 - index);
            let near = &means[index - reach..=index + reach];
            near.iter().sum::<f64>() / near.len() as f64
        };
        (0..means.len()).map(around).collect()
    }

    /// The mean over the last fiftieth of the curve.
    pub fn end(&self) -> Option<f64> {
        let from = self.buckets.len() - self.buckets.len().div_ceil(50);
        let last = self.buckets[from..].iter().copied().reduce(Bucket::join)?;
        Some(last.mean())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_curve_keeps_its_mean_and_its_peaks() {
        let mut series = Series::default();
        for step in 1..=1_000_000_u64 {
            series.push(step, if step == 777_777 { 50.0 } else { (step % 10) as f64 });
        }
        assert!(
            series.buckets().len() <= MOST_BUCKETS && series.buckets().len() > MOST_BUCKETS / 4
        );
        assert_eq!(series.range(), Some([0.0, 50.0]));
        let means: Vec<f64> = series.buckets().iter().map(Bucket::mean).collect();
        assert!((means.iter().sum::<f64>() / means.len() as f64 - 4.5).abs() < 0.1);
        let steps: Vec<_> = series.buckets().iter().map(|bucket| bucket.steps).collect();
        assert_eq!((steps[0][0], steps.last().unwrap()[1]), (1, 1_000_000));
        assert!(steps.windows(2).all(|pair| pair[0][1] + 1 == pair[1][0]));
    }

    #[test]
    fn a_short_curve_stays_as_it_is() {
        let mut series = Series::default();
        assert_eq!(series.range(), None);
        for (step, value) in [(3, 1.0), (4, f64::NAN), (9, 2.0)] {
            series.push(step, value);
        }
        let points: Vec<_> =
            series.buckets().iter().map(|bucket| (bucket.steps, bucket.mean())).collect();
        assert_eq!(points, [([3, 3], 1.0), ([9, 9], 2.0)]);
        assert_eq!((series.smoothed(), series.end()), (vec![1.0, 2.0], Some(2.0)));
    }
}
