//! Adapts each model to the command line: its configuration by options, its data, its report.

use ferrotron::models::bert::Bert;
use ferrotron::models::data::{
    Blend, BlendedDataset, Dataset, DocumentConfig, DocumentSamples, FiniteSamples,
    MegatronOrderConfig, MegatronSampler, PackedSampler, PackedSamples, PackingAlgorithm,
    PackingConfig, PackingReport, Prefetch, Samples, TokenSource,
};
use ferrotron::models::gpt::Gpt;
use ferrotron::models::hugging_face::{self, FolderWeights};
use ferrotron::models::run::{RunConfig, RunData, RunResult};
use ferrotron::models::stop::StopFlag;
use ferrotron::models::support::ModelSizes;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::models::traffic::{StepTraffic, expected_traffic};
use ferrotron::models::trainer::{Model, Trainer};
use ferrotron::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::args::data::{DataOrder, DataSource};
use super::args::train::TrainArgs;
use super::bert_input::{self, BertInput};
use super::{closing_report, corpus};

/// The opened data of a run.
pub struct RunInput {
    /// The tokens for training and validation, one after another.
    pub dataset: Dataset,
    /// The samples of a BERT, if the model is one.
    bert: Option<BertInput>,
    /// The samples of Megatron's data sets, if the options name such.
    blended: Option<BlendedInput>,
    /// The treatment of the ends of documents.
    documents: Option<DocumentConfig>,
}

/// The samples of Megatron's data sets.
struct BlendedInput {
    train: Arc<dyn Samples>,
    validation: Option<Blend>,
    test: Option<Blend>,
    /// The packing of fine-tuning samples, and its result for training.
    packing: Option<(PackingConfig, PackingReport)>,
    /// A checksum of what decides the order beside the tokens.
    order_crc32: Option<u32>,
}

/// The number of samples of a whole run, if the order depends on it, and the seed of the order.
pub struct OrderLength {
    pub samples: Option<u64>,
    pub seed: u64,
}

impl RunInput {
    /// A checksum of what decides the order of samples beside the tokens, if anything does.
    pub fn order_crc32(&self) -> Option<u32> {
        self.blended.as_ref()?.order_crc32
    }

    /// The packing of the training samples, if they are packed.
    pub fn packing(&self) -> Option<PackingReport> {
        Some(self.blended.as_ref()?.packing?.1)
    }

    /// The tokens that an evaluation reads one after another, if it does.
    fn evaluated_stream(&self) -> Option<&TokenSource> {
        let mixed = |blended: &BlendedInput| {
            blended.packing.is_some()
                || blended.validation.as_ref().is_some_and(|blend| blend.num_sets() > 1)
        };
        self.dataset.validation.as_ref().filter(|_| !self.blended.as_ref().is_some_and(mixed))
    }
}

/// The samples of a run.
pub struct RunSamples {
    train: Prefetch,
    validation: Option<Box<dyn FiniteSamples>>,
    /// Those of the evaluation behind the last step, if there is one.
    test: Option<Box<dyn FiniteSamples>>,
}

impl RunSamples {
    /// Reads the training samples ahead.
    fn new(
        train: Arc<dyn Samples>,
        [validation, test]: [Option<Box<dyn FiniteSamples>>; 2],
        documents: Option<DocumentConfig>,
    ) -> Result<RunSamples> {
        let Some(config) = documents else {
            return Ok(RunSamples { train: Prefetch::new(train)?, validation, test });
        };
        let train = Prefetch::new(Arc::new(DocumentSamples::new(train, config)))?;
        let ended = |samples: Box<dyn FiniteSamples>| -> Box<dyn FiniteSamples> {
            Box::new(DocumentSamples::new(samples, config))
        };
        Ok(RunSamples { train, validation: validation.map(ended), test: test.map(ended) })
    }

    /// The samples of the evaluation behind the last step, if there is one.
    pub fn test(&self) -> Option<&dyn FiniteSamples> {
        self.test.as_deref()
    }

