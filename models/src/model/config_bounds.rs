//! What the configuration of a GPT may say: sizes that fit each other, and options that mean something.

use ferrotron_tensor::{Error, Result};

use crate::model::config::{GptConfig, PositionEmbedding};

/// Most layers: a hundred times as many as the deepest models have. Every layer is an object before anything of it is
/// memory of a device.
const MAX_LAYERS: usize = 10_000;

/// Widest head: rotary positions take a table of that width for each position.
const MAX_HEAD_WIDTH: usize = 65_536;

/// Most parameters, a thousand times as many as the largest models have: byte counts of weights, gradients and optimizer
/// states stay below 2^63, and so do numbers of floating-point operations of a token.
const MAX_PARAMETERS: u64 = 1_000_000_000_000_000;

/// Most tokens of a vocabulary, and most positions: their ids are u32.
const MAX_IDS: usize = 1 << 32;

impl GptConfig {
    /// Errors, naming the values, if the sizes are inconsistent.
    pub fn validate(&self) -> Result<()> {
        let refuse = |message: String| Err(Error::config("gpt", message));
        let sizes = [
            ("vocab-size", self.vocab_size),
            ("num-layers", self.num_layers),
            ("hidden-size", self.hidden_size),
            ("ffn-hidden-size", self.ffn_hidden_size),
            ("num-attention-heads", self.num_attention_heads),
            ("num-query-groups", self.num_query_groups),
            ("max-position-embeddings", self.max_position_embeddings),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return refuse(format!("{name} must be positive, got 0"));
        }
        if self.num_layers > MAX_LAYERS {
            return refuse(format!("num-layers {} is more than {MAX_LAYERS}", self.num_layers));
        }
        if self.kv_channels == 0
            || (self.kv_channels == self.hidden_size / self.num_attention_heads
                && !self.hidden_size.is_multiple_of(self.num_attention_heads))
        {
            return refuse(format!(
                "num-attention-heads {} does not divide hidden-size {}",
                self.num_attention_heads, self.hidden_size
            ));
        }
        if !self.num_attention_heads.is_multiple_of(self.num_query_groups) {
            return refuse(format!(
                "num-query-groups {} does not divide num-attention-heads {}",
                self.num_query_groups, self.num_attention_heads
            ));
        }
        for (name, ids) in [
            ("vocab-size", self.vocab_size),
            ("max-position-embeddings", self.max_position_embeddings),
        ] {
            if ids > MAX_IDS {
                return refuse(format!(
                    "{name} {ids} is more than {MAX_IDS}, the number of ids of 32 bits"
                ));
            }
        }
        if self.checked_num_parameters().is_none_or(|number| number > MAX_PARAMETERS) {
            let sizes = sizes.map(|(name, size)| format!("{name} {size}")).join(", ");
            return refuse(format!(
                "a model of {sizes}, kv-channels {} would have more than 10^15 parameters: check these sizes",
                self.kv_channels
            ));
        }
        if self.kv_channels > MAX_HEAD_WIDTH {
            return refuse(format!(
                "kv-channels {} is more than {MAX_HEAD_WIDTH}",
                self.kv_channels
            ));
        }
        for (name, value) in [
            ("norm-epsilon", self.norm_epsilon),
            ("init-method-std", self.init_method_std),
            ("rotary-base", self.rotary_base),
        ] {
            if !(value >= 0.0 && value.is_finite()) {
                return refuse(format!("{name} must be at least 0, got {value}"));
            }
        }
        for (name, p) in
            [("hidden-dropout", self.hidden_dropout), ("attention-dropout", self.attention_dropout)]
        {
            if !(0.0..1.0).contains(&p) {
                return refuse(format!("{name} must be in [0, 1), got {p}"));
            }
        }
        let rotated = self.rotary_dim();
        if !(self.rotary_percent > 0.0 && self.rotary_percent <= 1.0)
            || self.rotary_percent < 1.0 && (rotated == 0 || !rotated.is_multiple_of(2))
        {
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
        for (name, number) in [
            ("window-size", self.window_size),
            ("window-attn-skip-freq", self.window_attn_skip_freq),
        ] {
            if number == Some(0) {
                return refuse(format!("{name} must be positive, got 0; omit it instead"));
            }
        }
        if let (None, Some(skip)) = (self.window_size, self.window_attn_skip_freq) {
            return refuse(format!(
                "window-attn-skip-freq {skip} means nothing without window-size"
            ));
        }
        if let Some(cap) =
            self.attn_logit_softcapping.filter(|&cap| !(cap > 0.0 && cap.is_finite()))
        {
            return refuse(format!(
                "attn-logit-softcapping must be positive, got {cap}; omit it instead"
            ));
        }
        Ok(())
    }
}
