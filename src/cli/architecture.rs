//! Adapts each model to the command line: its configuration by options, its data, its report.

use ferrotron::models::bert::{Bert, NormPlacement};
use ferrotron::models::data::{
    DataConfig, Dataset, Documents, FiniteSamples, HeldOutPairs, Samples, SentencePairs,
};
use ferrotron::models::gpt::{Gpt, Normalization, PositionEmbedding};
use ferrotron::models::hugging_face::{self, FolderWeights};
use ferrotron::models::run::{RunConfig, RunData, RunResult};
use ferrotron::models::stop::StopFlag;
use ferrotron::models::support::ModelSizes;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::models::traffic::{StepTraffic, expected_traffic};
use ferrotron::models::trainer::{Model, Trainer};
use ferrotron::{DType, Device, Error, Result};
use serde_json::{Value, json};
use std::path::Path;

use super::args::model::ActivationArg;
use super::args::train::TrainArgs;
use super::{closing_report, corpus};

/// Longest training sequences that a Hugging Face folder proposes, whatever its model can take.
const LONGEST_PROPOSED: usize = 2048;

/// The opened data of a run.
pub struct RunInput {
    /// The tokens for training and validation, one after another.
    pub dataset: Dataset,
    /// Masked pairs of segments of the same, if the model takes them.
    pairs: Option<(SentencePairs, Option<HeldOutPairs>)>,
}

/// The samples of a run.
pub struct RunSamples {
    train: Box<dyn Samples>,
    validation: Option<Box<dyn FiniteSamples>>,
}

impl RunSamples {
    /// The samples as a run takes them.
    pub fn run_data<'a>(&'a self, tokenizer: &'a Tokenizer) -> RunData<'a> {
        let validation = self.validation.as_deref();
        RunData { train: &*self.train, validation, tokenizer: Some(tokenizer) }
    }
}

/// A model that the command line trains.
pub trait TrainedModel: Model {
    /// Number of token ids, with those that the model adds to a tokenizer's.
    fn vocab_size(tokenizer: &Tokenizer) -> Result<usize>;

    /// The configuration that the options give.
    fn config(args: &TrainArgs, vocab_size: usize) -> Result<Self::Config>;

    /// The sizes that layouts must suit.
    fn sizes(config: &Self::Config) -> ModelSizes;

    /// The configuration of the model in a Hugging Face folder.
    fn folder_config(folder: &Path) -> Result<Self::Config>;

    /// The same as options by name, those of `train` that decide the shape of a model.
    fn folder_options(config: &Self::Config) -> Value;

    /// Opens the weights of a Hugging Face folder.
    fn folder_weights(folder: &Path, config: &Self::Config) -> Result<FolderWeights>;

    /// The model in a Hugging Face folder.
    fn import(folder: &Path, device: &Device, dtype: DType) -> Result<Self>;

    /// Writes the model into a Hugging Face folder.
    fn export(&self, folder: &Path) -> Result<()>;

    /// The bytes that this rank sends in a step, if they are known before.
    fn traffic(trainer: &Trainer<Self>, seq_length: usize) -> Option<StepTraffic>;

    /// Opens the data; `warn` is told of files that are left out.
    fn open(
        args: &TrainArgs,
        config: &DataConfig,
        tokenizer: &Tokenizer,
        warn: impl Fn(&str),
    ) -> Result<RunInput>;

    /// The samples of a run, for the seed of their order and the number of samples in a global batch.
    fn samples(input: &RunInput, run: &RunConfig, order: (u64, usize)) -> Result<RunSamples>;

    /// Prints the results; of a model that can, with a sample of so many tokens.
    fn report(
        trainer: &Trainer<Self>,
        dataset: &Dataset,
        tokenizer: &Tokenizer,
        outcome: &RunResult,
        sampling: (usize, &StopFlag),
    ) -> Result<()>;
}

impl TrainedModel for Gpt {
    fn vocab_size(tokenizer: &Tokenizer) -> Result<usize> {
        Ok(tokenizer.vocab_size())
    }

    fn config(args: &TrainArgs, vocab_size: usize) -> Result<Self::Config> {
        args.model.config(vocab_size)
    }

    fn sizes(config: &Self::Config) -> ModelSizes {
        config.into()
    }

    fn folder_config(folder: &Path) -> Result<Self::Config> {
        hugging_face::read_config(folder)
    }

    fn folder_options(config: &Self::Config) -> Value {
        let learned = config.position_embedding_type == PositionEmbedding::LearnedAbsolute;
        let rms = config.normalization == Normalization::RmsNorm;
        let mut options = json!({
            "architecture": "gpt2",
            "num-layers": config.num_layers,
            "hidden-size": config.hidden_size,
            "num-attention-heads": config.num_attention_heads,
            "num-query-groups": config.num_query_groups,
            "kv-channels": config.kv_channels,
            "ffn-hidden-size": config.ffn_hidden_size,
            "max-position-embeddings": config.max_position_embeddings,
            "seq-length": config.max_position_embeddings.min(LONGEST_PROPOSED),
            "position-embedding-type": if learned { "learned-absolute" } else { "rope" },
            "rotary-base": config.rotary_base,
            "rotary-percent": config.rotary_percent,
            "use-rope-scaling": config.rope_scaling.is_some(),
            "use-parallel-residual": config.use_parallel_residual,
            "qk-layernorm": config.qk_layernorm,
            "add-qkv-bias": config.add_qkv_bias,
            "normalization": if rms { "RMSNorm" } else { "LayerNorm" },
            "norm-epsilon": config.norm_epsilon,
            "init-method-std": config.init_method_std,
            "activation": ActivationArg::name_of(config.activation),
            "disable-bias-linear": !config.add_bias,
            "untie-embeddings-and-output-weights": !config.tie_embeddings,
        });
        if let Some(scaling) = &config.rope_scaling {
            options["rope-scaling-factor"] = scaling.factor.into();
        }
        if let Some(window) = config.window_size {
            options["window-size"] = window.into();
        }
        options
    }

