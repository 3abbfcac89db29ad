//! A small model with every kind of operation that a training step has, to be run as it is and as a graph.

use ferrotron_tensor::gemm::Accum;
use ferrotron_tensor::ops::adafactor::{
    Adafactor, MatrixBatch, NormalizeBy, SecondMomentDecay, SquareSums, adafactor, matrix_factors,
    square_sums, update_means, update_sq_norm,
};
use ferrotron_tensor::ops::adamw::{AdamW, adamw};
use ferrotron_tensor::ops::attention::{
    AttentionConfig, AttentionDropout, attention, attention_backward_packed, split_packed,
};
use ferrotron_tensor::ops::cross_entropy::{
    CrossEntropy, CrossEntropyConfig, cross_entropy, cross_entropy_backward,
};
use ferrotron_tensor::ops::dropout::dropout;
use ferrotron_tensor::ops::embedding::{embedding, embedding_backward};
use ferrotron_tensor::ops::layer_norm::{layer_norm, layer_norm_backward};
use ferrotron_tensor::ops::linear::{
    linear_gelu, linear_input_gradient, linear_parameter_gradients,
};
use ferrotron_tensor::ops::loss_scale::{DeviceLossScale, LossScaleRule, LossScaleState};
use ferrotron_tensor::ops::matmul::matmul;
use ferrotron_tensor::ops::outcome::{
    CheckStepConfig, OverflowPolicy, StepMetricsLog, StepSums, check_step,
};
use ferrotron_tensor::ops::random::normal;
use ferrotron_tensor::ops::rotary::{Direction, RotaryTable, rotary};
use ferrotron_tensor::ops::round::{Stochastic, widen};
use ferrotron_tensor::ops::rounded::Rounded;
use ferrotron_tensor::ops::softmax::softmax;
use ferrotron_tensor::ops::sq_norm::add_sq_norm;
use ferrotron_tensor::ops::step::{DeviceStepParams, StepParams};
use ferrotron_tensor::{DType, Device, RandomKey, Result, ShardSpec, Tensor};

use crate::support::random;

use DType::{BF16, F32, F64, U32};

/// Samples, positions, classes, heads and their elements.
const SIZES: [usize; 5] = [2, 24, 40, 2, 16];

/// A layer of attention between an embedding and its transpose, with gradients and the state of two optimizers.
pub struct Model {
    ids: Tensor,
    targets: Tensor,
    step: DeviceStepParams,
    loss_scale: DeviceLossScale,
    outcomes: StepMetricsLog,
    /// The embedding, rounded from its master copy, for AdamW.
    table: Tensor,
    master: Tensor,
    moments: [Tensor; 2],
    dtable: Tensor,
    gain: Tensor,
    bias: Tensor,
    /// The projection, rounded at random, for Adafactor.
    projection: Tensor,
    dprojection: Tensor,
    rows: Tensor,
    columns: Tensor,
    mean: Tensor,
}

pub fn numbers(update: u64) -> StepParams {
    let update_f = update as f64;
    StepParams { update, lr: 0.02 / update_f, grad_scale: 1.0 - 0.1 * update_f }
}

impl Model {
    pub fn new(device: &Device) -> Result<Model> {
        let [batch, length, classes, heads, width] = SIZES;
        let inner = heads * width;
        let n = classes * inner;
        let zeros = |dims: &[usize]| Tensor::zeros(device, F32, dims);
        let ones = |n| Tensor::full(device, F32, &[n], 1.0);
        Ok(Model {
            ids: Tensor::zeros(device, U32, &[batch, length])?,
            targets: Tensor::zeros(device, U32, &[batch * length])?,
            step: DeviceStepParams::new(device, &numbers(1))?,
            loss_scale: DeviceLossScale::new(device, &LossScaleState::constant(4.0), 3)?,
            outcomes: StepMetricsLog::new(device, 3)?,
            table: random(device, BF16, &[n], 1)?,
            master: random(device, F32, &[n], 1)?,
            moments: [zeros(&[n])?, zeros(&[n])?],
            dtable: zeros(&[classes, inner])?,
            gain: random(device, BF16, &[inner], 2)?,
            bias: random(device, BF16, &[3 * inner], 3)?,
            projection: random(device, BF16, &[3 * inner * inner], 4)?,
            dprojection: Tensor::zeros(device, BF16, &[3 * inner, inner])?,
            rows: ones(3 * inner)?,
            columns: ones(inner)?,
            mean: zeros(&[3 * inner * inner])?,
        })
    }

