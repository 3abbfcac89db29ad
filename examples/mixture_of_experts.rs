//! A mixture-of-experts language model: Mixtral's blocks (Jiang et al., arXiv 2401.04088). It trains on one rank and on
//! several, data parallel with ZeRO 1 and as a pipeline. The losses are the same.
//!
//! Every rank holds all experts: expert parallelism is out of scope. So is context parallelism, because a rank needs whole
//! sequences for the balancing loss.
//!
//! **Routing.** Each token takes the two experts of the largest router probability. Their outputs are weighted with these
//! probabilities, normalised to sum 1, which is Mixtral's softmax over the two largest logits. Switch Transformers (Fedus
//! et al., arXiv 2101.03961, section 2.4) compute the router's softmax in f32 for 16-bit models; so does this one.
//!
//! **Balancing.** For each sequence and layer the loss is E sum_e f_e P_e, where f_e is the share of the sequence's routes
//! that expert e gets, and P_e the mean of its router probability over the sequence: 1 if both are uniform. Switch
//! Transformers and GShard take both means over a batch. A product of two means over a micro-batch depends on how samples
//! meet in micro-batches, and so on the layout. The means over a sequence do not; they are DeepSeek-V2's and V3's (arXiv
//! 2405.04434, equations 23 to 25; 2412.19437, equations 17 to 20).
//!
//! **Experts without tokens.** No token of a micro-batch may choose an expert, or none of a whole batch. `Unused::Skip`
//! leaves the weights and moments of an expert alone in the second case, and adds nothing in the first.
//!
//! Shapes are trailing comments: batch B, positions T, width C, experts E, tokens of one expert N.
//!
//! `cargo run --release --example mixture_of_experts`

use ferrotron::models::batch_size::BatchSize;
use ferrotron::models::data::{Batch, Sampler, Split, TokenSource, Validation, num_valid};
use ferrotron::models::stop::StopFlag;
use ferrotron::models::trainer::*;
use ferrotron::nn::schedule::LrSchedule;
use ferrotron::nn::{Axis, Sharding, Unused};
use ferrotron::parallel::mesh::{Mesh, ParallelDims};
use ferrotron::prelude::*;
use ferrotron::tensor::ops::reduce::KeepDims;
use serde::{Deserialize, Serialize};

const VOCAB: usize = 256;
const LENGTH: usize = 32;
const TOP: usize = 2;
const BATCH: usize = 16;
const STEPS: usize = 100;
const INIT: Init = Init::Normal { std: 0.02 };

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct MoeConfig {
    width: usize,
    heads: usize,
    layers: usize,
    experts: usize,
    balance: f64,
}

#[derive(Module)]
struct Experts {
    router: Linear,
    experts: Vec<Mlp>,
}

impl Experts {
    fn new(scope: &Scope, config: &MoeConfig) -> Result<Experts> {
        let (c, experts) = (config.width, config.experts);
        let mlp = MlpConfig {
            activation: Activation::SwiGlu,
            bias: Bias::No,
            ..MlpConfig::new(c, 2 * c)
        };
        let expert = |e: usize| Mlp::new(&scope.child(&format!("experts.{e}")), &mlp);
        Ok(Experts {
            router: Linear::new(&scope.child("router"), c, experts, Bias::No, INIT)?,
            experts: (0..experts).map(expert).collect::<Result<_>>()?,
        })
    }

