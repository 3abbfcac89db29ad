//! The GPT as the trainer knows it.

use ferrotron_autograd::Var;
use ferrotron_nn::{Param, Scope};
use ferrotron_parallel::mesh::Mesh;
use ferrotron_tensor::Result;

use crate::io::data::{Batch, TokenBatch, num_valid};
use crate::model::config::GptConfig;
use crate::model::gpt::Gpt;
use crate::training::microbatch::Microbatch;
use crate::training::model::{ActivationOptions, LossTerm, Model, ModelChunk, StageOutput};

/// Name of the loss term.
const CROSS_ENTROPY: &str = "cross_entropy";

impl Model for Gpt {
    const ARCHITECTURE: &str = "gpt";
    const TRAINING_FIELDS: &[&str] = &["hidden_dropout", "attention_dropout", "init_method_std"];
    type Config = GptConfig;

    fn new_chunk(
        scope: &Scope,
        mesh: &Mesh,
        config: &GptConfig,
        chunk: &ModelChunk,
    ) -> Result<Gpt> {
        Gpt::from_chunk(scope, mesh, config, chunk)
    }

    /// The mean over valid tokens.
    fn loss_terms(_: &GptConfig, batch: &Batch) -> Result<Vec<LossTerm>> {
        let valid = num_valid(batch.get(TokenBatch::TARGETS)?);
        Ok(vec![LossTerm::mean(CROSS_ENTROPY, valid as f64)])
    }

    fn forward(&self, microbatch: &Microbatch, input: Option<Var>) -> Result<StageOutput> {
        let ctx = microbatch.ctx();
        let x = match input {
            Some(x) => x,
            None => {
                let positions = microbatch.find(TokenBatch::POSITIONS);
                self.embed_at(ctx, microbatch.get(TokenBatch::INPUTS)?, positions)?
            }
        };
        let x = self.run_blocks(ctx, x)?;
        if !self.chunk().last {
            return Ok(StageOutput::activation(x));
        }
        let loss = self.head_loss(&x, microbatch.get(TokenBatch::TARGETS)?)?;
        Ok(StageOutput::loss(CROSS_ENTROPY, loss.sum))
    }

    fn num_blocks(config: &GptConfig) -> usize {
        config.num_layers
    }

    fn activation_dims(&self, microbatch: &Microbatch) -> Vec<usize> {
        vec![microbatch.samples(), microbatch.ctx().residual.len(), self.config().hidden_size]
    }

    fn with_activation_options(self, options: &ActivationOptions) -> Result<Gpt> {
        let ActivationOptions { recompute, saved_activations, offloader } = options.clone();
        Ok(self.with_recompute(recompute).with_saved_activations(saved_activations, offloader))
    }

    fn recomputed(&self) -> Vec<Vec<Param>> {
        self.recomputed_regions().collect()
    }

    fn flops(config: &GptConfig, tokens: u64, seq_length: usize) -> f64 {
        config.flops(tokens, seq_length)
    }

    fn example_batch(_: &GptConfig, samples: usize, seq_length: usize) -> Result<Batch> {
        let targets = vec![0; samples * seq_length];
        TokenBatch { targets, ..TokenBatch::blank(0, samples, seq_length) }.try_into()
    }
}