    /// The inputs of a step, in place.
    pub fn feed(&mut self, step: u64) -> Result<()> {
        let [batch, length, classes, ..] = SIZES;
        let ids = |factor: u64| -> Vec<u32> {
            let n = (batch * length) as u64;
            (0..n).map(|i| ((factor * i * i + 3 * i + step) % classes as u64) as u32).collect()
        };
        self.ids.write_slice(&ids(5))?;
        self.targets.write_slice(&ids(7))?;
        self.step.set(&numbers(step + 1))
    }

    /// Forward, backward and both optimizers; the loss, activations, a bias's gradient, and fresh noise.
    pub fn work(&mut self, step: u64) -> Result<Vec<Tensor>> {
        let [batch, length, classes, heads, width] = SIZES;
        let (inner, tokens) = (heads * width, batch * length);
        let device = &self.table.device().clone();
        let key = |site: &str| RandomKey::new(11, step, site);
        let table = self.table.reshape(&[classes, inner])?;
        let x = embedding(&table, &self.ids)?;
        let (h, mean, rstd) = layer_norm(&x, &self.gain, None, 1e-5)?;
        let whole = ShardSpec::unsharded(&[batch, length, inner]);
        let h = dropout(&h, 0.25, &key("dropout"), &whole)?;
        let weight = self.projection.reshape(&[3 * inner, inner])?;
        let (packed, gelu) = linear_gelu(&h, &weight, Some(&self.bias))?;
        let by_head = packed.reshape(&[batch, length, 3 * heads, width])?;
        let positions = RotaryTable::new(device, BF16, 0..length, width, 1e4)?;
        let turned = rotary(&by_head, &positions, 2 * heads, Direction::Forward)?;
        let (q, k, v) = split_packed(&turned.reshape(&[batch, length, 3 * inner])?, heads, heads)?;
        let weights = ShardSpec::unsharded(&[batch, heads, length, length]);
        let mut scores = AttentionConfig::causal(width);
        scores.dropout = Some(AttentionDropout::new(0.2, key("attention"), weights)?);
        let (out, lse) = attention(&q, &k, &v, &scores)?;
        let y = out.reshape(&[tokens, inner])?;
        let y = y.add(&softmax(&y, -1)?)?;
        let logits = matmul(&y, &table.transpose(0, 1)?)?;
        let config = CrossEntropyConfig::default();
        let CrossEntropy { loss, lse: of_rows, .. } =
            cross_entropy(&logits, &self.targets, &config)?;
        let scale = Tensor::full(device, F32, &[], 1.0 / tokens as f64)?;
        let dlogits = cross_entropy_backward(logits, &self.targets, &of_rows, &config, &scale)?;
        let dout = matmul(&dlogits, &table)?.reshape(&[batch, length, heads, width])?;
        let turned = attention_backward_packed(&dout, (&q, &k, &v), (&out, &lse), &scores)?
            .reshape(by_head.dims())?;
        let dpacked = rotary(&turned, &positions, 2 * heads, Direction::Backward)?.reshape(&[
            batch,
            length,
            3 * inner,
        ])?;
        let place = &mut self.dprojection;
        let dbias = linear_parameter_gradients(place, Accum::Replace, &dpacked, &h)?;
        let mut dh = Tensor::empty(device, BF16, &[batch, length, inner])?;
        linear_input_gradient(&mut dh, Accum::Replace, &dpacked, &weight)?;
        let dh = dropout(&dh, 0.25, &key("dropout"), &whole)?;
        let (dx, ..) = layer_norm_backward(&dh, &x, &mean, &rstd, &self.gain, None)?;
        self.dtable.zero_fill()?;
        embedding_backward(&dx, &self.ids, &mut self.dtable)?;
        drop((table, weight));
        self.judge(&loss)?;
        self.adamw()?;
        self.adafactor()?;
        let noise = normal(device, F32, &ShardSpec::unsharded(&[5]), &key("noise"), 0.0, 1.0)?;
        Ok([loss, y, noise].into_iter().chain(gelu).chain(dbias).collect())
    }