    /// (B, T, C) -> (B, T, C), and the balancing loss of each sequence (B).
    fn forward(&self, x: &Var) -> Result<(Var, Var)> {
        let logits = self.router.forward(x)?;
        let probabilities = logits.cast(x.dtype().accumulator())?.softmax(-1)?; // (B, T, E)
        let (gates, chosen) = probabilities.topk(TOP, -1)?; // (B, T, 2)
        let gates = (&gates / gates.sum(&[-1], KeepDims::Keep)?)?.cast(x.dtype())?; // (B, T, 2)
        let routes = chosen.one_hot(self.experts.len())?.cast(probabilities.dtype())?; // (B, T, 2, E)
        let shares = Var::from(routes.mean(&[1, 2], KeepDims::Drop)?); // (B, E)
        let balance =
            (shares * probabilities.mean(&[1], KeepDims::Drop)?)?.sum(&[1], KeepDims::Drop)?;
        let (tokens, gates) = (x.flatten(0, 1)?, gates.flatten(0, 2)?); // (B T, C), (B T 2)
        let chosen = chosen.to_vec::<i64>()?;
        let mut y = tokens.zeros_like()?;
        for (e, expert) in self.experts.iter().enumerate() {
            let slots = (0..chosen.len()).filter(|&slot| chosen[slot] == e as i64);
            let slots: Vec<i64> = slots.map(|slot| slot as i64).collect();
            if slots.is_empty() {
                continue;
            }
            let rows: Vec<i64> = slots.iter().map(|slot| slot / TOP as i64).collect();
            let slots = Tensor::from_slice(x.device(), &slots, &[slots.len()])?; // (N)
            let rows = Tensor::from_slice(x.device(), &rows, &[rows.len()])?; // (N)
            let output = expert.forward(&tokens.index_select(0, &rows)?)?; // (N, C)
            let gate = gates.index_select(0, &slots)?.unsqueeze(-1)?; // (N, 1)
            y = y.index_add(0, &rows, &(output * gate)?)?;
        }
        Ok((y.reshape(x.dims())?, (balance * self.experts.len() as f64)?))
    }
}

#[derive(Module)]
struct Block {
    norm_1: RmsNorm,
    attn: Attention,
    norm_2: RmsNorm,
    experts: Experts,
}

impl Block {
    fn new(scope: &Scope, config: &MoeConfig) -> Result<Block> {
        let c = config.width;
        let rotary_base = Some(10_000.0);
        let attn = AttentionConfig {
            bias: Bias::No,
            rotary_base,
            ..AttentionConfig::new(c, config.heads)
        };
        Ok(Block {
            norm_1: RmsNorm::new(&scope.child("norm_1"), c, 1e-5),
            attn: Attention::new(&scope.child("attn"), &attn)?,
            norm_2: RmsNorm::new(&scope.child("norm_2"), c, 1e-5),
            experts: Experts::new(scope, config)?,
        })
    }

    fn forward(&self, ctx: &Context, x: &Var) -> Result<(Var, Var)> {
        let x = (x + self.attn.forward(ctx, &self.norm_1.forward(x)?, None)?)?; // (B, T, C)
        let (y, balance) = self.experts.forward(&self.norm_2.forward(&x)?)?;
        Ok(((x + y)?, balance))
    }
}

#[derive(Module)]
struct MoeLm {
    embedding: Option<Embedding>,
    blocks: Vec<Block>,
    head: Option<(RmsNorm, Linear)>,
    width: usize,
}

impl Model for MoeLm {
    const ARCHITECTURE: &str = "moe";
    type Config = MoeConfig;

    fn new_chunk(scope: &Scope, _: &Mesh, config: &MoeConfig, chunk: &ModelChunk) -> Result<MoeLm> {
        let c = config.width;
        let norm = || RmsNorm::new(&scope.child("norm"), c, 1e-5);
        let head = || Linear::new(&scope.child("head"), c, VOCAB, Bias::No, INIT);
        let embedding = || Embedding::new(&scope.child("embedding"), VOCAB, c, INIT);
        Ok(MoeLm {
            embedding: chunk.make_if_first(embedding)?,
            blocks: chunk.make_blocks(scope, |scope| Block::new(scope, config))?,
            head: chunk.make_if_last(|| Ok((norm(), head()?)))?,
            width: c,
        })
    }

    fn num_blocks(config: &MoeConfig) -> usize {
        config.layers
    }

    fn activation_dims(&self, microbatch: &Microbatch) -> Vec<usize> {
        vec![microbatch.samples(), LENGTH, self.width]
    }

    fn loss_terms(config: &MoeConfig, batch: &Batch) -> Result<Vec<LossTerm>> {
        let targets = batch.get("targets")?;
        let sequences = targets.chunks(LENGTH).filter(|row| num_valid(row) > 0).count();
        let routers = (sequences * config.layers) as f64;
        let balance = LossTerm::mean("balance", routers).weighted(config.balance);
        Ok(vec![LossTerm::mean("cross_entropy", num_valid(targets) as f64), balance])
    }

