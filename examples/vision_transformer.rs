//! A vision transformer (Dosovitskiy et al., arXiv 2010.11929) that learns to tell gratings apart, trained on one rank
//! and on four: two pipeline stages x two data-parallel ranks. The losses are the same.
//!
//! Shapes are trailing comments: batch B, patches T, width C, classes V.
//!
//! `cargo run --release --example vision_transformer`

use ferrotron::autograd::ops::attention::packed_attention;
use ferrotron::models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron::models::data::{Batch, FiniteSamples, Samples};
use ferrotron::models::stop::StopFlag;
use ferrotron::models::trainer::*;
use ferrotron::nn::schedule::LrSchedule;
use ferrotron::parallel::collective::{WorldConfig, run_threads};
use ferrotron::parallel::mesh::{Mesh, ParallelDims};
use ferrotron::parallel::tensor_parallel::SequenceParallel;
use ferrotron::prelude::*;
use ferrotron::tensor::ops::attention::AttentionConfig as Scores;
use ferrotron::tensor::ops::cross_entropy::CrossEntropyConfig;
use ferrotron::tensor::ops::reduce::KeepDims;
use serde::{Deserialize, Serialize};

const SIDE: usize = 16;
const PATCH: usize = 4;
const PATCHES: usize = (SIDE / PATCH) * (SIDE / PATCH);
const CLASSES: usize = 8;
const BATCH: usize = 32;
const INIT: Init = Init::Normal { std: 0.1 };

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct VitConfig {
    width: usize,
    heads: usize,
    layers: usize,
}

#[derive(Module)]
struct Block {
    norm_1: LayerNorm,
    qkv: Linear,
    proj: Linear,
    norm_2: LayerNorm,
    mlp: Mlp,
    heads: usize,
}

impl Block {
    fn new(scope: &Scope, config: &VitConfig) -> Result<Block> {
        let c = config.width;
        let linear =
            |name: &str, outputs| Linear::new(&scope.child(name), c, outputs, Bias::Yes, INIT);
        let mlp = MlpConfig {
            hidden: c,
            ffn_hidden: 4 * c,
            activation: Activation::GeluErf,
            bias: Bias::Yes,
            init: INIT,
            residual_init: INIT,
        };
        Ok(Block {
            norm_1: LayerNorm::new(&scope.child("norm_1"), c, Bias::Yes, 1e-5),
            qkv: linear("qkv", 3 * c)?,
            proj: linear("proj", c)?,
            norm_2: LayerNorm::new(&scope.child("norm_2"), c, Bias::Yes, 1e-5),
            mlp: Mlp::new(&scope.child("mlp"), &mlp)?,
            heads: config.heads,
        })
    }

    fn forward(&self, x: &Var) -> Result<Var> {
        let qkv = self.qkv.forward(&self.norm_1.forward(x)?)?; // (B, T, 3 C)
        let head = qkv.dims()[2] / 3 / self.heads;
        let scores = Scores::bidirectional(head);
        let mixed = packed_attention(&qkv, self.heads, self.heads, &scores)?; // (B, T, C)
        let x = x.add(&self.proj.forward(&mixed)?)?; // (B, T, C)
        x.add(&self.mlp.forward(&self.norm_2.forward(&x)?)?) // (B, T, C)
    }
}

/// A chunk of the model: the first one has the patch embedding, the last one the head.
#[derive(Module)]
struct Vit {
    patches: Option<Linear>,
    positions: Option<Param>,
    blocks: Vec<Block>,
    norm: Option<LayerNorm>,
    head: Option<Linear>,
    width: usize,
}

impl Model for Vit {
    const ARCHITECTURE: &str = "vit";
    type Config = VitConfig;

    fn new_chunk(scope: &Scope, _: &Mesh, config: &VitConfig, chunk: &ModelChunk) -> Result<Vit> {
        let c = config.width;
        let linear = |name: &str, inputs, outputs| {
            Linear::new(&scope.child(name), inputs, outputs, Bias::Yes, INIT)
        };
        let block = |i: usize| Block::new(&scope.child(&format!("blocks.{i}")), config);
        let norm = || LayerNorm::new(&scope.child("norm"), c, Bias::Yes, 1e-5);
        Ok(Vit {
            patches: chunk.first.then(|| linear("patches", PATCH * PATCH, c)).transpose()?,
            positions: chunk
                .first
                .then(|| scope.param("positions", &[PATCHES, c], INIT, WeightDecay::Off)),
            blocks: chunk.blocks.clone().map(block).collect::<Result<_>>()?,
            norm: chunk.last.then(norm),
            head: chunk.last.then(|| linear("head", c, CLASSES)).transpose()?,
            width: c,
        })
    }

    fn num_blocks(config: &VitConfig) -> usize {
        config.layers
    }

