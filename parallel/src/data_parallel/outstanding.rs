//! The gradients of steps that are summed while later steps are computed.

use ferrotron_autograd::SharedFlatBuffer;
use ferrotron_nn::{ParamAndGradBucket, ParamAndGradBuffer};
use ferrotron_tensor::{Category, Device, FlatBuffer, Result, Tensor};
use std::collections::VecDeque;

use super::config::AsyncUpdates;
use crate::collective::{Group, Reduction, Work};

/// The gradients of steps whose updates are not applied yet.
pub(super) struct Outstanding {
    /// The steps, earliest first.
    pub steps: VecDeque<LaunchedStep>,
    /// Gradient buffers that no step uses: one for each bucket.
    pub free: Vec<Vec<SharedFlatBuffer>>,
    /// The updates that the weights of the step under way miss, if there is one.
    pub staleness: Option<usize>,
    /// The device of numbers. They are not in the memory of the model's, so that it does not depend on time.
    pub host: Device,
}

/// A step whose gradients are being summed.
pub(super) struct LaunchedStep {
    gradients: Vec<SharedFlatBuffer>,
    sums: Vec<Work<()>>,
    numbers: Work<Tensor>,
}

/// The sums over all ranks of a step. Those of the gradients are in the gradient buffers.
#[derive(Debug, Clone, PartialEq)]
pub struct UpdateSums {
    /// The sums of the numbers that ranks gave with their gradients.
    pub numbers: Vec<f64>,
    /// The updates that the weights of each rank missed when it computed its gradient.
    pub staleness: Vec<usize>,
}

impl Outstanding {
    /// Allocates the buffers of as many steps as may be outstanding: none without asynchronous updates.
    pub fn new(buffers: &ParamAndGradBuffer, config: Option<AsyncUpdates>) -> Result<Outstanding> {
        let steps = config.map_or(0, |config| config.max_staleness);
        let of_group = |group: &ParamAndGradBucket| {
            let (device, dtype) = (group.gradients.device(), group.gradients.dtype());
            let flat = FlatBuffer::new(device, dtype, Category::Gradients, &group.ranges())?;
            Ok(SharedFlatBuffer::new(flat))
        };
        let of_step = |_| buffers.groups().iter().map(of_group).collect();
        Ok(Outstanding {
            steps: VecDeque::new(),
            free: (0..steps).map(of_step).collect::<Result<_>>()?,
            staleness: None,
            host: Device::cpu(1)?,
        })
    }

    /// Notes that a step begins, at the weights that there are.
    pub fn begin_step(&mut self) {
        self.staleness = Some(self.steps.len());
    }
}

impl LaunchedStep {
    /// Starts to sum gradients and numbers over `ranks`.
    pub fn new(
        ranks: &Group,
        gradients: Vec<SharedFlatBuffer>,
        numbers: Tensor,
    ) -> Result<LaunchedStep> {
        let sum = |flat| ranks.all_reduce_flat(flat, Reduction::Sum);
        let sums = gradients.iter().map(sum).collect();
        Ok(LaunchedStep { sums, numbers: ranks.all_reduce(numbers, Reduction::Sum)?, gradients })
    }

    /// Returns whether [`LaunchedStep::wait`] would return at once.
    pub fn is_done(&self) -> bool {
        self.numbers.is_done() && self.sums.iter().all(Work::is_done)
    }

    /// Waits for the sums.
    pub fn wait(self, ranks: usize) -> Result<(Vec<SharedFlatBuffer>, UpdateSums)> {
        self.sums.into_iter().try_for_each(Work::wait)?;
        let mut numbers = self.numbers.wait()?.to_vec::<f64>()?;
        let staleness = numbers.split_off(numbers.len() - ranks);
        let staleness = staleness.into_iter().map(|steps| steps as usize).collect();
        Ok((self.gradients, UpdateSums { numbers, staleness }))
    }
}
