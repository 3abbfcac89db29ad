//! A small language model, written with the parallel layers. It trains on one rank, and on four: tensor parallel with
//! sequence parallelism x data parallel. The losses are the same.
//!
//! Shapes are trailing comments: batch B, positions T, width C, vocabulary V. Where layers are cut along the
//! sequence, T of the residual stream is this rank's share.
//!
//! `cargo run --release --example parallel_model`

use ferrotron::autograd::ops::cross_entropy::Loss;
use ferrotron::nn::Axis;
use ferrotron::parallel::collective::{WorldConfig, run_threads};
use ferrotron::parallel::data_parallel::{DataParallel, DataParallelConfig};
use ferrotron::parallel::mesh::{Mesh, ParallelDims};
use ferrotron::parallel::tensor_parallel::{
    ParallelAttention, ParallelMlp, SequenceParallel, TensorParallel, VocabParallelEmbedding,
};
use ferrotron::prelude::*;
use ferrotron::tensor::ops::cross_entropy::CrossEntropyConfig;

const BATCH: usize = 8;
const LENGTH: usize = 16;
const VOCAB: usize = 17;
const WIDTH: usize = 32;
const INIT: Init = Init::Normal { std: 0.1 };
const ATTENTION: AttentionConfig = AttentionConfig {
    groups: 2,
    bias: Bias::No,
    rotary_base: Some(10_000.0),
    dropout: 0.1,
    init: INIT,
    residual_init: INIT,
    ..AttentionConfig::new(WIDTH, 4)
};
const MLP: MlpConfig = MlpConfig {
    hidden: WIDTH,
    ffn_hidden: 3 * WIDTH,
    activation: Activation::SwiGlu,
    bias: Bias::No,
    init: INIT,
    residual_init: INIT,
};

// The model. Nothing in it depends on how many ranks there are.

#[derive(Module)]
struct Block {
    norm_1: RmsNorm,
    attn: ParallelAttention,
    norm_2: RmsNorm,
    mlp: ParallelMlp,
}

impl Block {
    fn new(scope: &Scope, mesh: &Mesh) -> Result<Block> {
        let (tp, cp) = (mesh.tensor_parallel(), mesh.context_parallel());
        Ok(Block {
            norm_1: RmsNorm::new(&scope.child("norm_1"), WIDTH, 1e-5),
            attn: ParallelAttention::new(&scope.child("attn"), &tp, &cp, &ATTENTION)?,
            norm_2: RmsNorm::new(&scope.child("norm_2"), WIDTH, 1e-5),
            mlp: ParallelMlp::new(&scope.child("mlp"), &tp, &MLP)?,
        })
    }

    fn forward(&self, ctx: &Context, x: &Var) -> Result<Var> {
        let x = x.add(&self.attn.forward(ctx, &self.norm_1.forward(x)?, None)?)?; // (B, T, C)
        x.add(&self.mlp.forward(&self.norm_2.forward(&x)?)?) // (B, T, C)
    }
}

#[derive(Module)]
struct LanguageModel {
    #[module(skip)]
    tp: TensorParallel,
    wte: VocabParallelEmbedding,
    blocks: [Block; 2],
    norm: RmsNorm,
    head: Param, // (V, C), tied: a clone of the weight of `wte`
}

impl LanguageModel {
    fn new(scope: &Scope, mesh: &Mesh) -> Result<LanguageModel> {
        let tp = mesh.tensor_parallel();
        let wte = VocabParallelEmbedding::new(&scope.child("wte"), &tp, VOCAB, WIDTH, INIT)?;
        Ok(LanguageModel {
            head: wte.weight().clone(),
            wte,
            blocks: [Block::new(&scope.child("0"), mesh)?, Block::new(&scope.child("1"), mesh)?],
            norm: RmsNorm::new(&scope.child("norm"), WIDTH, 1e-5),
            tp,
        })
    }

    fn loss(&self, ctx: &Context, tokens: &Tensor, targets: &Tensor) -> Result<Loss> {
        let x = self.wte.forward(tokens)?; // (B, T, C)
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward(ctx, &x))?; // (B, T, C)
        let (x, config) = (self.norm.forward(&x)?, CrossEntropyConfig::default());
        self.tp.linear_cross_entropy(&x, &self.head, targets, &config, 1 << 20)
    }
}

// The training loop of one rank, of however many.

/// Sample `r` counts up from r, by one if r is even and by two if it is odd.
fn tokens(samples: std::ops::Range<usize>, shift: usize) -> Vec<i64> {
    let count = |r: usize, t: usize| ((r + (t + shift) * (1 + r % 2)) % VOCAB) as i64;
    samples.flat_map(|r| (0..LENGTH).map(move |t| count(r, t))).collect()
}

fn train(mesh: &Mesh) -> Result<Vec<f64>> {
    let device = Device::cpu(1)?;
    let model = LanguageModel::new(&mesh.scope(&device, DType::F64, 1234), mesh)?;
    let parallel = DataParallel::new(&[&model], mesh, &DataParallelConfig::default())?;
    let adamw = OptimizerConfig::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };
    let mut optimizer = Optimizer::new(adamw, parallel.buffers())?;

    let data = mesh.axis(Axis::Data);
    let own = data.local_range(BATCH); // samples of the global batch
    let dims = [own.len(), LENGTH];
    let inputs = Tensor::from_slice(&device, &tokens(own.clone(), 0), &dims)?;
    let targets = Tensor::from_slice(&device, &tokens(own.clone(), 1), &dims)?;
    let scale = 1.0 / (BATCH * LENGTH) as f64; // one over the tokens of the global batch

    let mut losses = Vec::new();
    for step in 0..40 {
        let pass = Context::new(1234, step, Mode::Train, BATCH, LENGTH);
        let ctx = mesh.context(pass.micro_batch(own.start, own.len()))?;
        parallel.begin_step(1);
        let loss = model.loss(&ctx, &inputs, &targets)?;
        loss.sum.backward_scaled(scale)?;
        parallel.end_backward()?;
        parallel.finish_step()?;
        let grad_scale = clip_coefficient(parallel.grad_norm()?, 1.0);
        parallel.update(&mut optimizer, &StepConfig { lr: 1e-2, grad_scale })?;
        losses.push(data.sum(&device, loss.sum.value().item()?)? * scale);
    }
    Ok(losses)
}

fn main() -> Result<()> {
    let one = train(&Mesh::single())?;
    let four = run_threads(4, &WorldConfig::default(), |world| {
        let layout = ParallelDims::new(4, 2, 1, 1)?; // tp 2, cp 1, pp 1, and what remains is dp 2
        train(&Mesh::new(&world, layout, SequenceParallel::On)?)
    });
    let four = four.into_iter().collect::<Result<Vec<_>>>()?;

    println!("step  one rank      tp 2 x dp 2");
    for step in (0..one.len()).step_by(13) {
        println!("{:4}  {:.10}  {:.10}", step + 1, one[step], four[0][step]);
    }
    for (rank, losses) in four.iter().enumerate() {
        for (step, (got, want)) in losses.iter().zip(&one).enumerate() {
            let differ = (got - want).abs() / want;
            assert!(differ < 1e-10, "rank {rank}, step {}: got {got}, want {want}", step + 1);
        }
    }
    assert!(one[0] > 2.5 && one[39] < 1.0, "the model does not learn: {one:?}");
    Ok(())
}
