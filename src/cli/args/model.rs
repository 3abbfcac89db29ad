//! The options that decide the shape of a model, with Megatron's names and defaults.

use clap::{Args, ValueEnum};
use ferrotron::models::gpt::{
    ActivationKind, GptConfig, Normalization, PositionEmbedding, WindowPattern,
};
use ferrotron::models::presets::{PRESETS, Preset, PresetFamily};
use ferrotron::nn::RopeScaling;
use ferrotron::{Error, Result};

use crate::cli::options::spellings;

/// The family whose choices are the defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Architecture {
    /// Learned positions, LayerNorm, GELU, biases, tied embeddings.
    Gpt2,
    /// Rotary positions, RMSNorm, SwiGLU, no biases, a head of its own.
    Llama,
    /// Adds to llama GeGLU, tied and scaled embeddings, norms around attention and MLP, soft caps, and windows.
    Gemma2,
    /// Attention to all positions, masked tokens, the order of two segments.
    Bert,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PositionArg {
    #[value(alias = "learned_absolute")]
    LearnedAbsolute,
    Rope,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NormalizationArg {
    #[value(name = "LayerNorm")]
    LayerNorm,
    #[value(name = "RMSNorm")]
    RmsNorm,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NormPlacementArg {
    /// Norms before attention and MLP, as in Megatron-LM.
    Pre,
    /// Norms behind the residual additions, as in the original BERT.
    Post,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ActivationArg {
    GeluTanh,
    GeluErf,
    Relu,
    Swiglu,
    Geglu,
}

impl ActivationArg {
    fn kind(self) -> ActivationKind {
        match self {
            ActivationArg::GeluTanh => ActivationKind::GeluTanh,
            ActivationArg::GeluErf => ActivationKind::GeluErf,
            ActivationArg::Relu => ActivationKind::Relu,
            ActivationArg::Swiglu => ActivationKind::Swiglu,
            ActivationArg::Geglu => ActivationKind::Geglu,
        }
    }

    /// The word for an activation.
    pub fn name_of(kind: ActivationKind) -> Option<String> {
        let word = Self::value_variants().iter().find(|word| word.kind() == kind)?;
        word.to_possible_value().map(|value| value.get_name().to_string())
    }
}

/// A task on which a BERT is fine-tuned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TrainTask {
    /// Choosing among four answers to a question on an article.
    #[value(alias = "RACE")]
    Race,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// A published model by name, such as gpt2-124m, llama3-8b, qwen3-0.6b or pythia-70m, without its tokenizer; the other
    /// options change it
    #[arg(long, value_name = "NAME")]
    pub preset: Option<String>,
    /// Family whose choices are the defaults; a preset brings its own
    #[arg(long, value_enum, default_value = "gpt2")]
    pub architecture: Architecture,
    /// Number of transformer blocks [default: 4, or the preset's]
    #[arg(long, value_name = "N")]
    pub num_layers: Option<usize>,
    /// Width of the residual stream [default: 128, or the preset's]
    #[arg(long, value_name = "N")]
    pub hidden_size: Option<usize>,
    /// Width inside the MLP [default: 4 hidden; llama: 8/3 hidden, rounded up to a multiple of 64; with --swiglu
    /// rounded down to one]
    #[arg(long, value_name = "N")]
    pub ffn_hidden_size: Option<usize>,
    /// Number of query heads, a divisor of the width [default: 4, or the preset's]
    #[arg(long, value_name = "N")]
    pub num_attention_heads: Option<usize>,
    /// Number of key and value heads, a divisor of the query heads [default: as many as query heads, or the preset's]
    #[arg(long, value_name = "N")]
    pub num_query_groups: Option<usize>,
    /// Width of a head [default: hidden / heads, or the preset's]
    #[arg(long, value_name = "N")]
    pub kv_channels: Option<usize>,
    /// Tokens per training sequence [default: 64, or the preset's]
    #[arg(long, value_name = "N")]
    pub seq_length: Option<usize>,
    /// Longest sequence that the model takes [default: the training length, or the preset's]
    #[arg(long, value_name = "N")]
    pub max_position_embeddings: Option<usize>,
    /// Kind of position embedding [default: learned-absolute; llama, gemma2: rope]
    #[arg(long, value_enum)]
    pub position_embedding_type: Option<PositionArg>,
    /// Base of the rotary angles [default: 10000, or the preset's]
    #[arg(long, value_name = "X")]
    pub rotary_base: Option<f64>,
    /// Fraction of each head that is rotated: less than 1 in GPT-NeoX [default: 1, or the preset's]
    #[arg(long, value_name = "X")]
    pub rotary_percent: Option<f64>,
    /// Scale the rotary frequencies for long sequences, as in Llama 3.1
    #[arg(long)]
    pub use_rope_scaling: bool,
    /// Factor of --use-rope-scaling: 32 in Llama 3.2
    #[arg(long, value_name = "X", default_value_t = 8.0, requires = "use_rope_scaling")]
    pub rope_scaling_factor: f64,
    /// Turns in the original length below which --use-rope-scaling divides a frequency by the factor
    #[arg(long, value_name = "X", default_value_t = 1.0, requires = "use_rope_scaling")]
    pub rope_scaling_low_freq_factor: f64,
    /// Turns in the original length above which --use-rope-scaling leaves a frequency as it is
    #[arg(long, value_name = "X", default_value_t = 4.0, requires = "use_rope_scaling")]
    pub rope_scaling_high_freq_factor: f64,
    /// Original length of --use-rope-scaling: longest sequence of the training before it
    #[arg(long, value_name = "N", default_value_t = 8192, requires = "use_rope_scaling")]
    pub rope_scaling_original_length: usize,
    /// Sliding window: keys that a query sees, its own among them; Mistral has 4096. Megatron-LM's pair A,0 is A + 1
    /// [default: all earlier ones; gemma2: 4096; or the preset's]
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = spellings::window_size)]
    pub window_size: Option<usize>,
    /// Leave the window out in every block of this number, or where a list such as 1,1,0 of all blocks has 0 [default:
    /// in no block; gemma2: 2]
    #[arg(long, value_name = "N")]
    pub window_attn_skip_freq: Option<WindowPattern>,
    /// Divide attention scores by the root of this number: 144 in Gemma 2 27B [default: the width of a head, or the
    /// preset's]
    #[arg(long, value_name = "X")]
    pub query_pre_attn_scalar: Option<f64>,
    /// Soft cap of attention scores, X tanh(score / X) [default: none; gemma2: 50]
    #[arg(long, value_name = "X")]
    pub attn_logit_softcapping: Option<f64>,
    /// Soft cap of the logits, X tanh(logit / X) [default: none; gemma2: 30]
    #[arg(long, value_name = "X")]
    pub final_logit_softcapping: Option<f64>,
    /// RMSNorm of the queries and keys of each head, as in Qwen 3
    #[arg(long)]
    pub qk_layernorm: bool,
    /// A bias for queries, keys and values although linear layers have none, as in Qwen 2
    #[arg(long)]
    pub add_qkv_bias: bool,
    /// A bias for both projections of attention although linear layers have none, as Llama's attention_bias
    #[arg(long)]
    pub add_attention_bias: bool,
    /// A bias for both layers of the MLP although linear layers have none, as Llama's mlp_bias
    #[arg(long)]
    pub add_mlp_bias: bool,
    /// Let attention and MLP of a block read the same input, as in GPT-NeoX
    #[arg(long)]
    pub use_parallel_residual: bool,
    /// Norm of the residual stream [default: LayerNorm; llama, gemma2: RMSNorm]
    #[arg(long, value_enum)]
    pub normalization: Option<NormalizationArg>,
    /// Added to the variance in norms [default: 1e-5; gemma2: 1e-6]
    #[arg(long, value_name = "X")]
    pub norm_epsilon: Option<f64>,
    /// Norms multiply by 1 + weight, and weights start at 0; gemma2 has them
    #[arg(long)]
    pub apply_layernorm_1p: bool,
    /// Normalize the outputs of attention and MLP too, before they are added to the residual stream; gemma2 does
    #[arg(long)]
    pub sandwich_norm: bool,
    /// Multiply token embeddings by the root of the width; gemma2 does
    #[arg(long)]
    pub scale_embeddings: bool,
    /// Place of the norms in a BERT [default: pre]
    #[arg(long, value_enum)]
    pub norm_placement: Option<NormPlacementArg>,
    /// Fine-tune a BERT on a task in place of pre-training: questions of RACE, in the files and folders of --data
    #[arg(long, value_enum)]
    pub task: Option<TrainTask>,
    /// No head for the order of two segments in a BERT
    #[arg(long)]
    pub bert_no_binary_head: bool,
    /// Nonlinearity of the MLP [default: gelu-tanh; llama: swiglu; gemma2: geglu; bert: gelu-erf]
    #[arg(long, value_enum)]
    pub activation: Option<ActivationArg>,
    /// SwiGLU in the MLP, which is 8/3 hidden wide, rounded down to a multiple of 64, unless --ffn-hidden-size is given
    #[arg(long, conflicts_with = "activation")]
    pub swiglu: bool,
    /// No biases in linear layers; llama and gemma2 have none
    #[arg(long)]
    pub disable_bias_linear: bool,
    /// No biases in LayerNorms; RMSNorms never have one
    #[arg(long)]
    pub disable_bias_norm: bool,
    /// Give the head a weight of its own; llama has one
    #[arg(long)]
    pub untie_embeddings_and_output_weights: bool,
    /// Standard deviation of initial weights
    #[arg(long, value_name = "X", default_value_t = 0.02)]
    pub init_method_std: f64,
    /// Dropout on embeddings and on what enters the residual stream
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    pub hidden_dropout: f64,
    /// Dropout on attention weights
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    pub attention_dropout: f64,
}

