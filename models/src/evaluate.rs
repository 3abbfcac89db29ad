//! The loss of a model over a validation set: every token counts once.

use ferrotron_autograd::no_grad;
use ferrotron_nn::{Context, Mode, Module};
use ferrotron_tensor::{Error, Result};

use crate::data::Validation;
use crate::gpt::Gpt;
use crate::trainer::batch_tensors;

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

/// Evaluates `gpt` on the first `limit` batches, or on all.
///
/// Sums are f64, so the size of a micro-batch changes the result by rounding only. Errors if there is
/// nothing to predict.
pub fn evaluate(gpt: &Gpt, validation: &Validation, limit: Option<u64>) -> Result<Evaluation> {
    let params = gpt.params();
    let device = params[0].leaf().device();
    let (mut sum, mut tokens) = (0.0, 0);
    for index in 0..limit.unwrap_or(u64::MAX).min(validation.batches()) {
        let batch = validation.batch(index)?;
        let ctx = Context::new(0, 0, Mode::Eval, batch.micro_batch, batch.seq_length);
        let (inputs, targets) = batch_tensors(device, &batch)?;
        let loss = device.run(|| no_grad(|| gpt.loss(&ctx, &inputs, &targets)))?;
        sum += loss.sum.value().item()?;
        tokens += loss.counted as u64;
    }
    if tokens == 0 {
        return Err(Error::value(
            "evaluate",
            "there is no token to predict: --eval-iters is 0 or the data is empty",
        ));
    }
    let loss = sum / tokens as f64;
    Ok(Evaluation { loss, perplexity: loss.exp(), tokens })
}
