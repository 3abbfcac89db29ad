//! The models of the grid: the samples of each, and its loss written out.

use ferrotron::autograd::Var;
use ferrotron::models::bert::{Bert, BertConfig};
use ferrotron::models::data::{
    Batch, BlendConfig, BlendPaths, BlendedDataset, DocumentConfig, DocumentSamples,
    GeneratedSamples, IndexedDatasetBuilder, LongSamples, PackedSampler, PackingAlgorithm,
    PackingConfig, PairBatch, Samples, Split, TokenBatch, TokenType, num_valid,
};
use ferrotron::models::gpt::{Gpt, GptConfig};
use ferrotron::models::support::ModelSizes;
use ferrotron::models::trainer::Model;
use ferrotron::nn::{Context, Scope};
use ferrotron::tensor::ops::cross_entropy::CrossEntropyConfig;
use ferrotron::tensor::{Device, RandomKey, Result, Tensor};

use super::layout::SEQ_LENGTH;
use super::pairs::pairs;
use tempfile::TempDir;

/// A model that the grid trains, and its samples.
pub trait GridConfig: Sync + Sized {
    type Model: Model;

    /// The configuration of the model.
    fn config(&self) -> &<Self::Model as Model>::Config;

    /// The sizes on which layouts depend.
    fn sizes(&self) -> ModelSizes;

    /// Samples by their numbers.
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch>;

    /// The model on one rank.
    fn whole(&self, scope: &Scope) -> Result<Self::Model>;

    /// The mean loss of a batch on one rank.
    fn loss(model: &Self::Model, device: &Device, ctx: &Context, batch: &Batch) -> Result<Var>;
}

impl GridConfig for GptConfig {
    type Model = Gpt;

    fn config(&self) -> &GptConfig {
        self
    }

    fn sizes(&self) -> ModelSizes {
        self.into()
    }

    /// A quarter of the targets, unevenly, does not count.
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let key = RandomKey::new(3, 0, "tokens");
        let numbers = micro_batch * SEQ_LENGTH;
        let at = |i: usize| first_sample * SEQ_LENGTH as u64 + i as u64;
        let draw = |i: usize, what: u64| key.uniform(4 * at(i) + what);
        let token = |i: usize, what: u64| (draw(i, what) * self.vocab_size as f64) as u32;
        let counts = |i: usize| draw(i, 2) > 0.5 * draw(i / SEQ_LENGTH * SEQ_LENGTH, 3);
        TokenBatch {
            inputs: (0..numbers).map(|i| token(i, 0)).collect(),
            targets: (0..numbers)
                .map(|i| if counts(i) { i64::from(token(i, 1)) } else { -100 })
                .collect(),
            first_sample,
            micro_batch,
            seq_length: SEQ_LENGTH,
        }
        .try_into()
    }

    fn whole(&self, scope: &Scope) -> Result<Gpt> {
        Gpt::new(scope, self)
    }

    fn loss(gpt: &Gpt, device: &Device, ctx: &Context, batch: &Batch) -> Result<Var> {
        let dims = [batch.micro_batch, batch.seq_length];
        let inputs = Tensor::from_slice(device, batch.get::<u32>(TokenBatch::INPUTS)?, &dims)?;
        let targets = batch.get::<i64>(TokenBatch::TARGETS)?;
        let sum = gpt.loss(ctx, &inputs, &Tensor::from_slice(device, targets, &dims)?)?.sum;
        sum.mul_scalar(1.0 / num_valid(targets) as f64)
    }
}

/// A GPT over samples of several documents each, which neither attention nor positions nor the loss connect.
pub struct PackedGpt(pub GptConfig);

/// The token that ends a document.
const END: u32 = 0;

impl GridConfig for PackedGpt {
    type Model = Gpt;

    fn config(&self) -> &GptConfig {
        &self.0
    }

    fn sizes(&self) -> ModelSizes {
        (&self.0).into()
    }

    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let config = DocumentConfig {
            end_of_document: END,
            reset_attention: true,
            reset_positions: true,
            mask_loss: true,
        };
        let batch = |first, count| self.0.batch(first, count);
        let samples = GeneratedSamples::new(SEQ_LENGTH, u64::MAX, batch);
        DocumentSamples::new(samples, config).batch(first_sample, micro_batch)
    }

    fn whole(&self, scope: &Scope) -> Result<Gpt> {
        Gpt::new(scope, &self.0)
    }

    /// Each document by itself, from its first token to its last but one.
    fn loss(gpt: &Gpt, device: &Device, _: &Context, batch: &Batch) -> Result<Var> {
        let inputs = batch.get::<u32>(TokenBatch::INPUTS)?;
        let targets = batch.get::<i64>(TokenBatch::TARGETS)?;
        let (mut sum, mut valid): (Option<Var>, u64) = (None, 0);
        let rows = inputs.chunks(SEQ_LENGTH).zip(targets.chunks(SEQ_LENGTH));
        for (inputs, targets) in rows {
            for document in inputs.split_inclusive(|&token| token == END) {
                let start = document.as_ptr() as usize - inputs.as_ptr() as usize;
                let start = start / size_of::<u32>();
                let mut targets = targets[start..start + document.len()].to_vec();
                if document.ends_with(&[END]) {
                    *targets.last_mut().expect("it has a token") = -100;
                }
                valid += num_valid(&targets);
                let dims = [1, document.len()];
                let tokens = Tensor::from_slice(device, document, &dims)?;
                let targets = Tensor::from_slice(device, &targets, &dims)?;
                let loss = gpt.loss(&Context::eval(1, document.len()), &tokens, &targets)?.sum;
                sum = Some(match sum {
                    Some(sum) => sum.add(&loss)?,
                    None => loss,
                });
            }
        }
        sum.expect("there are documents").mul_scalar(1.0 / valid as f64)
    }
}

