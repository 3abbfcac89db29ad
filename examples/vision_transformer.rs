//! A vision transformer (Dosovitskiy et al., arXiv 2010.11929) that learns to tell gratings apart. It trains on one
//! rank and on four: two pipeline stages x two data-parallel ranks. The losses are the same, in f64 to 1e-10.
//!
//! Shapes are trailing comments: batch B, patches T, width C, classes V.
//!
//! `cargo run --release --example vision_transformer`

use ferrotron::models::batch_size::BatchSize;
use ferrotron::models::data::{Batch, GeneratedSamples};
use ferrotron::models::stop::StopFlag;
use ferrotron::models::trainer::*;
use ferrotron::nn::schedule::LrSchedule;
use ferrotron::nn::{AttentionMask, Axis};
use ferrotron::parallel::mesh::{Mesh, ParallelDims};
use ferrotron::prelude::*;
use serde::{Deserialize, Serialize};
use std::f64::consts::PI;

const PATCH: usize = 4;
const GRID: usize = 4; // patches along each side of an image
const PATCHES: usize = GRID * GRID;
const CLASSES: usize = 8;
const INIT: Init = Init::Normal { std: 0.02 };

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct VitConfig {
    width: usize,
    heads: usize,
    layers: usize,
}

#[derive(Module)]
struct Block {
    norm_1: LayerNorm,
    attn: Attention,
    norm_2: LayerNorm,
    mlp: Mlp,
}

impl Block {
    fn new(scope: &Scope, config: &VitConfig) -> Result<Block> {
        let c = config.width;
        let attn =
            AttentionConfig { mask: AttentionMask::None, ..AttentionConfig::new(c, config.heads) };
        Ok(Block {
            norm_1: LayerNorm::new(&scope.child("norm_1"), c, Bias::Yes, 1e-5),
            attn: Attention::new(&scope.child("attn"), &attn)?,
            norm_2: LayerNorm::new(&scope.child("norm_2"), c, Bias::Yes, 1e-5),
            mlp: Mlp::new(&scope.child("mlp"), &MlpConfig::new(c, 4 * c))?,
        })
    }

    fn forward(&self, ctx: &Context, x: &Var) -> Result<Var> {
        let x = (x + self.attn.forward(ctx, &self.norm_1.forward(x)?, None)?)?; // (B, T, C)
        &x + self.mlp.forward(&self.norm_2.forward(&x)?)? // (B, T, C)
    }
}

/// A chunk of the model: the first one has the patch embedding, the last one the head.
#[derive(Module)]
struct Vit {
    embedding: Option<(Linear, Param)>,
    blocks: Vec<Block>,
    head: Option<(LayerNorm, Linear)>,
    width: usize,
}

impl Model for Vit {
    const ARCHITECTURE: &str = "vit";
    type Config = VitConfig;

    fn new_chunk(scope: &Scope, _: &Mesh, config: &VitConfig, chunk: &ModelChunk) -> Result<Vit> {
        let c = config.width;
        let patches = || Linear::new(&scope.child("patches"), PATCH * PATCH, c, Bias::Yes, INIT);
        let positions = || scope.param("positions", &[PATCHES, c], INIT, WeightDecay::Off);
        let norm = || LayerNorm::new(&scope.child("norm"), c, Bias::Yes, 1e-5);
        let head = || Linear::new(&scope.child("head"), c, CLASSES, Bias::Yes, INIT);
        Ok(Vit {
            embedding: chunk.make_if_first(|| Ok((patches()?, positions())))?,
            blocks: chunk.make_blocks(scope, |scope| Block::new(scope, config))?,
            head: chunk.make_if_last(|| Ok((norm(), head()?)))?,
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
        let pixels = Var::from(microbatch.get_as("pixels", DType::F64)?); // (B, T, P P)
        let x = match &self.embedding {
            Some((patches, positions)) => (patches.forward(&pixels)? + positions.var()?)?, // (B, T, C)
            None => input.expect("a later chunk has an input"),
        };
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward(microbatch.ctx(), &x))?;
        let Some((norm, head)) = &self.head else { return Ok(StageOutput::activation(x)) };
        let logits = head.forward(&norm.forward(&x)?.mean(&[1], KeepDims::Drop)?)?; // (B, V)
        let loss = logits.cross_entropy(microbatch.get("labels")?, &Default::default())?;
        Ok(StageOutput::loss("cross_entropy", loss.sum))
    }
}

/// Gratings in noise: the class is the direction of the waves.
fn gratings(seed: u64, first_sample: u64, samples: usize) -> Result<Batch> {
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    for sample in first_sample..first_sample + samples as u64 {
        let key = RandomKey::new(seed, sample, "gratings");
        let class = (key.uniform(0) * CLASSES as f64) as i64;
        let (dy, dx) = (PI * class as f64 / CLASSES as f64).sin_cos();
        for i in 0..PATCHES * PATCH * PATCH {
            let (patch, inner) = (i / (PATCH * PATCH), i % (PATCH * PATCH));
            let x = patch % GRID * PATCH + inner % PATCH;
            let y = patch / GRID * PATCH + inner / PATCH;
            let wave = (x as f64 * dx + y as f64 * dy + 6.3 * key.uniform(1)).sin();
            pixels.push((wave + key.uniform(2 + i as u64) - 0.5) as f32);
        }
        labels.push(class);
    }
    Batch::new(first_sample, samples, PATCHES)
        .with("pixels", pixels, &[samples, PATCHES, PATCH * PATCH])?
        .with("labels", labels, &[samples])
}

fn train(mesh: &Mesh, steps: usize) -> Result<Vec<f64>> {
    let sizes = BatchSize::constant(8, mesh.axis(Axis::Data).size(), 32)?;
    let options = TrainerConfig::new(1, LrSchedule::constant(2e-3)?, sizes);
    let scope = Scope::new(&Device::cpu(1)?, DType::F64, 1);
    let config = VitConfig { width: 32, heads: 4, layers: 2 };
    let mut trainer = Trainer::<Vit>::on_mesh(&scope, mesh, &config, options)?;
    let samples = |seed| GeneratedSamples::new(PATCHES, 256, move |i, n| gratings(seed, i, n));
    let losses = (0..steps).map(|_| Ok(trainer.step(&samples(3))?.loss));
    let mut losses = losses.collect::<Result<Vec<_>>>()?;
    let unseen = trainer.evaluate(&samples(4), &StopFlag::default())?;
    losses.extend(unseen.map(|found| found.loss));
    Ok(losses)
}

fn main() -> Result<()> {
    let one = train(&Mesh::single(), 150)?;
    // tp 1, cp 1, pp 2, and what remains is dp 2
    let four = Mesh::run_threads(ParallelDims::new(4, 1, 1, 2)?, |mesh| train(mesh, 150))?;
    for step in (0..150).step_by(30) {
        println!("step {:3}: {:.12}, on four ranks {:.12}", step + 1, one[step], four[0][step]);
        assert!((one[step] - four[0][step]).abs() < 1e-10 * one[step], "step {}", step + 1);
    }
    println!("loss on 256 other samples: {:.4}", one[150]);
    assert!(one[150] < 0.3, "the model does not learn");
    Ok(())
}
