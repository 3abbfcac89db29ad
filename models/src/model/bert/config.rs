//! Configuration of a BERT: sizes, choices and derived values.

use ferrotron_nn::{AttentionConfig, Bias, Init, MlpConfig, NormGain};
use ferrotron_tensor::ops::attention::AttentionMask;
use ferrotron_tensor::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::model::block::{BlockConfig, NormConfig, NormPlacement, Normalization};
use crate::model::config::ActivationKind;
use crate::model::sizes::{SizeCheck, product, sum};

/// The architecture of a BERT. Field names are Megatron's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BertConfig {
    /// V: number of token ids.
    pub vocab_size: usize,
    /// Number of blocks.
    pub num_layers: usize,
    /// C: width of the residual stream.
    pub hidden_size: usize,
    /// Hidden width of the MLP: 4 C usually.
    pub ffn_hidden_size: usize,
    /// H: number of heads, each of width C / H.
    pub num_attention_heads: usize,
    /// Maximum sequence length.
    pub max_position_embeddings: usize,
    /// Number of segment ids: 2 for pairs of segments.
    pub num_token_types: usize,
    /// The place of the norms. `Post` has a norm behind the embeddings too, `Pre` one behind the last block.
    pub norm_placement: NormPlacement,
    /// Added to the variance.
    pub norm_epsilon: f64,
    /// The activation function of the MLP and of the masked-language-model head; not SwiGLU.
    pub activation: ActivationKind,
    /// Whether there is a pooler with a head for the order of the two segments.
    pub binary_head: bool,
    /// The number of choices of a question, if the model chooses among them: a pooler with one logit a choice, in place of
    /// the heads of pre-training.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_choices: Option<usize>,
    /// Standard deviation of the initial weights.
    pub init_method_std: f64,
    /// Dropout on embeddings and on the inputs of residual additions.
    pub hidden_dropout: f64,
    /// Dropout on attention weights.
    pub attention_dropout: f64,
}

/// The classes of a head on the first position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PooledHeadKind {
    /// The order of the two segments: two logits a row.
    SentenceOrder,
    /// The right one of so many choices: one logit a row, and the rows of a question follow one another.
    MultipleChoice(usize),
}

impl PooledHeadKind {
    /// Logits of a row.
    pub fn logits_of_a_row(self) -> usize {
        match self {
            PooledHeadKind::SentenceOrder => 2,
            PooledHeadKind::MultipleChoice(_) => 1,
        }
    }
}

impl BertConfig {
    /// A BERT as in Devlin et al., arXiv 1810.04805, with the norms at `norm_placement`. It has GELU, a head for the
    /// order of two segments, epsilon 1e-12, and no dropout.
    pub fn new(
        norm_placement: NormPlacement,
        vocab_size: usize,
        num_layers: usize,
        hidden_size: usize,
        heads: usize,
        positions: usize,
    ) -> BertConfig {
        BertConfig {
            vocab_size,
            num_layers,
            hidden_size,
            ffn_hidden_size: hidden_size.saturating_mul(4),
            num_attention_heads: heads,
            max_position_embeddings: positions,
            num_token_types: 2,
            norm_placement,
            norm_epsilon: 1e-12,
            activation: ActivationKind::GeluErf,
            binary_head: true,
            num_choices: None,
            init_method_std: 0.02,
            hidden_dropout: 0.0,
            attention_dropout: 0.0,
        }
    }

    /// The same model with one logit for each of `choices` choices of a question, in place of the heads of pre-training.
    #[must_use]
    pub fn with_choices(self, choices: usize) -> BertConfig {
        BertConfig { binary_head: false, num_choices: Some(choices), ..self }
    }

    /// The head on the first position, if there is one.
    pub(super) fn pooled_head(&self) -> Option<PooledHeadKind> {
        match self.num_choices {
            Some(choices) => Some(PooledHeadKind::MultipleChoice(choices)),
            None => self.binary_head.then_some(PooledHeadKind::SentenceOrder),
        }
    }

    /// Errors, naming the values, if the sizes are inconsistent.
    pub fn validate(&self) -> Result<()> {
        if self.activation.is_gated() {
            let name = if self.activation == ActivationKind::Geglu { "geglu" } else { "swiglu" };
            let message = format!("activation {name} is for gpt: use gelu-tanh, gelu-erf or relu");
            return Err(Error::config("bert", message));
        }
        if let Some(choices) = self.num_choices {
            let refuse = |message: String| Err(Error::config("bert", message));
            if choices < 2 {
                return refuse(format!("num-choices {choices} must be at least 2"));
            }
            if self.binary_head {
                return refuse("a head for choices leaves no place for the binary head".into());
            }
            if self.num_token_types < 2 {
                let types = self.num_token_types;
                return refuse(format!("num-token-types {types} must be at least 2 for choices"));
            }
        }
        SizeCheck {
            model: "bert",
            sizes: &[
                ("vocab-size", self.vocab_size),
                ("num-layers", self.num_layers),
                ("hidden-size", self.hidden_size),
                ("ffn-hidden-size", self.ffn_hidden_size),
                ("num-attention-heads", self.num_attention_heads),
                ("max-position-embeddings", self.max_position_embeddings),
                ("num-token-types", self.num_token_types),
            ],
            kv_channels: self.hidden_size / self.num_attention_heads.max(1),
            ids: &[
                ("vocab-size", self.vocab_size),
                ("max-position-embeddings", self.max_position_embeddings),
                ("num-token-types", self.num_token_types),
            ],
            parameters: self.checked_num_parameters(),
            numbers: &[
                ("norm-epsilon", self.norm_epsilon),
                ("init-method-std", self.init_method_std),
            ],
            probabilities: &[
                ("hidden-dropout", self.hidden_dropout),
                ("attention-dropout", self.attention_dropout),
            ],
        }
        .check()
    }

