//! A small model in any number of virtual stages. It has a table that is the head too, residual blocks with norms, and
//! a loss that ignores some targets, so that micro-batches count different numbers of tokens.

use ferrotron_autograd::{Var, checkpoint};
use ferrotron_nn::{Axis, Bias, Embedding, Init, LayerNorm, Linear, Module, Param, Scope};
use ferrotron_parallel::data_parallel::DataParallel;
use ferrotron_parallel::pipeline::PipelineModel;
use ferrotron_tensor::ops::cross_entropy::CrossEntropyConfig;
use ferrotron_tensor::{DType, Device, Result, Tensor, partition_range};

pub const VOCAB: usize = 7;
pub const WIDTH: usize = 4;
pub const TOKENS: usize = 3;

/// The sizes of a toy.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub blocks: usize,
    pub width: usize,
    pub vocab: usize,
    /// Whether the table is the head too.
    pub tied: Tied,
    pub bias: Bias,
    pub dtype: DType,
    pub recompute: Recompute,
}

/// Whether blocks run forward again in backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recompute {
    None,
    Blocks,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tied {
    /// Held by both ends of the pipeline.
    Ends,
    /// A parameter like any other, on the only stage.
    Here,
    No,
}

impl Default for Shape {
    fn default() -> Shape {
        let (width, vocab) = (WIDTH, VOCAB);
        Shape {
            blocks: 8,
            width,
            vocab,
            tied: Tied::Ends,
            bias: Bias::Yes,
            dtype: DType::F64,
            recompute: Recompute::None,
        }
    }
}

/// x + gelu(norm(x) W^T + b)
#[derive(Clone, Module)]
struct Block {
    norm: LayerNorm,
    linear: Linear,
}

impl Block {
    fn forward(&self, x: &Var) -> Result<Var> {
        x.add(&self.linear.forward(&self.norm.forward(x)?)?.gelu_erf()?)
    }
}

/// The part of the model in one virtual stage.
pub struct Toy {
    shape: Shape,
    device: Device,
    table: Option<Embedding>,
    blocks: Vec<Block>,
    norm: Option<LayerNorm>,
    /// The last stage's head, a matrix of its own or the table's other copy; none where it is the table.
    head: Option<Linear>,
    /// Called in every forward and backward, before each block of the part.
    pub probe: Option<Probe>,
}

/// Receives the direction of the pass and the number of the block within the part.
pub type Probe = std::sync::Arc<dyn Fn(Way, usize) -> Result<()> + Send + Sync>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Forward,
    Backward,
}

impl Toy {
    /// Virtual stage `stage` of `stages`.
    pub fn part(device: &Device, shape: Shape, stage: usize, stages: usize) -> Result<Toy> {
        let Shape { width, vocab, bias, .. } = shape;
        let scope = Scope::new(device, shape.dtype, 17);
        let init = Init::Normal { std: 0.5 };
        let (first, last) = (stage == 0, stage == stages - 1);
        let block = |i: usize| -> Result<Block> {
            let scope = scope.child(&format!("blocks.{i}"));
            Ok(Block {
                norm: LayerNorm::new(&scope.child("norm"), width, bias, 1e-5),
                linear: Linear::new(&scope.child("linear"), width, width, bias, init)?,
            })
        };
        let ends = scope
            .clone()
            .replicated_along(Axis::Pipeline)
            .with_partial_gradients(Axis::Pipeline)
            .child("table");
        let tied = shape.tied != Tied::No;
        let table_scope =
            if shape.tied == Tied::Ends { ends.clone() } else { scope.child("table") };
        let head_scope = if tied { ends.clone() } else { scope.child("head") };
        let has_head = last && !(tied && first);
        let head = || Linear::new(&head_scope, width, vocab, Bias::No, init);
        Ok(Toy {
            shape,
            device: device.clone(),
            table: first.then(|| Embedding::new(&table_scope, vocab, width, init)).transpose()?,
            blocks: partition_range(shape.blocks, stages, stage)
                .map(block)
                .collect::<Result<_>>()?,
            norm: last.then(|| LayerNorm::new(&scope.child("norm"), width, Bias::No, 1e-5)),
            head: has_head.then(head).transpose()?,
            probe: None,
        })
    }

    /// The modules that run forward again in backward.
    pub fn recomputed(&self) -> impl Iterator<Item = &dyn Module> {
        let again = self.shape.recompute == Recompute::Blocks;
        self.blocks.iter().filter(move |_| again).map(|block| block as &dyn Module)
    }