/// The sizes of the model that is trained without options.
const SMALL: Preset = Preset {
    num_layers: 4,
    hidden_size: 128,
    num_attention_heads: 4,
    seq_length: 64,
    ..PRESETS[0]
};

impl ModelArgs {
    /// Tokens per training sequence.
    pub fn seq_length(&self) -> Result<usize> {
        let preset = self.preset()?.map(|preset| preset.seq_length);
        match self.seq_length.or(preset).unwrap_or(64) {
            0 => Err(Error::config("--seq-length", "must be positive, got 0")),
            length => Ok(length),
        }
    }

    /// The preset that the options name.
    pub fn preset(&self) -> Result<Option<Preset>> {
        self.preset.as_deref().map(Preset::find).transpose()
    }

    /// The family whose choices are the defaults.
    ///
    /// # Errors
    /// A preset of another family; an unknown preset; a BERT.
    fn family(&self) -> Result<PresetFamily> {
        let (family, option) = match self.architecture {
            Architecture::Bert => {
                let message = "this command is for GPTs: gpt2, llama or gemma2";
                return Err(Error::config("--architecture bert", message));
            }
            Architecture::Gpt2 => (PresetFamily::Gpt2, "gpt2"),
            Architecture::Llama => (PresetFamily::Llama, "llama"),
            Architecture::Gemma2 => (PresetFamily::Gemma2, "gemma2"),
        };
        // The sizes of a GPT-2 may be those of a model of another family.
        match self.preset()? {
            Some(preset) if preset.family != PresetFamily::Gpt2 => match family {
                PresetFamily::Gpt2 => Ok(preset.family),
                family if family == preset.family => Ok(family),
                _ => {
                    let own = match preset.family {
                        PresetFamily::Gemma2 => "--architecture gemma2",
                        PresetFamily::GptNeox => "the family GPT-NeoX",
                        _ => "--architecture llama",
                    };
                    let message = format!("'{}' is of {own}: leave {option} out", preset.name);
                    Err(Error::config("--preset", message))
                }
            },
            _ => Ok(family),
        }
    }