    /// The samples as a run takes them.
    pub fn run_data<'a>(&'a self, tokenizer: &'a Tokenizer) -> RunData<'a> {
        let validation = self.validation.as_deref();
        RunData { train: &self.train, validation, tokenizer: Some(tokenizer) }
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

    /// Opens the weights of a Hugging Face folder.
    fn folder_weights(folder: &Path, config: &Self::Config) -> Result<FolderWeights>;

    /// Opens the weights of a Hugging Face folder for a model that gets a new head.
    fn pretrained_weights(folder: &Path, config: &Self::Config) -> Result<FolderWeights>;

    /// Writes the model into a Hugging Face folder, as a family by its `model_type` or as the first that holds it.
    fn export(&self, family: Option<&str>, folder: &Path) -> Result<()>;

    /// The bytes that this rank sends in a step, if they are known before.
    fn traffic(trainer: &Trainer<Self>, seq_length: usize) -> Option<StepTraffic>;

    /// Opens the data; `warn` is told of files that are left out.
    fn open(
        args: &TrainArgs,
        source: &DataSource,
        order: &OrderLength,
        tokenizer: &Tokenizer,
        warn: impl Fn(&str),
    ) -> Result<RunInput>;

    /// The samples of a run, for the seed of their order and the number of samples in a global batch.
    fn samples(input: &RunInput, run: &RunConfig, order: (u64, usize)) -> Result<RunSamples>;

    /// Prints the results; of a model that can, with a sample of so many tokens, which is returned.
    fn report(
        trainer: &Trainer<Self>,
        input: &RunInput,
        tokenizer: &Tokenizer,
        outcome: &RunResult,
        sampling: (usize, &StopFlag),
    ) -> Result<Option<String>>;
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

    fn folder_weights(folder: &Path, config: &Self::Config) -> Result<FolderWeights> {
        hugging_face::weights(folder, config)
    }

    fn pretrained_weights(_: &Path, _: &Self::Config) -> Result<FolderWeights> {
        Err(Error::config("--pretrained-checkpoint", "is for a BERT: leave it out"))
    }

    fn export(&self, family: Option<&str>, folder: &Path) -> Result<()> {
        match family {
            Some(family) => hugging_face::export_as(self, family, folder),
            None => hugging_face::export(self, folder),
        }
    }

    fn traffic(trainer: &Trainer<Gpt>, seq_length: usize) -> Option<StepTraffic> {
        Some(expected_traffic(trainer, seq_length))
    }

    fn open(
        args: &TrainArgs,
        source: &DataSource,
        order: &OrderLength,
        tokenizer: &Tokenizer,
        warn: impl Fn(&str),
    ) -> Result<RunInput> {
        let documents = args.data.documents(tokenizer)?;
        let seq_length = args.model.seq_length()?;
        let packing = args.data.packing.config(seq_length);
        let resets = documents.is_some_and(|documents| documents.reset_attention);
        let option = if packing.is_some() { "--packing" } else { "--reset-attention-mask" };
        if (resets || packing.is_some()) && args.execution.captures_steps() {
            let message = "a CUDA graph would repeat the documents of one batch: leave out --enable-cuda-graph";
            return Err(Error::config(option, message));
        }
        let config = match source {
            DataSource::Files(config) => {
                corpus::warn_of_pairs(config.data.iter().map(PathBuf::as_path), &warn);
                let dataset = corpus::open(config, tokenizer, warn)?;
                return Ok(RunInput { dataset, bert: None, blended: None, documents });
            }
            DataSource::Sets(config) => config,
        };
        config.check_tokenizer(tokenizer)?;
        let sets = match packing {
            Some(_) => BlendedDataset::open_pairs(config, tokenizer.vocab_size())?,
            None => {
                corpus::warn_of_pairs(config.prefixes(), warn);
                BlendedDataset::open(config, tokenizer.vocab_size())?
            }
        };
        let dataset = sets.streams();
        let BlendedDataset { training, validation, test } = sets;
        let mut packed = None;
        let (train, order_crc32): (Arc<dyn Samples>, _) =
            match (packing, args.data.data_order, order.samples) {
                (Some(config), ..) => {
                    let sampler = PackedSampler::new(&training, &config, order.seed)?;
                    packed = Some((config, sampler.report()));
                    let crc32 = sampler.crc32();
                    (Arc::new(sampler), Some(crc32))
                }
                (None, DataOrder::Megatron, Some(samples)) => {
                    let seed = u32::try_from(order.seed).map_err(|_| {
                        let message = format!(
                            "{} is beyond the 32 bits of --data-order megatron: at most {}",
                            order.seed,
                            u32::MAX
                        );
                        Error::config("--seed", message)
                    })?;
                    let config = MegatronOrderConfig { seq_length, samples, seed };
                    let sampler = MegatronSampler::new(&training, &config)?;
                    let crc32 = sampler.crc32();
                    (Arc::new(sampler), Some(crc32))
                }
                _ => (training.sampler(seq_length, order.seed)?.into(), training.weights_crc32()),
            };
        let blended = BlendedInput { train, validation, test, packing: packed, order_crc32 };
        let blended = Some(blended);
        Ok(RunInput { dataset, bert: None, blended, documents })
    }

    fn samples(
        input: &RunInput,
        run: &RunConfig,
        (seed, batch): (u64, usize),
    ) -> Result<RunSamples> {
        if let Some(BlendedInput { train, validation, test, packing, .. }) = &input.blended {
            let samples = run.eval_iters.map_or(u64::MAX, |all| all.saturating_mul(batch as u64));
            let wanted = run.intervals.eval_interval > 0 && samples > 0;
            let windows = |blend: &Option<Blend>| -> Result<Option<Box<dyn FiniteSamples>>> {
                let Some(blend) = blend.as_ref().filter(|_| wanted) else { return Ok(None) };
                Ok(Some(match packing {
                    Some((config, _)) => {
                        // The first sequences from the longest sample on would be of long ones alone.
                        let algorithm = PackingAlgorithm::FirstFit;
                        let config = PackingConfig { algorithm, ..*config };
                        Box::new(PackedSamples::new(blend, &config)?.first(samples))
                    }
                    None => blend.validation(run.seq_length, samples)?,
                }))
            };
            let held_out = [windows(validation)?, windows(test)?];
            return RunSamples::new(train.clone(), held_out, input.documents);
        }
        let samples = run.samples(&input.dataset, seed, batch)?;
        let validation = samples.validation.map(|samples| Box::new(samples) as Box<_>);
        RunSamples::new(Arc::new(samples.train), [validation, None], input.documents)
    }

    fn report(
        trainer: &Trainer<Gpt>,
        input: &RunInput,
        tokenizer: &Tokenizer,
        outcome: &RunResult,
        sampling: (usize, &StopFlag),
    ) -> Result<Option<String>> {
        let stream = input.evaluated_stream();
        closing_report::gpt(trainer, stream, tokenizer, outcome, sampling)
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

    fn folder_weights(folder: &Path, config: &Self::Config) -> Result<FolderWeights> {
        hugging_face::bert::weights(folder, config)
    }

    fn pretrained_weights(folder: &Path, config: &Self::Config) -> Result<FolderWeights> {
        hugging_face::bert::pretrained_weights(folder, config)
    }

    fn export(&self, family: Option<&str>, folder: &Path) -> Result<()> {
        match family {
            Some(family) => hugging_face::bert::export_as(self, family, folder),
            None => hugging_face::bert::export(self, folder),
        }
    }

    fn traffic(_: &Trainer<Bert>, _: usize) -> Option<StepTraffic> {
        None
    }

    fn open(
        args: &TrainArgs,
        source: &DataSource,
        _: &OrderLength,
        tokenizer: &Tokenizer,
        warn: impl Fn(&str),
    ) -> Result<RunInput> {
        let DataSource::Files(config) = source else {
            let message = "a bert takes sentences of text files: name them by --data";
            return Err(Error::config("--data-path", message));
        };
        if args.data.documents(tokenizer)?.is_some() {
            let message = "a bert takes sentences, which are not packed: leave it out";
            return Err(Error::config("--reset-attention-mask", message));
        }
        let (dataset, bert) = bert_input::open(args, config, tokenizer, warn)?;
        Ok(RunInput { dataset, bert: Some(bert), blended: None, documents: None })
    }

    fn samples(input: &RunInput, run: &RunConfig, (_, batch): (u64, usize)) -> Result<RunSamples> {
        let missing = || Error::config("data", "bert needs documents");
        let BertInput { train, held_out } = input.bert.clone().ok_or_else(missing)?;
        let samples = run.eval_iters.map_or(u64::MAX, |all| all.saturating_mul(batch as u64));
        let wanted = held_out.filter(|_| run.intervals.eval_interval > 0);
        let wanted = wanted.filter(|_| samples > 0);
        let validation = wanted.map(|held_out| held_out.first(samples));
        RunSamples::new(train, [validation, None], None)
    }

    fn report(
        _: &Trainer<Bert>,
        _: &RunInput,
        _: &Tokenizer,
        outcome: &RunResult,
        _: (usize, &StopFlag),
    ) -> Result<Option<String>> {
        closing_report::bert(outcome);
        Ok(None)
    }
}