    fn activation_dims(&self, microbatch: &Microbatch) -> Vec<usize> {
        vec![microbatch.samples(), PATCHES, self.width]
    }

    fn loss_terms(_: &VitConfig, batch: &Batch) -> Result<Vec<LossTerm>> {
        Ok(vec![LossTerm::mean("cross_entropy", batch.micro_batch as f64)])
    }

    fn forward(&self, microbatch: &Microbatch, input: Option<Var>) -> Result<StageOutput> {
        let mut x = match (input, &self.patches, &self.positions) {
            (None, Some(patches), Some(positions)) => {
                let pixels = Var::constant(microbatch.get("pixels")?.clone()); // (B, T, P P)
                patches.forward(&pixels)?.add(&positions.leaf().var()?)? // (B, T, C)
            }
            (input, ..) => input.expect("a later chunk has an input"),
        };
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        let (Some(norm), Some(head)) = (&self.norm, &self.head) else {
            return Ok(StageOutput::activation(x));
        };
        let pooled = norm.forward(&x)?.mean(&[1], KeepDims::Drop)?; // (B, C)
        let labels = microbatch.get("labels")?; // (B)
        let loss = head.forward(&pooled)?.cross_entropy(labels, &CrossEntropyConfig::default())?;
        Ok(StageOutput::loss("cross_entropy", loss.sum))
    }
}

/// Gratings in noise: the class is the direction of the waves.
struct Gratings(u64);

impl Samples for Gratings {
    fn batch(&self, first_sample: u64, samples: usize) -> Result<Batch> {
        let (mut pixels, mut labels) = (Vec::new(), Vec::new());
        for sample in first_sample..first_sample + samples as u64 {
            let key = RandomKey::new(3, sample, "gratings");
            let class = (key.uniform(0) * CLASSES as f64) as usize;
            let angle = std::f64::consts::PI * class as f64 / CLASSES as f64;
            let (dx, dy, phase) = (angle.cos(), angle.sin(), 6.3 * key.uniform(1));
            for i in 0..SIDE * SIDE {
                let (patch, inner) = (i / (PATCH * PATCH), i % (PATCH * PATCH));
                let x = patch % (SIDE / PATCH) * PATCH + inner % PATCH;
                let y = patch / (SIDE / PATCH) * PATCH + inner / PATCH;
                let wave = (x as f64 * dx + y as f64 * dy + phase).sin();
                pixels.push((wave + key.uniform(2 + i as u64) - 0.5) as f32);
            }
            labels.push(class as i64);
        }
        Batch::new(first_sample, samples, PATCHES)
            .with("pixels", pixels, &[samples, PATCHES, PATCH * PATCH])?
            .with("labels", labels, &[samples])
    }

    fn seq_length(&self) -> usize {
        PATCHES
    }
}

impl FiniteSamples for Gratings {
    fn len(&self) -> u64 {
        self.0
    }
}

fn train(mesh: &Mesh, steps: usize) -> Result<Vec<f64>> {
    let sizes = BatchSize::new(BatchSizeConfig {
        micro_batch_size: 8,
        data_parallel_size: mesh.axis(ferrotron::nn::Axis::Data).size(),
        global_batch_size: Some(BATCH),
        ..BatchSizeConfig::default()
    })?;
    let options = TrainerConfig::new(1, LrSchedule::constant(1e-3)?, sizes);
    let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1);
    let config = VitConfig { width: 32, heads: 4, layers: 2 };
    let mut trainer = Trainer::<Vit>::on_mesh(&scope, mesh, &config, options)?;
    let mut losses = Vec::new();
    for _ in 0..steps {
        losses.push(trainer.step(&Gratings(0))?.loss);
    }
    let unseen = trainer.evaluate(&Gratings(256), &StopFlag::default())?;
    losses.extend(unseen.map(|found| found.loss));
    Ok(losses)
}

fn main() -> Result<()> {
    let one = train(&Mesh::single(), 150)?;
    let four = run_threads(4, &WorldConfig::default(), |world| {
        let layout = ParallelDims::new(4, 1, 1, 2)?; // tp 1, cp 1, pp 2, and what remains is dp 2
        train(&Mesh::new(&world, layout, SequenceParallel::Off)?, 150)
    });
    println!("step  one rank  pp 2 x dp 2");
    let four = four.into_iter().collect::<Result<Vec<_>>>()?;
    for step in (0..150).step_by(30) {
        println!("{:4}  {:.6}  {:.6}", step + 1, one[step], four[0][step]);
        assert!((one[step] - four[0][step]).abs() < 2e-3 * one[step], "step {}", step + 1);
    }
    println!("loss on 256 other samples: {:.4}", one[150]);
    assert!(one[150] < 0.3, "the model does not learn");
    Ok(())
}