    fn forward(&self, microbatch: &Microbatch, input: Option<Var>) -> Result<StageOutput> {
        let mut x = match &self.embedding {
            Some(embedding) => embedding.forward(microbatch.get("inputs")?)?, // (B, T, C)
            None => input.expect("a later chunk has an input"),
        };
        // An evaluation fills its last batch with rows without targets, which do not count.
        let first = microbatch.get("targets")?.select(1, 0)?.cast(x.dtype().accumulator())?; // (B)
        let counts = Var::from(first.ge(&first.zeros_like()?)?.cast(first.dtype())?); // (B)
        let mut losses = Vec::new();
        for block in &self.blocks {
            let (y, balance) = block.forward(microbatch.ctx(), &x)?;
            losses.push(("balance", (balance * &counts)?.sum_all()?));
            x = y;
        }
        let Some((norm, head)) = &self.head else {
            return Ok(StageOutput { activation: Some(x), losses });
        };
        let logits = head.forward(&norm.forward(&x)?)?; // (B, T, V)
        let loss = logits.cross_entropy(microbatch.get("targets")?, &Default::default())?;
        losses.push(("cross_entropy", loss.sum));
        Ok(StageOutput { activation: None, losses })
    }
}

/// The cross-entropy and the balancing loss of each step and, last, of the unseen text.
fn train(mesh: &Mesh, micro_batch: usize) -> Result<Vec<[f64; 2]>> {
    let bytes = include_bytes!("../README.md").iter().map(|&byte| u32::from(byte)).collect();
    let text = TokenSource::from_tokens(bytes, VOCAB)?;
    let (text, unseen) = text.split(Split::valid_fraction(0.1)?)?;
    let sizes = BatchSize::constant(micro_batch, mesh.axis(Axis::Data).size(), BATCH)?;
    let mut options = TrainerConfig::new(1, LrSchedule::constant(3e-3)?, sizes);
    options.parallel.data_parallel.sharding = Sharding::Optimizer;
    options.parallel.data_parallel.unused = Unused::Skip;
    let scope = Scope::new(&Device::cpu(1)?, DType::F64, 1);
    let config = MoeConfig { width: 32, heads: 4, layers: 2, experts: 8, balance: 0.01 };
    let mut trainer = Trainer::<MoeLm>::on_mesh(&scope, mesh, &config, options)?;
    let sampler = Sampler::new(text, LENGTH, 1)?;
    let losses = (0..STEPS).map(|_| Ok(trainer.step(&sampler)?.losses));
    let mut losses = losses.collect::<Result<Vec<_>>>()?;
    let unseen = trainer.evaluate(&Validation::new(unseen, LENGTH)?, &StopFlag::default())?;
    losses.extend(unseen.map(|found| found.losses));
    Ok(losses.iter().map(|terms| [terms[0].1, terms[1].1]).collect())
}

fn main() -> Result<()> {
    let one = train(&Mesh::single(), BATCH)?;
    for step in (0..STEPS).step_by(20) {
        println!("{:4}  {:.6}  {:.6}", step + 1, one[step][0], one[step][1]);
    }
    println!("cross-entropy of the unseen text: {:.4}", one[STEPS][0]);
    assert!(one[STEPS][0] < 3.2, "the model does not learn");
    for (name, ranks, stages) in [("dp 2", 2, 1), ("pp 2", 2, 2), ("dp 2 x pp 2", 4, 2)] {
        let layout = ParallelDims::new(ranks, 1, 1, stages)?;
        let ranks = Mesh::run_threads(layout, |mesh| train(mesh, 2))?;
        let pairs = one.iter().flatten().zip(ranks[0].iter().flatten());
        let gap = pairs.map(|(one, other)| (one - other).abs() / one).fold(0.0, f64::max);
        println!("{name}: every loss is that of one rank to {gap:.1e}");
        assert!(gap < 1e-12, "{name}");
    }
    Ok(())
}