    /// Clips the gradients, without the host's looking at them.
    fn judge(&mut self, loss: &Tensor) -> Result<()> {
        let loss = loss.cast(F64)?;
        let mut sq_norm = Tensor::zeros(self.dtable.device(), F64, &[1])?;
        add_sq_norm(&mut sq_norm, &self.dtable.reshape(&[self.dtable.numel()])?)?;
        let tokens = self.targets.numel() as f64;
        let rule = LossScaleRule { window: 2, hysteresis: 1, minimum: 1.0 };
        let overflow = OverflowPolicy::SkipStep(rule);
        let config = CheckStepConfig { tokens, max_norm: 0.01, overflow };
        let sums = StepSums { loss: &loss, sq_norm: &sq_norm, others: None };
        check_step(&mut self.step, &mut self.loss_scale, &mut self.outcomes, &config, &sums)
    }

    fn adamw(&mut self) -> Result<()> {
        let grads = self.dtable.reshape(&[self.dtable.numel()])?;
        let [m, v] = &mut self.moments;
        let copy = Some(Rounded::nearest(&mut self.table));
        adamw(&AdamW::default(), &self.step, &mut self.master, &grads, m, v, copy)
    }

    fn adafactor(&mut self) -> Result<()> {
        let device = &self.table.device().clone();
        let shape = MatrixBatch::from_dims(self.dprojection.dims());
        let place = ShardSpec::unsharded(self.dprojection.dims());
        let grads = self.dprojection.reshape(&[shape.numel()])?;
        let sums = |n| Tensor::zeros(device, F64, &[n]);
        let (mut rows, mut columns) = (sums(shape.rows)?, sums(shape.columns)?);
        square_sums(&shape, &grads, &mut rows, &mut columns)?;
        let decay = SecondMomentDecay { rate: 0.8, eps1: 1e-3 };
        update_means(&decay, &self.step, &mut self.rows, &rows, shape.columns)?;
        update_means(&decay, &self.step, &mut self.columns, &columns, shape.rows)?;
        let factors = matrix_factors(&shape, &self.rows, &self.columns, NormalizeBy::Rows)?;
        let mut exact = Tensor::empty(device, F32, &[shape.numel()])?;
        widen(&mut exact, &self.projection)?;
        let mut of_weights = sums(1)?;
        add_sq_norm(&mut of_weights, &exact)?;
        let update = update_sq_norm(&self.step, &grads, &factors)?;
        let sums = SquareSums { weights: Some(of_weights), update, numel: shape.numel() };
        let config = Adafactor { eps2: 1e-3, clip_threshold: 0.1, beta1: 0.9, weight_decay: 0.1 };
        let mean = Some(&mut self.mean);
        // The host does not know the step while it captures: that in memory counts.
        let key = &RandomKey::new(11, 1_000_000, "projection");
        let stochastic = Some(Stochastic { key, place: &place, step: Some(&self.step) });
        let copy = Some(Rounded { target: &mut self.projection, stochastic });
        adafactor(&config, &self.step, &mut exact, &grads, (&factors, &sums), mean, copy)
    }

    pub fn state(&self) -> Vec<&Tensor> {
        let Model { table, master, moments: [m, v], dtable, .. } = self;
        let Model { projection, dprojection, rows, columns, mean, .. } = self;
        vec![table, master, m, v, dtable, projection, dprojection, rows, columns, mean]
    }
}
