//! The BERT as the trainer knows it.

use ferrotron_autograd::Var;
use ferrotron_nn::{Param, Scope};
use ferrotron_parallel::mesh::Mesh;
use ferrotron_tensor::Result;

use super::{Bert, BertConfig};
use crate::io::data::{Batch, ChoiceBatch, PairBatch, num_valid};
use crate::training::microbatch::Microbatch;
use crate::training::model::{ActivationOptions, LossTerm, Model, ModelChunk, StageOutput};

/// Names of the loss terms.
const MASKED_LM: &str = "masked_lm";
const SENTENCE_ORDER: &str = "sentence_order";
const MULTIPLE_CHOICE: &str = "multiple_choice";
/// The share of right answers, which has no weight in the loss.
const ACCURACY: &str = "accuracy";

impl Model for Bert {
    const ARCHITECTURE: &str = "bert";
    const TRAINING_FIELDS: &[&str] = &["hidden_dropout", "attention_dropout", "init_method_std"];
    const HEAD_FIELDS: &[&str] = &["binary_head", "num_choices"];
    const HEAD_PARAMETERS: &[&str] = &["mlm_head.", "binary_head.", "multichoice_head.", "pooler."];
    type Config = BertConfig;

    fn new_chunk(
        scope: &Scope,
        mesh: &Mesh,
        config: &BertConfig,
        chunk: &ModelChunk,
    ) -> Result<Bert> {
        Bert::from_chunk(scope, mesh, config, chunk)
    }

    /// The mean over masked tokens and, with a binary head, the mean over samples; of a model that chooses among answers, the
    /// mean over questions, and beside it the share of right answers.
    fn loss_terms(config: &BertConfig, batch: &Batch) -> Result<Vec<LossTerm>> {
        if config.num_choices.is_some() {
            let questions = num_valid(batch.get(ChoiceBatch::ANSWERS)?) as f64;
            let accuracy = LossTerm::mean(ACCURACY, questions).weighted(0.0);
            return Ok(vec![LossTerm::mean(MULTIPLE_CHOICE, questions), accuracy]);
        }
        let masked = num_valid(batch.get(PairBatch::TARGETS)?);
        let mut terms = vec![LossTerm::mean(MASKED_LM, masked as f64)];
        if config.binary_head {
            let samples = num_valid(batch.get(PairBatch::ORDER)?);
            terms.push(LossTerm::mean(SENTENCE_ORDER, samples as f64));
        }
        Ok(terms)
    }

    fn forward(&self, microbatch: &Microbatch, input: Option<Var>) -> Result<StageOutput> {
        let ctx = microbatch.ctx();
        let x = match input {
            Some(x) => x,
            None => self.embed(
                ctx,
                microbatch.get(PairBatch::TOKENS)?,
                microbatch.get(PairBatch::SEGMENTS)?,
            )?,
        };
        let x = self.run_blocks(ctx, x)?;
        if !self.chunk.last {
            return Ok(StageOutput::activation(x));
        }
        if self.config.num_choices.is_some() {
            let (head, answers) = (self.multiple_choice()?, microbatch.get(ChoiceBatch::ANSWERS)?);
            let logits = head.logits(ctx, &x)?; // (B, choices)
            let loss = StageOutput::loss(MULTIPLE_CHOICE, head.loss(ctx, &logits, answers)?);
            return Ok(loss.with_loss(ACCURACY, head.num_correct(ctx, &logits, answers)?));
        }
        let masked = self.masked_lm()?.loss(&x, microbatch.get(PairBatch::TARGETS)?)?;
        let output = StageOutput::loss(MASKED_LM, masked.sum);
        let Some(head) = &self.pooled else { return Ok(output) };
        let order = head.loss(ctx, &head.logits(ctx, &x)?, microbatch.get(PairBatch::ORDER)?)?;
        Ok(output.with_loss(SENTENCE_ORDER, order))
    }

    fn num_blocks(config: &BertConfig) -> usize {
        config.num_layers
    }

    fn activation_dims(&self, microbatch: &Microbatch) -> Vec<usize> {
        vec![microbatch.ctx().batch.len(), microbatch.ctx().residual.len(), self.config.hidden_size]
    }

    fn with_activation_options(self, options: &ActivationOptions) -> Result<Bert> {
        let ActivationOptions { recompute, saved_activations, offloader } = options.clone();
        Ok(self.with_recompute(recompute).with_saved_activations(saved_activations, offloader))
    }

    fn recomputed(&self) -> Vec<Vec<Param>> {
        self.recomputed_regions()
    }

    fn flops(config: &BertConfig, tokens: u64, seq_length: usize) -> f64 {
        config.flops(tokens, seq_length)
    }

    fn example_batch(config: &BertConfig, samples: usize, seq_length: usize) -> Result<Batch> {
        if let Some(choices) = config.num_choices {
            let blank = ChoiceBatch::blank(0, [samples, choices, seq_length], 0);
            return ChoiceBatch { answers: vec![0; samples], ..blank }.try_into();
        }
        let blank = PairBatch::blank(0, samples, seq_length, 0);
        let (targets, order) = (vec![0; samples * seq_length], vec![0; samples]);
        PairBatch { targets, order, ..blank }.try_into()
    }
}
