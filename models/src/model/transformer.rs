//! The blocks of a model chunk, with recomputation, compression and offloading of what backward needs of them.

use ferrotron_autograd::{Offloaded, Offloader, Var, checkpoint};
use ferrotron_nn::{Context, KvCache, Mode, Module, Param, Scope};
use ferrotron_parallel::mesh::Mesh;
use ferrotron_parallel::tensor_parallel::TensorParallel;
use ferrotron_tensor::Result;
use std::ops::Range;
use std::sync::Arc;

use crate::model::block::{Block, BlockConfig};
use crate::model::recompute::{Recompute, RecomputeModules, RegionInputs};
use crate::model::saved_activations::{BlockPacking, SavedActivations};

/// Consecutive transformer blocks.
#[derive(Debug, Clone, Module)]
pub(crate) struct Transformer {
    #[module(skip)]
    tp: TensorParallel,
    recompute: Recompute,
    #[module(skip)]
    packing: BlockPacking,
    blocks: Vec<Block>,
}

impl Transformer {
    /// The blocks `range` of a model, sharded over `mesh`; `config` says how each is made, by its number in the model.
    pub fn new(
        scope: &Scope,
        mesh: &Mesh,
        range: Range<usize>,
        config: impl Fn(usize) -> BlockConfig,
    ) -> Result<Transformer> {
        let block = |i: usize| Block::new(&scope.child(&format!("blocks.{i}")), mesh, &config(i));
        Ok(Transformer {
            tp: mesh.tensor_parallel(),
            recompute: Recompute::None,
            packing: BlockPacking::default(),
            blocks: range.map(block).collect::<Result<_>>()?,
        })
    }

    /// Sets recomputation.
    pub fn set_recompute(&mut self, recompute: Recompute) {
        self.recompute = recompute;
    }

    /// Sets the storage of saved activations; `offloader` moves offloaded ones to host memory.
    pub fn set_saved_activations(
        &mut self,
        saved: SavedActivations,
        offloader: Option<Arc<Offloader>>,
    ) {
        self.packing = BlockPacking::new(saved, offloader);
    }

    /// The regions that backward recomputes, as the parameters that each reads, in order.
    pub fn recomputed_regions(&self) -> impl Iterator<Item = Vec<Param>> {
        let params = |blocks: Range<usize>| self.blocks[blocks].iter().flat_map(Module::params);
        let regions = self.recompute.regions(self.blocks.len()).into_iter();
        let regions = regions.map(move |blocks| params(blocks).collect());
        let modules = self.recompute.modules();
        let parts = self.blocks.iter().flat_map(move |block| block.recomputed(modules));
        regions.chain(parts.map(Module::params))
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// (B, T, C) -> (B, T, C), through the blocks.
    pub fn forward(&self, ctx: &Context, mut x: Var) -> Result<Var> {
        let (regions, modules) = match ctx.mode {
            Mode::Train => (self.recompute.regions(self.blocks.len()), self.recompute.modules()),
            Mode::Eval => (Vec::new(), RecomputeModules::NONE),
        };
        let whole = regions.last().map_or(0, |last| last.end);
        let blocks = regions.into_iter().chain((whole..self.blocks.len()).map(|i| i..i + 1));
        let mut before: Option<Offloaded> = None;
        for range in blocks {
            let first = range.start;
            let run = || match first < whole {
                true => self.run_region(ctx, x, range),
                false => self.blocks[first].forward(ctx, &x, None, modules),
            };
            let (y, offloaded) = self.packing.run(first, run)?;
            // While backward runs these blocks, it prefetches the activations of the previous ones.
            x = match std::mem::replace(&mut before, offloaded) {
                Some(before) => y.register_hook(move |dy| before.prefetch().map(|()| dy))?,
                None => y,
            };
        }
        if let Some(last) = before {
            x = x.register_hook(move |dy| last.prefetch().map(|()| dy))?;
        }
        // If the last block is offloaded too, frees its device memory before the head runs.
        self.packing.wait()?;
        Ok(x)
    }

    /// (B, T, C) -> (B, T, C), through blocks that save only their input.
    fn run_region(&self, ctx: &Context, mut x: Var, range: Range<usize>) -> Result<Var> {
        if self.recompute.inputs() == RegionInputs::Distributed {
            x = self.tp.distribute_saved_activation(x)?;
        }
        let (blocks, ctx) = (self.blocks[range].to_vec(), ctx.clone());
        let run = move |x: &[Var]| {
            let through =
                |x: Var, block: &Block| block.forward(&ctx, &x, None, RecomputeModules::NONE);
            Ok(vec![blocks.iter().try_fold(x[0].clone(), through)?])
        };
        Ok(checkpoint(&[&x], run)?.remove(0))
    }

    /// (B, T, C) -> (B, T, C) for positions that continue those of `caches`, one for each block.
    pub fn forward_cached(&self, ctx: &Context, mut x: Var, caches: &mut [KvCache]) -> Result<Var> {
        for (block, cache) in self.blocks.iter().zip(caches) {
            x = block.forward(ctx, &x, Some(cache), RecomputeModules::NONE)?;
        }
        Ok(x)
    }
}