    /// Computes the activation behind, or the summed loss, from tokens or the activation before.
    pub fn run(&self, sample: &Microbatch, input: Option<Var>) -> Result<Var> {
        let mut x = match (input, &self.table) {
            (Some(x), _) => x,
            (None, Some(table)) => table.forward(&sample.ids)?,
            (None, None) => panic!("a middle stage needs an input"),
        };
        for (i, block) in self.blocks.iter().enumerate() {
            if let Some(probe) = &self.probe {
                probe(Way::Forward, i)?;
                let (value, probe) = (x.value().clone(), probe.clone());
                x = Var::record(&[&x], value, || {
                    move |dy: Tensor, dx: &mut ferrotron_autograd::InputGrads| {
                        probe(Way::Backward, i)?;
                        dx.accumulate(0, dy)
                    }
                })?;
            }
            x = match self.shape.recompute {
                Recompute::None => block.forward(&x)?,
                Recompute::Blocks => {
                    let block = block.clone();
                    checkpoint(&[&x], move |x| Ok(vec![block.forward(&x[0])?]))?.remove(0)
                }
            };
        }
        let Some(norm) = &self.norm else { return Ok(x) };
        let x = norm.forward(&x)?;
        let logits = match (&self.head, &self.table) {
            (Some(head), _) => head.forward(&x)?,
            (None, Some(table)) => x.linear(&table.weight().var()?, None)?,
            _ => panic!("the last stage has a head"),
        };
        Ok(logits.cross_entropy(&sample.targets, &CrossEntropyConfig::default())?.sum)
    }
}

impl Module for Toy {
    fn visit(&self, f: &mut dyn FnMut(&Param)) {
        self.table.iter().for_each(|table| table.visit(f));
        self.blocks.iter().for_each(|block| block.visit(f));
        self.norm.iter().for_each(|norm| norm.visit(f));
        self.head.iter().for_each(|head| head.visit(f));
        if let (Some(table), Some(_), None) = (&self.table, &self.norm, &self.head) {
            table.visit(f); // the table is the head too
        }
    }
}

/// One sample: tokens and what should follow each.
#[derive(Clone)]
pub struct Microbatch {
    pub ids: Tensor,
    pub targets: Tensor,
    pub counted: usize,
}

/// Sample `index` of step `step`. Of every third only one target counts, of every other all.
pub fn sample(device: &Device, vocab: usize, step: usize, index: usize) -> Result<Microbatch> {
    let number = step * 101 + index * 13;
    let ids: Vec<i64> = (0..TOKENS).map(|t| ((number + t * t * 5) % vocab) as i64).collect();
    let ignored = CrossEntropyConfig::default().ignore_index;
    let targets: Vec<i64> = (0..TOKENS)
        .map(|t| match index % 3 {
            1 if t > 0 => ignored,
            _ => ((number * 3 + t * 2 + 1) % vocab) as i64,
        })
        .collect();
    let counted = targets.iter().filter(|&&target| target != ignored).count();
    Ok(Microbatch {
        ids: Tensor::from_slice(device, &ids, &[1, TOKENS])?,
        targets: Tensor::from_slice(device, &targets, &[1, TOKENS])?,
        counted,
    })
}

/// A rank's chunks on the micro-batches of a step.
pub struct Stage<'a> {
    pub parts: &'a [Toy],
    pub data_parallel: Option<&'a DataParallel>,
    pub microbatches: Vec<Microbatch>,
    pub loss: f64,
}

impl PipelineModel for Stage<'_> {
    fn activation(&self, _microbatch: usize) -> (Vec<usize>, DType, Device) {
        let Toy { shape, device, .. } = &self.parts[0];
        (vec![1, TOKENS, shape.width], shape.dtype, device.clone())
    }

    fn forward(&mut self, microbatch: usize, chunk: usize, input: Option<Var>) -> Result<Var> {
        let part = &self.parts[chunk];
        let output = part.run(&self.microbatches[microbatch], input)?;
        if part.norm.is_some() {
            self.loss += output.value().item()?;
        }
        Ok(output)
    }

    fn end_backward(&mut self, _microbatch: usize, _chunk: usize) -> Result<()> {
        self.data_parallel.map_or(Ok(()), DataParallel::end_backward)
    }
}
