//! What the tests of recomputation and of offloading train.

use ferrotron_models::data::{Batch, Samples};
use ferrotron_models::gpt::{ActivationKind, GptConfig};
use ferrotron_tensor::{RandomKey, Result, Tensor};

/// Samples of a micro-batch.
pub const BATCH: usize = 2;
/// Tokens of a sample.
pub const SEQ_LENGTH: usize = 16;

/// GPT-2 with dropout everywhere.
pub fn gpt2(layers: usize) -> GptConfig {
    GptConfig {
        hidden_dropout: 0.1,
        attention_dropout: 0.1,
        ..GptConfig::gpt2(13, layers, 32, 4, SEQ_LENGTH)
    }
}

/// The same with ReLU, as it is, and a model with grouped queries and SwiGLU.
pub fn models(layers: usize) -> [GptConfig; 3] {
    let llama = GptConfig {
        hidden_dropout: 0.1,
        attention_dropout: 0.1,
        ..GptConfig::llama(13, layers, 32, 4, 2, SEQ_LENGTH)
    };
    [GptConfig { activation: ActivationKind::Relu, ..gpt2(layers) }, gpt2(layers), llama]
}

/// Tokens by sample number.
pub struct Noise;

impl Samples for Noise {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let key = RandomKey::new(3, 0, "tokens");
        let draw = |i: usize| key.uniform(first_sample * 2 * SEQ_LENGTH as u64 + i as u64) * 13.0;
        let numbers = micro_batch * SEQ_LENGTH;
        Ok(Batch {
            inputs: (0..numbers).map(|i| draw(2 * i) as u32).collect(),
            targets: (0..numbers).map(|i| draw(2 * i + 1) as i64).collect(),
            first_sample,
            micro_batch,
            seq_length: SEQ_LENGTH,
        })
    }

    fn seq_length(&self) -> usize {
        SEQ_LENGTH
    }
}

/// For comparisons of every bit.
pub fn bits(tensor: &Tensor) -> Result<Vec<u64>> {
    Ok(tensor.to_f64()?.into_iter().map(f64::to_bits).collect())
}
