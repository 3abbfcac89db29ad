//! The loss of a model over a validation set: every token counts once.

use ferrotron_autograd::no_grad;
use ferrotron_nn::{Axis, Context, Mode};
use ferrotron_parallel::mesh::Mesh;
use ferrotron_parallel::pipeline::{Schedule, execute};
use ferrotron_tensor::{Error, Result};

use crate::data::Validation;
use crate::gpt::Gpt;
use crate::stage::{Microbatch, StageModel};

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

/// Evaluates a model, of which this rank of `mesh` has the chunks `parts`, on the first `limit` batches, or on
/// all. Ranks that see different samples take batches in turn.
///
/// Sums are f64, so neither the size of a micro-batch nor the layout changes the result but by rounding.
/// Errors if there is nothing to predict.
pub fn evaluate(
    parts: &[Gpt],
    mesh: &Mesh,
    validation: &Validation,
    limit: Option<u64>,
) -> Result<Evaluation> {
    let (data, device) = (mesh.axis(Axis::Data), parts[0].scope().device());
    let schedule = Schedule::forward_only(mesh.axis(Axis::Pipeline).size(), 1, parts.len())?;
    let batches = limit.unwrap_or(u64::MAX).min(validation.batches());
    let (mut sum, mut tokens) = (0.0, 0);
    for round in 0..batches.div_ceil(data.size() as u64) {
        let index = round * data.size() as u64 + data.rank() as u64;
        // A rank that has no batch in the last round runs one in which nothing counts.
        let index = if index < batches { index } else { validation.batches() };
        let batch = validation.batch(index)?;
        let ctx = Context::new(0, 0, Mode::Eval, batch.micro_batch, batch.seq_length);
        tokens += batch.counted();
        let microbatch = [Microbatch::new(device, mesh, &batch, ctx)?];
        let mut model = StageModel::new(parts, mesh, &microbatch)?;
        device.run(|| no_grad(|| execute(&schedule, &mut model, mesh, 1.0)))?;
        sum += model.into_loss()?.item()?;
    }
    let tokens = data.sum(device, tokens as f64)?;
    if tokens == 0.0 {
        return Err(Error::value(
            "evaluate",
            "there is no token to predict: --eval-iters is 0 or the data is empty",
        ));
    }
    let loss = mesh.world().sum(device, sum)? / tokens;
    Ok(Evaluation { loss, perplexity: loss.exp(), tokens: tokens as u64 })
}
