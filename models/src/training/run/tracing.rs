//! The trace of some of a run's steps.

use ferrotron_parallel::trace::Trace;
use ferrotron_tensor::Result;
use std::ops::RangeInclusive;

use super::TraceConfig;
use crate::io::data::Samples;
use crate::training::trainer::{BegunStep, Model, Trainer};

/// A trace that is wanted and not written yet, and its steps.
pub(super) struct Tracing(Option<(RangeInclusive<u64>, Trace)>);

impl Tracing {
    pub fn start<M: Model>(config: Option<&TraceConfig>, trainer: &Trainer<M>) -> Result<Tracing> {
        let begin = |TraceConfig { path, steps }: &TraceConfig| {
            let trace = Trace::start(path, trainer.mesh(), trainer.scope().device())?;
            Ok((steps.clone(), trace))
        };
        Ok(Tracing(config.map(begin).transpose()?))
    }

    /// The trainer's next step, begun with `samples`. One that is traced is waited for.
    pub fn step<M: Model>(
        &self,
        trainer: &mut Trainer<M>,
        begun: BegunStep,
        samples: &dyn Samples,
    ) -> Result<()> {
        let done = trainer.progress().step;
        let last = done + trainer.steps_at_once();
        match &self.0 {
            Some((steps, trace)) if *steps.start() <= last && *steps.end() > done => {
                trace.record(|| {
                    trainer.take_step(begun, samples)?;
                    trainer.scope().device().synchronize()
                })
            }
            _ => trainer.take_step(begun, samples),
        }
    }

    /// Whether `step` was the last that is traced, and the file is to be written.
    pub fn ends_with(&self, step: u64) -> bool {
        self.0.as_ref().is_some_and(|(steps, _)| step >= *steps.end())
    }

    /// Writes the file, if that was not done. All ranks call this.
    pub fn finish(&mut self) -> Result<()> {
        self.0.take().map_or(Ok(()), |(_, trace)| trace.finish())
    }
}