    /// Number of parameters, computed without allocating them; 2^64 - 1 if it is not below that, which
    /// [`BertConfig::validate`] refuses.
    pub fn num_parameters(&self) -> u64 {
        self.checked_num_parameters().unwrap_or(u64::MAX)
    }

    /// Number of parameters, unless it is beyond a `u64`.
    fn checked_num_parameters(&self) -> Option<u64> {
        let (v, l, c, f) =
            (self.vocab_size, self.num_layers, self.hidden_size, self.ffn_hidden_size);
        let pretraining = usize::from(self.num_choices.is_none());
        let logits = match self.pooled_head() {
            Some(head) => head.logits_of_a_row(),
            None => 0,
        };
        let pooled = usize::from(logits > 0);
        let block = [
            product(&[4, c, c]), // queries, keys, values and projection
            product(&[2, c, f]), // MLP
            product(&[9, c]),    // their biases, with that of the MLP's second layer, and two norms
            product(&[f]),
        ];
        let rest = [
            product(&[v, c]),
            product(&[self.max_position_embeddings, c]),
            product(&[self.num_token_types, c]),
            product(&[2, c]), // the norm behind the embeddings or the last block
            product(&[pretraining, c, c]), // the head's transform
            product(&[pretraining, 3, c]), // its bias and norm
            product(&[pretraining, v]),
            product(&[pooled, c, c]),
            product(&[pooled, 1 + logits, c]), // pooler's bias and the classifier
            product(&[logits]),
        ];
        let blocks = sum(&block)?.checked_mul(l as u128);
        u64::try_from(sum(&[blocks, sum(&rest)])?).ok()
    }

    /// Floating-point operations of one training step over `tokens` tokens in sequences of `seq_length`: those of
    /// [`GptConfig::flops`](crate::model::config::GptConfig::flops).
    pub fn flops(&self, tokens: u64, seq_length: usize) -> f64 {
        let c = self.hidden_size as f64;
        // Without a head for tokens, their embedding is only looked up.
        let tokens_only = if self.num_choices.is_some() { self.vocab_size as f64 } else { 0.0 };
        let tables = self.max_position_embeddings as f64 + self.num_token_types as f64;
        let looked_up = (tables + tokens_only) * c;
        let matrices = self.num_parameters() as f64 - looked_up;
        let attention = 12.0 * self.num_layers as f64 * c * seq_length as f64;
        (6.0 * matrices + attention) * tokens as f64
    }

    pub(crate) fn init(&self) -> Init {
        Init::Normal { std: self.init_method_std }
    }

    pub(crate) fn norm(&self) -> NormConfig {
        let (width, epsilon) = (self.hidden_size, self.norm_epsilon);
        let gain = NormGain::Weight;
        NormConfig { kind: Normalization::LayerNorm, width, bias: Bias::Yes, epsilon, gain }
    }

    /// The configuration of every block. Pre-norm projections whose output is added to the residual stream begin
    /// smaller by the root of their number, as Megatron's; post-norm ones begin as all others, as BERT's.
    pub(crate) fn block(&self) -> BlockConfig {
        let (hidden, init) = (self.hidden_size, self.init());
        let residual_init = match self.norm_placement {
            NormPlacement::Pre => {
                Init::Normal { std: self.init_method_std / (2.0 * self.num_layers as f64).sqrt() }
            }
            NormPlacement::Post => init,
        };
        BlockConfig {
            attention: AttentionConfig {
                mask: AttentionMask::None,
                dropout: self.attention_dropout,
                init,
                residual_init,
                ..AttentionConfig::new(hidden, self.num_attention_heads)
            },
            mlp: MlpConfig {
                hidden,
                ffn_hidden: self.ffn_hidden_size,
                activation: self.activation.function(),
                bias: Bias::Yes,
                init,
                residual_init,
            },
            norm: self.norm(),
            norm_placement: self.norm_placement,
            sandwich_norm: false,
            parallel_residual: false,
            hidden_dropout: self.hidden_dropout,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_sizes() {
        // Shoeybi et al., arXiv 1909.08053, table 4: 336M, 1.3B and 3.9B parameters.
        for (layers, width, heads, millions) in
            [(24, 1024, 16, 336.0), (24, 2048, 32, 1300.0), (48, 2560, 40, 3900.0)]
        {
            let config = BertConfig::new(NormPlacement::Pre, 30592, layers, width, heads, 512);
            let got = config.num_parameters() as f64 / 1e6;
            assert!((got / millions - 1.0).abs() < 0.02, "{got} million, not {millions}");
        }
        // BERT base with both heads, as transformers counts BertForPreTraining.
        let base = BertConfig::new(NormPlacement::Post, 30522, 12, 768, 12, 512);
        assert_eq!(base.num_parameters(), 110_106_428);
        // As transformers counts BertForMultipleChoice: the encoder, the pooler, and 768 + 1.
        assert_eq!(base.with_choices(4).num_parameters(), 109_483_009);
    }
}
