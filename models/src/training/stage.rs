//! Runs a rank's model chunks on the micro-batches of a step, and sums their losses.

use ferrotron_autograd::{LossGradient, Var};
use ferrotron_nn::{Axis, Scope};
use ferrotron_parallel::data_parallel::DataParallel;
use ferrotron_parallel::mesh::Mesh;
use ferrotron_parallel::pipeline::PipelineModel;
use ferrotron_tensor::ops::pointwise::add_assign;
use ferrotron_tensor::{DType, Device, Error, Result, Tensor};

use crate::training::loss::{LossReduction, LossSums};
use crate::training::microbatch::Microbatch;
use crate::training::model::{Model, StageOutput};

/// The chunks of a rank, and their micro-batches.
pub(crate) struct StageModel<'a, M> {
    parts: &'a [M],
    scope: &'a Scope,
    data_parallel: Option<&'a DataParallel>,
    microbatches: &'a [Microbatch],
    loss: &'a LossReduction,
    /// The gradient of the loss.
    gradient: LossGradient,
    /// Whether this rank counts the loss, which is equal on all ranks along the tensor axis.
    counts: bool,
    losses: LossSums,
}

impl<'a, M: Model> StageModel<'a, M> {
    /// The chunks `parts`, to run `microbatches`.
    pub fn new(
        parts: &'a [M],
        scope: &'a Scope,
        mesh: &Mesh,
        microbatches: &'a [Microbatch],
        loss: &'a LossReduction,
    ) -> Result<StageModel<'a, M>> {
        // Written by the host, since a fake device computes nothing.
        let zero = |_: &&str| Tensor::full(scope.device(), DType::F64, &[], 0.0);
        let sums = loss.names.iter().map(zero).collect::<Result<_>>()?;
        Ok(StageModel {
            parts,
            scope,
            data_parallel: None,
            microbatches,
            loss,
            gradient: LossGradient::Number(loss.cotangent),
            counts: mesh.axis(Axis::Tensor).rank() == 0,
            losses: LossSums { sums, returned: vec![false; loss.names.len()] },
        })
    }

    /// Sets `data_parallel` to reduce gradients.
    pub fn reduced_by(mut self, data_parallel: &'a DataParallel) -> StageModel<'a, M> {
        self.data_parallel = Some(data_parallel);
        self
    }

    /// Sets the gradient of the loss: [`LossReduction::cotangent`] times the loss scale.
    pub fn with_loss_gradient(mut self, gradient: LossGradient) -> StageModel<'a, M> {
        self.gradient = gradient;
        self
    }

    /// Adds to `losses`, which [`StageModel::into_sums`] of other micro-batches returned.
    pub fn adding_to(mut self, losses: LossSums) -> StageModel<'a, M> {
        self.losses = losses;
        self
    }

    /// The loss terms of this rank; the sums over the world are those of the global batch.
    pub fn into_sums(self) -> Result<LossSums> {
        let LossSums { mut sums, returned } = self.losses;
        if !self.counts {
            let zero = |sum: &Tensor| Tensor::full(sum.device(), DType::F64, &[], 0.0);
            sums = sums.iter().map(zero).collect::<Result<_>>()?;
        }
        Ok(LossSums { sums, returned })
    }

    /// Adds loss terms to the sums, and returns their weighted sum, if there are any.
    fn add(&mut self, losses: Vec<(&'static str, Var)>) -> Result<Option<Var>> {
        let mut total: Option<Var> = None;
        for (name, sum) in losses {
            let Some(term) = self.loss.names.iter().position(|known| *known == name) else {
                let message = format!("'{name}' is none of {}", self.loss.names.join(", "));
                return Err(Error::value("loss", message));
            };
            if !sum.dims().is_empty() {
                let message = format!("'{name}' must be a sum, a scalar, got {:?}", sum.dims());
                return Err(Error::shape("loss", message));
            }
            self.losses.returned[term] = true;
            add_assign(&mut self.losses.sums[term], &sum.value().cast(DType::F64)?)?;
            let sum = match self.loss.relative[term] {
                1.0 => sum,
                weight => sum.mul_scalar(weight)?,
            };
            total = Some(match total {
                Some(total) => total.add(&sum)?,
                None => sum,
            });
        }
        Ok(total)
    }
}

impl<M: Model> PipelineModel for StageModel<'_, M> {
    fn activation(&self, microbatch: usize) -> (Vec<usize>, DType, Device) {
        let dims = self.parts[0].activation_dims(&self.microbatches[microbatch]);
        (dims, self.scope.dtype(), self.scope.device().clone())
    }

    fn forward(&mut self, microbatch: usize, chunk: usize, input: Option<Var>) -> Result<Var> {
        let output = self.parts[chunk].forward(&self.microbatches[microbatch], input)?;
        let StageOutput { activation, losses } = output;
        match (activation, self.add(losses)?) {
            // The loss of an inner chunk gets its gradient when the activation does.
            (Some(activation), Some(total)) => {
                activation.attach_loss(&total, self.gradient.clone())
            }
            (Some(activation), None) => Ok(activation),
            (None, Some(total)) => Ok(total),
            (None, None) => {
                let message = "the chunk returned neither an activation nor a loss";
                Err(Error::value("model", message))
            }
        }
    }

    fn end_backward(&mut self, _microbatch: usize, _chunk: usize) -> Result<()> {
        self.data_parallel.map_or(Ok(()), DataParallel::end_backward)
    }
}
