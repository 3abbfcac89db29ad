//! Runs a rank's model chunks on the micro-batches of a step, and sums their losses.

use ferrotron_autograd::Var;
use ferrotron_nn::{Axis, Scope};
use ferrotron_parallel::data_parallel::DataParallel;
use ferrotron_parallel::mesh::Mesh;
use ferrotron_parallel::pipeline::PipelineModel;
use ferrotron_tensor::ops::pointwise::add_assign;
use ferrotron_tensor::{DType, Device, Error, Result, Tensor};

use crate::training::loss::LossReduction;
use crate::training::microbatch::Microbatch;
use crate::training::model::{Model, StageOutput};

/// The chunks of a rank, and their micro-batches.
pub(crate) struct StageModel<'a, M> {
    parts: &'a [M],
    scope: &'a Scope,
    data_parallel: Option<&'a DataParallel>,
    microbatches: &'a [Microbatch],
    loss: &'a LossReduction,
    /// Whether this rank counts the loss, which is equal on all ranks along the tensor axis.
    counts: bool,
    /// For each loss term whether a chunk has returned it; `None` where other ranks may do so instead.
    returned: Option<Vec<bool>>,
    /// The sum of each loss term over the micro-batches on this rank: f64 scalars.
    sums: Vec<Tensor>,
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
        let others = [Axis::Pipeline, Axis::Context, Axis::Data];
        let whole = others.iter().all(|&axis| mesh.axis(axis).size() == 1);
        Ok(StageModel {
            parts,
            scope,
            data_parallel: None,
            microbatches,
            loss,
            counts: mesh.axis(Axis::Tensor).rank() == 0,
            returned: whole.then(|| vec![false; loss.names.len()]),
            sums: loss.names.iter().map(zero).collect::<Result<_>>()?,
        })
    }

    /// Sets `data_parallel` to reduce gradients.
    pub fn reduced_by(mut self, data_parallel: &'a DataParallel) -> StageModel<'a, M> {
        self.data_parallel = Some(data_parallel);
        self
    }

    /// Adds the losses to `sums`, which [`StageModel::into_sums`] of other micro-batches returned.
    pub fn adding_to(mut self, sums: Vec<Tensor>) -> StageModel<'a, M> {
        self.sums = sums;
        self
    }

    /// The sum of each loss term on this rank, f64 scalars; their sums over the world are those of the global batch.
    ///
    /// Errors, naming it, if a term has elements, and no chunk returned it: it would train nothing.
    pub fn into_sums(self) -> Result<Vec<Tensor>> {
        let returned = self.returned.iter().flatten();
        let mut terms = self.loss.names.iter().zip(&self.loss.mean).zip(returned);
        if let Some(((name, _), _)) =
            terms.find(|((_, mean), returned)| **mean > 0.0 && !**returned)
        {
            let message =
                format!("the model has a term '{name}', and its forward did not return it");
            return Err(Error::value("loss", message));
        }
        match self.counts {
            true => Ok(self.sums),
            false => {
                let zero = |sum: &Tensor| Tensor::full(sum.device(), DType::F64, &[], 0.0);
                self.sums.iter().map(zero).collect()
            }
        }
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
            self.returned.iter_mut().for_each(|returned| returned[term] = true);
            add_assign(&mut self.sums[term], &sum.value().cast(DType::F64)?)?;
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
            (Some(activation), Some(total)) => activation.attach_loss(&total, self.loss.cotangent),
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
