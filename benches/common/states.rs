//! Sorts samples by the state of the core, which may share its units and caches with another one, at a third of the speed.
//!
//! A short loop in the L1 cache, before and after each sample, tells the state. Both at 0.75 of the fast loops' speed or more
//! is "alone", both below is "shared". A sample between the two counts for neither.

use std::time::Instant;

/// The states, in the order of [`by_state`].
pub const STATES: [&str; 2] = ["alone", "shared"];
/// Share of the fast loops' speed from which on a core is alone.
const ALONE: f64 = 0.75;

/// Seconds of the loop before and after a sample, and of the sample.
#[derive(Clone, Copy)]
pub struct Sample {
    pub probes: [f64; 2],
    pub seconds: f64,
}

/// A sample that is being taken.
pub struct Watch {
    probe: fn() -> f64,
    before: f64,
    began: Instant,
}

impl Watch {
    /// Begins a sample, with `probe` as the loop.
    pub fn start(probe: fn() -> f64) -> Watch {
        probe(); // after other work the core's state is another
        Watch { probe, before: probe(), began: Instant::now() }
    }

    /// Ends the sample.
    pub fn stop(self) -> Sample {
        let seconds = self.began.elapsed().as_secs_f64();
        Sample { probes: [self.before, (self.probe)()], seconds }
    }
}

/// Seconds of the fast loops, beside which all others are slow or not.
pub fn fast<'a>(samples: impl IntoIterator<Item = &'a Sample>) -> f64 {
    let mut probes: Vec<f64> = samples.into_iter().flat_map(|sample| sample.probes).collect();
    probes.sort_by(f64::total_cmp);
    probes.get(probes.len() / 20).copied().unwrap_or(f64::NAN)
}

/// The seconds of the samples in each of [`STATES`], ascending.
pub fn by_state(samples: &[Sample], fast: f64) -> [Vec<f64>; 2] {
    [true, false].map(|alone| {
        let belongs =
            |sample: &&Sample| sample.probes.iter().all(|&probe| (fast / probe >= ALONE) == alone);
        let mut taken: Vec<f64> =
            samples.iter().filter(belongs).map(|sample| sample.seconds).collect();
        taken.sort_by(f64::total_cmp);
        taken
    })
}

/// Seconds of a loop in the L1 cache, about 10 microseconds long.
pub fn probe() -> f64 {
    let start = Instant::now();
    let mut sums = std::hint::black_box([1.0_f32; 4096]);
    for _ in 0..64 {
        for sum in &mut sums {
            *sum = *sum * 0.999 + 0.001;
        }
    }
    std::hint::black_box(sums);
    start.elapsed().as_secs_f64()
}
