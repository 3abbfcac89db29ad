//! What steps found, and how the host learns of it: on a GPU it reads the numbers of many steps at once, when somebody
//! wants to know them.

use ferrotron_parallel::collective::Group;
use ferrotron_tensor::ops::outcome::Outcomes;
use ferrotron_tensor::{Device, Result};
use std::time::Instant;

use crate::checkpoint::Progress;

/// What one step found.
#[derive(Debug, Clone, Copy)]
pub struct StepReport {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean loss over the counted tokens of the global batch.
    pub loss: f64,
    /// Learning rate used.
    pub lr: f64,
    /// Global gradient norm before clipping; not finite in a step that was skipped.
    pub grad_norm: f64,
    /// What the loss was multiplied with before backward.
    pub loss_scale: f64,
    /// Whether the gradients overflowed and nothing was updated.
    pub skipped: bool,
    /// Tokens seen.
    pub tokens: u64,
    /// Duration in seconds: the mean of the steps that were read together, where there were several.
    pub seconds: f64,
}

/// Steps of which a GPU keeps the numbers. Beyond that many they are read, whether anybody wants them or not.
const KEPT: usize = 1024;

/// The steps of which nobody has got the report yet.
pub(super) struct Reports {
    /// The numbers, where they are computed.
    pub outcomes: Outcomes,
    /// Steps whose numbers were not read.
    unread: Vec<Given>,
    /// Those that were.
    read: Vec<StepReport>,
}

/// What the host knows of a step that the device was given.
pub(super) struct Given {
    pub lr: f64,
    pub loss_scale: f64,
    pub tokens: u64,
    pub started: Instant,
    /// How far the run was before it, and the optimizer.
    pub before: Progress,
    pub updates: u64,
}

/// A step that must not be gone on from.
pub(super) struct Lost {
    pub given: Given,
    pub loss: f64,
    pub grad_norm: f64,
    /// How many steps came after it.
    pub later: usize,
}

impl Reports {
    /// Of no step yet. Where nobody has to be waited for, the numbers of each step are read at once.
    pub fn new(device: &Device) -> Result<Reports> {
        let kept = if device.is_gpu() { KEPT } else { 1 };
        Ok(Reports { outcomes: Outcomes::new(device, kept)?, unread: Vec::new(), read: Vec::new() })
    }

    /// A step whose outcome the device will find.
    pub fn push(&mut self, given: Given) {
        self.unread.push(given);
    }

    /// Whether no further step can be kept.
    pub fn is_full(&self) -> bool {
        self.unread.len() == self.outcomes.rows()
    }

    /// Whether there are steps whose numbers were not read.
    pub fn is_unread(&self) -> bool {
        !self.unread.is_empty()
    }

    /// Reads the numbers of all steps, in one transfer; the first that must not be gone on from, if there is one. Nothing
    /// is known of those after it.
    ///
    /// Errors if a collective of `world` has failed, which leaves numbers of no meaning.
    pub fn read(&mut self, world: &Group) -> Result<Option<Lost>> {
        let Some(first) = self.unread.first() else { return Ok(None) };
        let (found, stopped) = self.outcomes.read(self.unread.len())?;
        world.check()?;
        let seconds = first.started.elapsed().as_secs_f64() / found.len() as f64;
        let (mut lost, count) = (None, found.len());
        for (index, (given, found)) in self.unread.drain(..).zip(found).enumerate() {
            let (loss, grad_norm) = (found.loss, found.grad_norm);
            if Some(index) == stopped {
                lost = Some(Lost { given, loss, grad_norm, later: count - index - 1 });
                break;
            }
            self.read.push(StepReport {
                step: given.before.step + 1,
                loss,
                lr: given.lr,
                grad_norm,
                loss_scale: given.loss_scale,
                skipped: !grad_norm.is_finite(),
                tokens: given.tokens,
                seconds,
            });
        }
        Ok(lost)
    }

    /// The report of the step that was given last, if it was read.
    pub fn last(&mut self) -> Option<&mut StepReport> {
        self.read.last_mut().filter(|_| self.unread.is_empty())
    }

    /// Forgets all steps.
    pub fn forget(&mut self) -> Result<()> {
        self.unread.clear();
        self.read.clear();
        self.outcomes.clear()
    }

    /// The reports that were read.
    pub fn take(&mut self) -> Vec<StepReport> {
        std::mem::take(&mut self.read)
    }
}