    /// Longest sequence that the model takes.
    ///
    /// Errors if it is shorter than those of training.
    pub fn positions(&self) -> Result<usize> {
        let length = self.seq_length()?;
        let longest = self.preset()?.and_then(|preset| preset.max_position_embeddings);
        let proposed = longest.map_or(length, |longest| longest.max(length));
        let positions = self.max_position_embeddings.unwrap_or(proposed);
        if positions < length {
            let message = format!("{positions} is less than --seq-length {length}");
            return Err(Error::config("--max-position-embeddings", message));
        }
        Ok(positions)
    }

    /// The activation that the options name, if they do.
    pub fn activation_kind(&self) -> Option<ActivationKind> {
        let activation = if self.swiglu { Some(ActivationArg::Swiglu) } else { self.activation };
        activation.map(ActivationArg::kind)
    }

    /// The GPT for a vocabulary of `vocab_size` tokens.
    pub fn config(&self, vocab_size: usize) -> Result<GptConfig> {
        self.refuse_options_of_bert()?;
        let preset = self.preset()?.unwrap_or(SMALL);
        let sizes = Preset {
            family: self.family()?,
            vocab_size,
            num_layers: self.num_layers.unwrap_or(preset.num_layers),
            hidden_size: self.hidden_size.unwrap_or(preset.hidden_size),
            num_attention_heads: self.num_attention_heads.unwrap_or(preset.num_attention_heads),
            num_query_groups: self.num_query_groups.or(preset.num_query_groups),
            max_position_embeddings: Some(match self.max_position_embeddings {
                Some(positions) => positions,
                None => self.positions()?,
            }),
            ..preset
        };
        let hidden = sizes.hidden_size;
        let mut config = sizes.config();
        config.rotary_base = self.rotary_base.unwrap_or(config.rotary_base);
        config.rotary_percent = self.rotary_percent.unwrap_or(config.rotary_percent);
        if self.use_rope_scaling {
            config.rope_scaling = Some(RopeScaling {
                factor: self.rope_scaling_factor,
                low_freq_factor: self.rope_scaling_low_freq_factor,
                high_freq_factor: self.rope_scaling_high_freq_factor,
                original_max_position_embeddings: self.rope_scaling_original_length,
            });
        }
        config.use_parallel_residual |= self.use_parallel_residual;
        config.window_size = self.window_size.or(config.window_size);
        if let Some(pattern) = &self.window_attn_skip_freq {
            config.window_attn_skip_freq = Some(pattern.clone());
        }
        config.query_pre_attn_scalar = self.query_pre_attn_scalar.or(config.query_pre_attn_scalar);
        config.attn_logit_softcapping =
            self.attn_logit_softcapping.or(config.attn_logit_softcapping);
        config.final_logit_softcapping =
            self.final_logit_softcapping.or(config.final_logit_softcapping);
        config.qk_layernorm |= self.qk_layernorm;
        config.add_qkv_bias |= self.add_qkv_bias;
        config.add_attention_bias = self.add_attention_bias;
        config.add_mlp_bias = self.add_mlp_bias;
        config.norm_epsilon = self.norm_epsilon.unwrap_or(config.norm_epsilon);
        config.apply_layernorm_1p |= self.apply_layernorm_1p;
        config.sandwich_norm |= self.sandwich_norm;
        config.scale_embeddings |= self.scale_embeddings;
        config.init_method_std = self.init_method_std;
        config.hidden_dropout = self.hidden_dropout;
        config.attention_dropout = self.attention_dropout;
        let norms_have_biases = config.add_bias && !self.disable_bias_norm;
        config.add_bias &= !self.disable_bias_linear;
        config.tie_embeddings &= !self.untie_embeddings_and_output_weights;
        match (self.ffn_hidden_size, preset.ffn_hidden_size) {
            (Some(width), _) => config.ffn_hidden_size = width,
            (None, None) if self.swiglu => config.ffn_hidden_size = swiglu_width(hidden)?,
            (None, _) => {}
        }
        config.kv_channels = self.kv_channels.unwrap_or(config.kv_channels);
        if let Some(position) = self.position_embedding_type {
            config.position_embedding_type = match position {
                PositionArg::LearnedAbsolute => PositionEmbedding::LearnedAbsolute,
                PositionArg::Rope => PositionEmbedding::Rope,
            };
        }
        if let Some(norm) = self.normalization {
            config.normalization = match norm {
                NormalizationArg::LayerNorm => Normalization::LayerNorm,
                NormalizationArg::RmsNorm => Normalization::RmsNorm,
            };
        }
        if config.normalization == Normalization::LayerNorm {
            config.add_norm_bias =
                (norms_have_biases != config.add_bias).then_some(norms_have_biases);
        }
        config.activation = self.activation_kind().unwrap_or(config.activation);
        config.validate()?;
        self.positions()?;
        Ok(config)
    }
}

/// The width inside a SwiGLU of Megatron-LM (`arguments.py`), which has about as many parameters as an MLP of 4 `hidden`.
fn swiglu_width(hidden: usize) -> Result<usize> {
    match hidden / 24 * 64 {
        0 => Err(Error::config(
            "--swiglu",
            format!(
                "8/3 of --hidden-size {hidden}, rounded down to a multiple of 64, is 0: give --ffn-hidden-size, or \
                 --activation swiglu for the width of the other activations"
            ),
        )),
        width => Ok(width),
    }
}
