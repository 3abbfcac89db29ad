//! The models of the grid: the samples of each, and its loss written out.

use ferrotron::autograd::Var;
use ferrotron::models::bert::{Bert, BertConfig};
use ferrotron::models::data::{Batch, PairBatch, TokenBatch, num_valid};
use ferrotron::models::gpt::{Gpt, GptConfig};
use ferrotron::models::support::ModelSizes;
use ferrotron::models::trainer::Model;
use ferrotron::nn::{Context, Scope};
use ferrotron::tensor::ops::cross_entropy::CrossEntropyConfig;
use ferrotron::tensor::{Device, RandomKey, Result, Tensor};

use super::layout::SEQ_LENGTH;
use super::pairs::pairs;

/// The configuration of a model that the grid trains.
pub trait GridConfig: Sync + Sized {
    type Model: Model<Config = Self>;

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

impl GridConfig for BertConfig {
    type Model = Bert;

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
