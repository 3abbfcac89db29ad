//! Bounds of a GPT's configuration: sizes that fit each other, and options that mean something.

use ferrotron_tensor::{Error, Result};

use crate::model::block::Normalization;
use crate::model::config::{GptConfig, PositionEmbedding};
use crate::model::sizes::SizeCheck;

impl GptConfig {
    /// Errors, naming the values, if the sizes are inconsistent.
    pub fn validate(&self) -> Result<()> {
        SizeCheck {
            model: "gpt",
            sizes: &[
                ("vocab-size", self.vocab_size),
                ("num-layers", self.num_layers),
                ("hidden-size", self.hidden_size),
                ("ffn-hidden-size", self.ffn_hidden_size),
                ("num-attention-heads", self.num_attention_heads),
                ("num-query-groups", self.num_query_groups),
                ("max-position-embeddings", self.max_position_embeddings),
            ],
            kv_channels: self.kv_channels,
            ids: &[
                ("vocab-size", self.vocab_size),
                ("max-position-embeddings", self.max_position_embeddings),
            ],
            parameters: self.checked_num_parameters(),
            numbers: &[
                ("norm-epsilon", self.norm_epsilon),
                ("init-method-std", self.init_method_std),
                ("rotary-base", self.rotary_base),
            ],
            probabilities: &[
                ("hidden-dropout", self.hidden_dropout),
                ("attention-dropout", self.attention_dropout),
            ],
        }
        .check()?;
        let refuse = |message: String| Err(Error::config("gpt", message));
        if !(self.rotary_percent > 0.0 && self.rotary_percent <= 1.0) {
            return refuse(format!(
                "rotary-percent must be above 0 and at most 1, got {}",
                self.rotary_percent
            ));
        }
        let rotated = self.rotary_dim();
        if self.rotary_percent < 1.0 && (rotated == 0 || !rotated.is_multiple_of(2)) {
            return refuse(format!(
                "rotary-percent {} of kv-channels {} must be an even number of elements, at least 2",
                self.rotary_percent, self.kv_channels
            ));
        }
        if self.rotary_percent < 1.0
            && self.position_embedding_type == PositionEmbedding::LearnedAbsolute
        {
            return refuse(format!(
                "rotary-percent {} means nothing with position-embedding-type learned-absolute: give rope",
                self.rotary_percent
            ));
        }
        if let Some(scaling) = &self.rope_scaling {
            scaling.check(self.position_embedding_type == PositionEmbedding::Rope)?;
        }
        if self.window_size == Some(0) {
            return refuse("window-size must be positive, got 0; omit it instead".into());
        }
        if let Some(pattern) = &self.window_attn_skip_freq {
            if let Some(reason) = pattern.unsupported_reason(self.num_layers) {
                return refuse(reason);
            }
            if self.window_size.is_none() {
                return refuse(format!(
                    "window-attn-skip-freq {pattern} means nothing without window-size"
                ));
            }
        }
        for (name, number) in [
            ("attn-logit-softcapping", self.attn_logit_softcapping),
            ("final-logit-softcapping", self.final_logit_softcapping),
            ("query-pre-attn-scalar", self.query_pre_attn_scalar),
        ] {
            if let Some(number) = number.filter(|&number| !(number > 0.0 && number.is_finite())) {
                return refuse(format!("{name} must be positive, got {number}; omit it instead"));
            }
        }
        if self.add_norm_bias.is_some() && self.normalization == Normalization::RmsNorm {
            return refuse("add-norm-bias means nothing with RMSNorm: omit it".into());
        }
        Ok(())
    }
}
