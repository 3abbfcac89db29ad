//! Requests that ranks tell one another between two steps, in the call that counts the samples of the next one.

use ferrotron_tensor::Result;
use std::time::Instant;

use super::Run;
use crate::training::trainer::{BegunStep, Model};

/// The requests that all ranks know between two steps, beside the state of a checkpoint that is being written.
#[derive(Default)]
pub(super) struct StopRequests {
    /// A rank was asked to stop.
    pub stop: bool,
    /// The deadline has passed on the first rank, whose clock decides for all.
    pub late: bool,
}

impl<M: Model> Run<'_, M> {
    /// Begins the next step, and sums flags over all ranks in the same small call if they wait for one another anyway: requests
    /// to stop, and the state of a checkpoint that is being written, which is published or, if a rank has failed to write it,
    /// an error. The step may then be left out.
    pub(super) fn begin_step(&mut self, asks: bool) -> Result<(StopRequests, BegunStep)> {
        let mut flags = if asks { self.flags().to_vec() } else { Vec::new() };
        let begun = self.trainer.begin_step(self.data.train, &mut flags)?;
        match flags.first_chunk::<4>() {
            Some(sums) => Ok((self.requests(sums)?, begun)),
            None => Ok((StopRequests::default(), begun)),
        }
    }

    /// Like [`Run::begin_step`], where no step follows.
    pub(super) fn agree(&mut self) -> Result<StopRequests> {
        let mut flags = self.flags();
        let sums = self.trainer.mesh().world().sums(self.trainer.host(), &flags)?;
        flags.copy_from_slice(&sums);
        self.requests(&flags)
    }

    /// This rank's requests to stop, and what it knows of the checkpoint that is being written.
    fn flags(&mut self) -> [f64; 4] {
        let late = self.config.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let [stop, late] =
            [self.stop.is_set(), self.first && late].map(|flag| f64::from(u8::from(flag)));
        let [unfinished, failed] = self.saving.flags();
        [stop, late, unfinished, failed]
    }

    fn requests(&mut self, &[stop, late, unfinished, failed]: &[f64; 4]) -> Result<StopRequests> {
        let published = self.saving.advance([unfinished, failed])?;
        self.tell_saved(published);
        Ok(StopRequests { stop: stop > 0.0, late: late > 0.0 })
    }
}