/// A GPT over packed pairs of prompts and completions.
pub struct FineTunedGpt {
    config: GptConfig,
    samples: PackedSampler,
    _folder: TempDir,
}

impl FineTunedGpt {
    /// Writes 60 pairs of 2 to 14 tokens.
    pub fn new(config: GptConfig) -> Result<FineTunedGpt> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let prefix = folder.path().join("pairs");
        let mut builder = IndexedDatasetBuilder::new(&prefix, TokenType::U16)?;
        let key = RandomKey::new(5, 0, "pairs");
        for sample in 0..60 {
            for part in 0..2 {
                let draw = |place: u64| key.uniform(100 * (2 * sample + part) + place);
                let tokens = (1..=1 + (draw(0) * 7.0) as u64)
                    .map(|place| (draw(place) * config.vocab_size as f64) as u32);
                builder.add_sequence(&tokens.collect::<Vec<u32>>())?;
            }
            builder.end_document()?;
        }
        builder.finish()?;
        let paths = BlendPaths::parse("--data-path", &[prefix.display().to_string()])?;
        let blend = BlendConfig::Shared(paths, Split::proportions([1.0, 0.0, 0.0])?);
        let dataset = BlendedDataset::open_pairs(&blend, config.vocab_size)?;
        let packing = PackingConfig {
            seq_length: SEQ_LENGTH,
            algorithm: PackingAlgorithm::FirstFit,
            long_samples: LongSamples::Refuse,
        };
        let samples = PackedSampler::new(&dataset.training, &packing, 7)?;
        Ok(FineTunedGpt { config, samples, _folder: folder })
    }
}

impl GridConfig for FineTunedGpt {
    type Model = Gpt;

    fn config(&self) -> &GptConfig {
        &self.config
    }

    fn sizes(&self) -> ModelSizes {
        (&self.config).into()
    }

    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        self.samples.batch(first_sample, micro_batch)
    }

    fn whole(&self, scope: &Scope) -> Result<Gpt> {
        Gpt::new(scope, &self.config)
    }

    /// Each pair by itself, and nothing of what pads a sequence.
    fn loss(gpt: &Gpt, device: &Device, _: &Context, batch: &Batch) -> Result<Var> {
        let inputs = batch.get::<u32>(TokenBatch::INPUTS)?;
        let targets = batch.get::<i64>(TokenBatch::TARGETS)?;
        let mut sum: Option<Var> = None;
        for (row, ends) in batch.documents().expect("samples are packed").iter().enumerate() {
            for two in ends.windows(2) {
                let range = row * SEQ_LENGTH + two[0]..row * SEQ_LENGTH + two[1];
                if num_valid(&targets[range.clone()]) == 0 {
                    continue;
                }
                let dims = [1, range.len()];
                let tokens = Tensor::from_slice(device, &inputs[range.clone()], &dims)?;
                let labels = Tensor::from_slice(device, &targets[range], &dims)?;
                let loss = gpt.loss(&Context::eval(1, dims[1]), &tokens, &labels)?.sum;
                sum = Some(match sum {
                    Some(sum) => sum.add(&loss)?,
                    None => loss,
                });
            }
        }
        sum.expect("there are pairs").mul_scalar(1.0 / num_valid(targets) as f64)
    }
}

impl GridConfig for BertConfig {
    type Model = Bert;

    fn config(&self) -> &BertConfig {
        self
    }

    fn sizes(&self) -> ModelSizes {
        self.into()
    }

    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let numbers: Vec<u64> = (first_sample..).take(micro_batch).collect();
        pairs(first_sample, &numbers, SEQ_LENGTH, self.vocab_size)
    }

    fn whole(&self, scope: &Scope) -> Result<Bert> {
        Bert::new(scope, self)
    }

    fn loss(bert: &Bert, device: &Device, ctx: &Context, batch: &Batch) -> Result<Var> {
        let dims = [batch.micro_batch, batch.seq_length];
        let ids = |name| Tensor::from_slice(device, batch.get::<u32>(name)?, &dims);
        let ctx = ctx.clone().with_key_lengths(batch.key_lengths().expect("samples are padded"))?;
        let output = bert.forward(&ctx, &ids(PairBatch::TOKENS)?, &ids(PairBatch::SEGMENTS)?)?;
        let mean = |logits: &Var, name, dims: &[usize]| {
            let labels = batch.get::<i64>(name)?;
            let tensor = Tensor::from_slice(device, labels, dims)?;
            let sum = logits.cross_entropy(&tensor, &CrossEntropyConfig::default())?.sum;
            sum.mul_scalar(1.0 / num_valid(labels) as f64)
        };
        let masked = mean(&output.token_logits, PairBatch::TARGETS, &dims)?;
        let order = output.order_logits.expect("there is a binary head");
        masked.add(&mean(&order, PairBatch::ORDER, &dims[..1])?)
    }
}