    fn folder_weights(folder: &Path, config: &Self::Config) -> Result<FolderWeights> {
        hugging_face::weights(folder, config)
    }

    fn import(folder: &Path, device: &Device, dtype: DType) -> Result<Gpt> {
        hugging_face::import(folder, device, dtype)
    }

    fn export(&self, folder: &Path) -> Result<()> {
        hugging_face::export(self, folder)
    }

    fn traffic(trainer: &Trainer<Gpt>, seq_length: usize) -> Option<StepTraffic> {
        Some(expected_traffic(trainer, seq_length))
    }

    fn open(
        _: &TrainArgs,
        config: &DataConfig,
        tokenizer: &Tokenizer,
        warn: impl Fn(&str),
    ) -> Result<RunInput> {
        Ok(RunInput { dataset: corpus::open(config, tokenizer, warn)?, pairs: None })
    }

    fn samples(
        input: &RunInput,
        run: &RunConfig,
        (seed, batch): (u64, usize),
    ) -> Result<RunSamples> {
        let samples = run.samples(&input.dataset, seed, batch)?;
        let validation = samples.validation.map(|samples| Box::new(samples) as Box<_>);
        Ok(RunSamples { train: Box::new(samples.train), validation })
    }

    fn report(
        trainer: &Trainer<Gpt>,
        dataset: &Dataset,
        tokenizer: &Tokenizer,
        outcome: &RunResult,
        sampling: (usize, &StopFlag),
    ) -> Result<()> {
        closing_report::gpt(trainer, dataset, tokenizer, outcome, sampling)
    }
}

impl TrainedModel for Bert {
    fn vocab_size(tokenizer: &Tokenizer) -> Result<usize> {
        Ok(tokenizer.special_tokens()?.vocab_size)
    }

    fn config(args: &TrainArgs, vocab_size: usize) -> Result<Self::Config> {
        args.bert_config(vocab_size)
    }

    fn sizes(config: &Self::Config) -> ModelSizes {
        config.into()
    }

    fn folder_config(folder: &Path) -> Result<Self::Config> {
        hugging_face::bert::read_config(folder)
    }

    fn folder_options(config: &Self::Config) -> Value {
        let placement = match config.norm_placement {
            NormPlacement::Pre => "pre",
            NormPlacement::Post => "post",
        };
        json!({
            "architecture": "bert",
            "num-layers": config.num_layers,
            "hidden-size": config.hidden_size,
            "num-attention-heads": config.num_attention_heads,
            "ffn-hidden-size": config.ffn_hidden_size,
            "max-position-embeddings": config.max_position_embeddings,
            "seq-length": config.max_position_embeddings,
            "norm-epsilon": config.norm_epsilon,
            "norm-placement": placement,
            "bert-no-binary-head": !config.binary_head,
            "init-method-std": config.init_method_std,
            "activation": ActivationArg::name_of(config.activation),
        })
    }

    fn folder_weights(folder: &Path, config: &Self::Config) -> Result<FolderWeights> {
        hugging_face::bert::weights(folder, config)
    }

    fn import(folder: &Path, device: &Device, dtype: DType) -> Result<Bert> {
        hugging_face::bert::import(folder, device, dtype)
    }

    fn export(&self, folder: &Path) -> Result<()> {
        hugging_face::bert::export(self, folder)
    }

    fn traffic(_: &Trainer<Bert>, _: usize) -> Option<StepTraffic> {
        None
    }

    fn open(
        args: &TrainArgs,
        config: &DataConfig,
        tokenizer: &Tokenizer,
        warn: impl Fn(&str),
    ) -> Result<RunInput> {
        let (train, validation) = corpus::open_documents(config, tokenizer, warn)?;
        let tokens = |documents: &Documents| documents.token_source(tokenizer.vocab_size());
        let dataset = Dataset {
            train: tokens(&train)?,
            validation: validation.as_ref().map(tokens).transpose()?,
        };
        let (special, length) = (tokenizer.special_tokens()?, args.model.seq_length()?);
        let train = SentencePairs::new(train, special, length, args.optimization.seed)?;
        // Validation data that are too short are refused only by a run that evaluates.
        let evaluates = args.run.eval_interval != Some(0) && args.run.eval_iters.0 != Some(0);
        let held_out = validation.filter(|_| evaluates);
        let held_out = held_out.map(|held_out| HeldOutPairs::new(held_out, special, length));
        Ok(RunInput { dataset, pairs: Some((train, held_out.transpose()?)) })
    }

    fn samples(input: &RunInput, run: &RunConfig, (_, batch): (u64, usize)) -> Result<RunSamples> {
        let missing = || Error::config("data", "bert needs documents");
        let (train, held_out) = input.pairs.clone().ok_or_else(missing)?;
        let samples = run.eval_iters.map_or(u64::MAX, |all| all.saturating_mul(batch as u64));
        let wanted = held_out.filter(|_| run.intervals.eval_interval > 0);
        let validation = wanted.map(|held_out| Box::new(held_out.first(samples)) as Box<_>);
        Ok(RunSamples { train: Box::new(train), validation })
    }

    fn report(
        _: &Trainer<Bert>,
        _: &Dataset,
        _: &Tokenizer,
        outcome: &RunResult,
        _: (usize, &StopFlag),
    ) -> Result<()> {
        closing_report::bert(outcome);
        Ok(())
    }
}
