//! The loss of a model over a validation set: every token counts once.

use ferrotron_autograd::no_grad;
use ferrotron_nn::{Axis, Context, Mode};
use ferrotron_parallel::collective::Reduction;
use ferrotron_parallel::mesh::Mesh;
use ferrotron_parallel::pipeline::{PipelineSchedule, execute};
use ferrotron_tensor::{DType, Device, Result, Tensor};

use crate::io::data::Validation;
use crate::model::gpt::Gpt;
use crate::model::stage::{Microbatch, StageModel};
use crate::training::batch_size::BatchSize;
use crate::training::stop::StopFlag;

/// What an evaluation found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Evaluation {
    /// Mean cross-entropy in nats per token.
    pub loss: f64,
    /// e^loss.
    pub perplexity: f64,
    /// Tokens that were predicted.
    pub tokens: u64,
}

/// Evaluates a model, of which this rank of `mesh` has the chunks `parts`, on all samples of `validation`. All ranks
/// call this; `None` if one of them was asked to stop.
///
/// Samples meet in batches of `sizes` as they do in training. The micro-batches of a global batch go through a
/// pipeline one behind another; without a pipeline each is a batch of its own, so that a request to stop waits for
/// two micro-batches at most. The sum of the losses stays on the device until the last batch is done.
///
/// Which samples count does not depend on `sizes` or the layout. Losses of micro-batches are added in f64, so these
/// change the result by the rounding of sums alone.
///
/// # Errors
/// As the model, the data and the communication do.
pub fn evaluate(
    parts: &[Gpt],
    mesh: &Mesh,
    validation: &Validation,
    sizes: BatchSize,
    stop: &StopFlag,
) -> Result<Option<Evaluation>> {
    let (data, device) = (mesh.axis(Axis::Data), parts[0].scope().device());
    // Not the device's memory, of which an evaluation takes no more than a step.
    let host = Device::cpu(1)?;
    let (stages, micro) = (mesh.axis(Axis::Pipeline).size(), sizes.micro());
    let (samples, unit) = (validation.samples(), (micro * data.size()) as u64);
    let together = if stages == 1 { unit } else { sizes.full_batch_size() as u64 };
    let mut sum = Tensor::full(device, DType::F64, &[], 0.0)?;
    // Ranks agree on the end, but do not wait for one another: each batch asks for the next one.
    let mut stops = stop.ask_all(mesh.world(), &host)?;
    for first in (0..samples).step_by(together as usize) {
        let next = stop.ask_all(mesh.world(), &host)?;
        if std::mem::replace(&mut stops, next).wait()? {
            stops.wait()?;
            return Ok(None);
        }
        let count = (samples - first).min(together).div_ceil(unit) as usize;
        let microbatches = (0..count)
            .map(|index| {
                // Beyond the last sample, rows in which nothing counts.
                let batch =
                    validation.batch(sizes.first_sample(first, index, data.rank()), micro)?;
                let ctx = Context::new(0, 0, Mode::Eval, micro, batch.seq_length);
                Microbatch::new(device, mesh, &batch, ctx)
            })
            .collect::<Result<Vec<_>>>()?;
        let schedule = PipelineSchedule::forward_only(stages, count, parts.len())?;
        let mut model = StageModel::new(parts, mesh, &microbatches)?.adding_to(sum);
        device.run(|| no_grad(|| execute(&schedule, &mut model, mesh, 1.0)))?;
        sum = model.into_loss()?;
    }
    stops.wait()?;
    let tokens = validation.predicted();
    let sum = mesh.world().all_reduce(sum, Reduction::Sum)?.wait()?.item()?;
    let loss = sum / tokens as f64;
    Ok(Some(Evaluation { loss, perplexity: loss.exp(), tokens }))
}
