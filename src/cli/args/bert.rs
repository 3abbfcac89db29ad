//! The options of a BERT, out of those of `train`, and which options go with which architecture.

use ferrotron::models::bert::{BertConfig, NormPlacement};
use ferrotron::models::data::SentencePairs;
use ferrotron::models::data::tasks::NUM_CHOICES;
use ferrotron::{Error, Result};

use super::model::{ModelArgs, NormPlacementArg, NormalizationArg, PositionArg};
use super::train::TrainArgs;

impl TrainArgs {
    /// The BERT for a vocabulary of `vocab_size` tokens.
    ///
    /// # Errors
    /// An option of GPT alone; sizes that do not fit.
    pub fn bert_config(&self, vocab_size: usize) -> Result<BertConfig> {
        let sampled = self.run.sample_length.is_some_and(|length| length > 0);
        let given = [
            (sampled, "--sample-length", "it continues no text: leave it out"),
            (
                self.execution.enable_cuda_graph,
                "--enable-cuda-graph",
                "steps of padded samples are not captured: leave it out",
            ),
        ];
        refuse(&given)?;
        self.model.bert_config(vocab_size)
    }
}

impl ModelArgs {
    fn bert_config(&self, vocab_size: usize) -> Result<BertConfig> {
        self.refuse_options_of_gpt()?;
        let placement = match self.norm_placement {
            Some(NormPlacementArg::Post) => NormPlacement::Post,
            Some(NormPlacementArg::Pre) | None => NormPlacement::Pre,
        };
        let layers = self.num_layers.unwrap_or(4);
        let hidden = self.hidden_size.unwrap_or(128);
        let heads = self.num_attention_heads.unwrap_or(4);
        let positions = self.positions()?;
        SentencePairs::check_length(self.seq_length()?)?;
        let mut config = BertConfig::new(placement, vocab_size, layers, hidden, heads, positions);
        config.ffn_hidden_size = self.ffn_hidden_size.unwrap_or(config.ffn_hidden_size);
        config.norm_epsilon = self.norm_epsilon.unwrap_or(1e-5);
        config.init_method_std = self.init_method_std;
        config.hidden_dropout = self.hidden_dropout;
        config.attention_dropout = self.attention_dropout;
        config.binary_head = !self.bert_no_binary_head;
        config.activation = self.activation_kind().unwrap_or(config.activation);
        if self.task.is_some() {
            config = config.with_choices(NUM_CHOICES);
        }
        config.validate()?;
        Ok(config)
    }

    /// Errors if an option is given that a BERT has not.
    fn refuse_options_of_gpt(&self) -> Result<()> {
        let rotary = self.position_embedding_type == Some(PositionArg::Rope);
        let rms = self.normalization == Some(NormalizationArg::RmsNorm);
        let untied = self.untie_embeddings_and_output_weights;
        let everywhere = "every position sees all others: leave it out";
        let learned = "positions are learned: leave it out";
        let biases = "layers have biases: leave it out";
        let tied = "the head is the token embedding: leave it out";
        let preset = "presets are sizes of GPTs: give the sizes themselves";
        let width = "heads are hidden / heads wide: leave it out";
        refuse(&[
            (self.preset.is_some(), "--preset", preset),
            (self.num_query_groups.is_some(), "--num-query-groups", "leave it out"),
            (self.kv_channels.is_some(), "--kv-channels", width),
            (rotary, "--position-embedding-type rope", learned),
            (self.rotary_base.is_some(), "--rotary-base", learned),
            (self.rotary_percent.is_some(), "--rotary-percent", learned),
            (self.use_rope_scaling, "--use-rope-scaling", learned),
            (self.use_parallel_residual, "--use-parallel-residual", "leave it out"),
            (self.window_size.is_some(), "--window-size", everywhere),
            (self.window_attn_skip_freq.is_some(), "--window-attn-skip-freq", everywhere),
            (self.query_pre_attn_scalar.is_some(), "--query-pre-attn-scalar", "leave it out"),
            (self.attn_logit_softcapping.is_some(), "--attn-logit-softcapping", "leave it out"),
            (self.final_logit_softcapping.is_some(), "--final-logit-softcapping", "leave it out"),
            (self.apply_layernorm_1p, "--apply-layernorm-1p", "leave it out"),
            (self.sandwich_norm, "--sandwich-norm", "leave it out"),
            (self.scale_embeddings, "--scale-embeddings", "leave it out"),
            (self.qk_layernorm, "--qk-layernorm", "leave it out"),
            (self.add_qkv_bias, "--add-qkv-bias", biases),
            (self.add_attention_bias, "--add-attention-bias", biases),
            (self.add_mlp_bias, "--add-mlp-bias", biases),
            (rms, "--normalization RMSNorm", "norms are LayerNorm: leave it out"),
            (self.swiglu, "--swiglu", "use --activation gelu-tanh, gelu-erf or relu"),
            (self.disable_bias_linear, "--disable-bias-linear", biases),
            (self.disable_bias_norm, "--disable-bias-norm", biases),
            (untied, "--untie-embeddings-and-output-weights", tied),
        ])
    }

    /// Errors if an option is given that a GPT has not.
    pub(super) fn refuse_options_of_bert(&self) -> Result<()> {
        if self.task.is_some() {
            let message = "needs a BERT: give --pretrained-checkpoint PATH, or --architecture bert";
            return Err(Error::config("--task", message));
        }
        let given = [
            (self.norm_placement.is_some(), "--norm-placement"),
            (self.bert_no_binary_head, "--bert-no-binary-head"),
        ];
        match given.into_iter().find(|(given, _)| *given) {
            Some((_, option)) => {
                Err(Error::config(option, "is for --architecture bert: leave it out"))
            }
            None => Ok(()),
        }
    }
}

/// Errors, with its remedy, at the first option that is given.
fn refuse(options: &[(bool, &'static str, &str)]) -> Result<()> {
    match options.iter().find(|(given, ..)| *given) {
        Some((_, option, remedy)) => {
            let message = format!("does not go with --architecture bert: {remedy}");
            Err(Error::config(option, message))
        }
        None => Ok(()),
    }
}
