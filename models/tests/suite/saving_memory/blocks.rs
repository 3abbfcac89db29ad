//! A pass through the blocks of a model and back, and what they keep for it.

use ferrotron_autograd::{Leaf, WeightGrads, backward};
use ferrotron_models::activation_bytes::Activations;
use ferrotron_models::gpt::{
    Gpt, GptConfig, ModelChunk, Recompute, RecomputeMethod, RecomputeModules, RecomputedAttention,
    RecomputedMlp, RegionInputs, SavedActivations,
};
use ferrotron_nn::{Context, Mode, Module, Scope};
use ferrotron_parallel::mesh::Mesh;
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::ops::random;
use ferrotron_tensor::{Category, DType, Device, MemoryKind, RandomKey, Result, ShardSpec};

use super::training::{BATCH, SEQ_LENGTH};

/// Ranks along the tensor and context axes, and sequence parallelism.
pub const LAYOUTS: [(usize, usize, SequenceParallel); 5] = [
    (1, 1, SequenceParallel::Off),
    (2, 1, SequenceParallel::Off),
    (2, 1, SequenceParallel::On),
    (1, 2, SequenceParallel::Off),
    (2, 2, SequenceParallel::On),
];

/// The formulas' operands for the blocks of `model` on a rank of one of these layouts.
pub fn activations(
    model: &GptConfig,
    dtype: DType,
    (tp, cp, sequence): (usize, usize, SequenceParallel),
) -> Activations<'_> {
    Activations {
        model,
        dtype,
        batch: BATCH,
        positions: SEQ_LENGTH / cp,
        tensor: tp,
        sequence: if sequence == SequenceParallel::On { tp } else { 1 },
    }
}

/// Recomputation of one block each, with inputs that tensor-parallel ranks share.
pub const DISTRIBUTED: Recompute = Recompute::Full {
    method: RecomputeMethod::Uniform,
    layers: 1,
    inputs: RegionInputs::Distributed,
};

pub fn full(method: RecomputeMethod, layers: usize) -> Recompute {
    Recompute::Full { method, layers, inputs: RegionInputs::Whole }
}

pub fn parts(attention: RecomputedAttention, mlp: RecomputedMlp) -> Recompute {
    Recompute::Selective(RecomputeModules { attention, mlp })
}

/// The results of a pass through all blocks and back.
pub struct Pass {
    /// Output, gradient of the input, and those of all parameters.
    pub values: Vec<Vec<f64>>,
    /// Bytes kept between forward and backward: those that nodes hold, those of the pool, and those of host memory.
    pub kept: [usize; 3],
    /// Most bytes kept in the pool at any time.
    pub peak: usize,
    /// Bytes of tables that the blocks share.
    pub tables: usize,
}

impl Pass {
    /// The values as bits.
    pub fn bits(&self) -> Vec<Vec<u64>> {
        self.values.iter().map(|values| values.iter().map(|x| x.to_bits()).collect()).collect()
    }
}

pub fn pass(
    mesh: &Mesh,
    model: &GptConfig,
    dtype: DType,
    recompute: Recompute,
    saved: SavedActivations,
) -> Result<Pass> {
    let device = Device::cpu(1)?;
    let blocks = ModelChunk { blocks: 0..model.num_layers, first: false, last: false };
    let offloader = saved.offloader(&device)?;
    let gpt = Gpt::from_chunk(&Scope::new(&device, dtype, 7), mesh, model, &blocks)?
        .with_recompute(recompute)
        .with_saved_activations(saved, offloader.clone());
    let ctx = mesh.context(Context::new(3, 1, Mode::Train, BATCH, SEQ_LENGTH))?;
    let place = ShardSpec::unsharded(&[BATCH, ctx.residual.len(), model.hidden_size]);
    let draw =
        |what: &str| random::normal(&device, dtype, &place, &RandomKey::new(1, 0, what), 0.0, 1.0);
    let (x, dy) = (Leaf::new("x", draw("x")?), draw("dy")?);
    // The weights are made where they are first read.
    gpt.params().iter().try_for_each(|param| param.leaf().value().map(drop))?;
    device.reset_memory_peaks();
    let y = gpt.run_blocks(&ctx, x.var()?.mul_scalar(1.0)?)?;
    offloader.map_or(Ok(()), |offloader| offloader.wait())?;
    let in_pool = |kind| device.memory_of(kind).bytes(Category::Saved);
    let kept = [y.saved_bytes(), in_pool(MemoryKind::Device), in_pool(MemoryKind::Host)];
    let mut values = vec![y.value().to_f64()?];
    backward(&[(&y, dy)], WeightGrads::Now)?.run()?;
    let peak = device.memory().peak_bytes(Category::Saved);
    let tables = device.memory().peak_bytes(Category::Tables);
    for leaf in [&x].into_iter().chain(gpt.params().iter().map(|param| param.leaf())) {
        values.push(leaf.gradient()?.expect("a gradient").to_f64()?);
    }
    // With the last handle the thread ends, which may still hold what it has been told to fetch.
    drop((y, gpt));
    assert_eq!([MemoryKind::Device, MemoryKind::Host].map(in_pool), [0, 0], "backward used all up");
    assert_eq!(device.memory().bytes(Category::Tables), 0, "the tables go with the model");
    Ok(Pass { values, kept, peak, tables })
}
