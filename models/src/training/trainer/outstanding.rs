//! A step of asynchronous data parallelism between its gradients and its update.

use ferrotron_nn::StepConfig;

use super::report::InFlightStep;
use crate::training::loss::LossCounts;

/// A step whose update is not applied yet.
pub(super) struct OutstandingStep {
    pub given: InFlightStep,
    /// The elements of the loss terms on this rank.
    pub counts: LossCounts,
    /// The learning rate of its update.
    pub config: StepConfig,
    /// The time that launching it took.
    pub seconds: f64,
}
