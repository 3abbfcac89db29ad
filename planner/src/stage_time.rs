//! The time of a stage's step, by parts.

use crate::steps::{Part, Traffic};

/// Where time of a rank goes. Communication lies beside the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Slot {
    Computing(Part),
    Exposed(Traffic),
    Communicating(Traffic),
    Bubble,
}

/// The parts of a stage's step, in seconds.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StageTime {
    /// Kernels, by [`Part`].
    pub computing: [f64; 4],
    /// Waits for communication, by [`Traffic`].
    pub exposed: [f64; 6],
    /// Durations of communication, by [`Traffic`].
    pub communicating: [f64; 6],
    /// Waits for other stages.
    pub bubble: f64,
    /// Number of launches, by the index of the program.
    pub launches: Vec<u64>,
}

impl StageTime {
    /// Adds time to its part.
    pub(crate) fn add(&mut self, slot: Slot, seconds: f64) {
        let part = match slot {
            Slot::Computing(part) => &mut self.computing[part as usize],
            Slot::Exposed(traffic) => &mut self.exposed[traffic as usize],
            Slot::Communicating(traffic) => &mut self.communicating[traffic as usize],
            Slot::Bubble => &mut self.bubble,
        };
        *part += seconds;
    }

    /// The time of all parts.
    pub fn total(&self) -> f64 {
        self.computing.iter().chain(&self.exposed).sum::<f64>() + self.bubble
    }

    /// The mean over stages, without launches.
    pub fn mean(stages: &[StageTime]) -> StageTime {
        let each = |of: &dyn Fn(&StageTime) -> f64| {
            stages.iter().map(of).sum::<f64>() / stages.len() as f64
        };
        StageTime {
            computing: std::array::from_fn(|part| each(&|stage| stage.computing[part])),
            exposed: std::array::from_fn(|kind| each(&|stage| stage.exposed[kind])),
            communicating: std::array::from_fn(|kind| each(&|stage| stage.communicating[kind])),
            bubble: each(&|stage| stage.bubble),
            launches: Vec::new(),
        }
    }

    /// The same of one of so many equal parts.
    pub(crate) fn divided_by(mut self, count: f64) -> StageTime {
        let times =
            self.computing.iter_mut().chain(&mut self.exposed).chain(&mut self.communicating);
        times.chain([&mut self.bubble]).for_each(|time| *time /= count);
        self
    }

    /// Communication that runs beside computation, by kind.
    pub fn hidden(&self, kind: Traffic) -> f64 {
        (self.communicating[kind as usize] - self.exposed[kind as usize]).max(0.0)
    }
}
