//! Helpers of the tests of parallel layers: ranks in threads, seeded inputs, parts of tensors, comparisons.

use ferrotron_autograd::Leaf;
use ferrotron_nn::{Axis, Context, DimShard, Mode, Module, Param};
use ferrotron_parallel::collective::{Group, Reduction, World, WorldConfig, run_threads};
use ferrotron_parallel::context_parallel::ContextParallel;
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::tensor_parallel::{SequenceParallel, TensorParallel};
use ferrotron_tensor::ops::concat::concat;
use ferrotron_tensor::{DType, Device, RandomKey, Result, ShardSpec, Tensor};
use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::Duration;

pub const SEED: u64 = 1234;
pub const BOTH: [SequenceParallel; 2] = [SequenceParallel::Off, SequenceParallel::On];

/// Runs `f` on `size` ranks; the results in their order.
pub fn on_ranks<T: Send>(size: usize, f: impl Fn(World) -> Result<T> + Sync) -> Vec<T> {
    let config = WorldConfig { timeout: Duration::from_secs(60) };
    let results = run_threads(size, &config, f).into_iter();
    results.map(|result| result.unwrap_or_else(|error| panic!("{error}"))).collect()
}

/// Runs `f` on `size` ranks that lie along the tensor axis.
pub fn on_tensor_ranks<T: Send>(
    size: usize,
    sequence: SequenceParallel,
    f: impl Fn(TensorParallel) -> Result<T> + Sync,
) -> Vec<T> {
    on_ranks(size, |world| f(TensorParallel::new(all(&world)?, sequence)))
}

/// The group of all ranks.
pub fn all(world: &World) -> Result<Group> {
    world.group("all", &(0..world.size()).collect::<Vec<_>>())
}

/// The device of all ranks, so that they can compare what they have with serial results.
pub fn device() -> Device {
    static DEVICE: LazyLock<Device> = LazyLock::new(|| Device::cpu(1).unwrap());
    DEVICE.clone()
}

/// Standard normals of `site`.
pub fn normal(dims: &[usize], site: &str) -> Tensor {
    let key = RandomKey::new(7, 0, site);
    let count: usize = dims.iter().product();
    let values: Vec<f64> = (0..count as u64).map(|i| key.normal(i)).collect();
    Tensor::from_slice(&device(), &values, dims).unwrap()
}

pub fn tensor(values: &[f64], dims: &[usize]) -> Tensor {
    Tensor::from_slice(&device(), values, dims).unwrap()
}

/// The part of a global tensor that is at `place`.
pub fn part(whole: &Tensor, place: &ShardSpec) -> Tensor {
    let mut x = whole.clone();
    for dim in 0..place.dims().len() {
        let cut = |&(at, len): &(usize, usize)| x.narrow(dim as isize, at, len).unwrap();
        let pieces: Vec<Tensor> = place.pieces(dim).iter().map(cut).collect();
        x = concat(&pieces.iter().collect::<Vec<_>>(), dim as isize).unwrap();
    }
    x
}

/// Panics unless |got - want| <= tolerance * (1 + |want|) everywhere.
pub fn assert_close(what: &str, got: &Tensor, want: &Tensor, tolerance: f64) {
    assert_eq!(got.dims(), want.dims(), "{what}: dims");
    assert_eq!(got.dtype(), want.dtype(), "{what}: dtype");
    let (got, want) = (got.to_f64().unwrap(), want.to_f64().unwrap());
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        assert!(
            (got - want).abs() <= tolerance * (1.0 + want.abs()),
            "{what}: element {i}: got {got:e}, want {want:e}, tolerance {tolerance:e}"
        );
    }
}

/// Panics unless both are equal, element by element.
pub fn assert_equal(what: &str, got: &Tensor, want: &Tensor) {
    assert_close(what, got, want, 0.0);
}

/// Rounding of sums of `terms` products of numbers near 1, through the few layers of a test.
pub fn rounding(terms: usize) -> f64 {
    32.0 * f64::EPSILON * terms as f64
}

/// Takes a leaf's gradient.
pub fn gradient(leaf: &Leaf) -> Tensor {
    leaf.gradient().unwrap().unwrap_or_else(|| panic!("'{}' got no gradient", leaf.name()))
}

/// Gradients by name, to be compared with those of ranks.
pub fn gradients(module: &dyn Module) -> BTreeMap<String, Tensor> {
    let of = |param: &Param| (param.name().to_string(), gradient(param.leaf()));
    module.params().iter().map(of).collect()
}

/// Panics unless each gradient of `module` is the part of the serial one at the parameter's place. Gradients are summed
/// over the axes along which they are partial.
pub fn assert_gradients(
    what: &str,
    module: &dyn Module,
    serial: &BTreeMap<String, Tensor>,
    (mesh, tolerance): (&Mesh, f64),
) -> Result<()> {
    assert_eq!(module.params().len(), serial.len(), "{what}: number of parameters");
    for param in module.params() {
        let mut sum = gradient(param.leaf()).copy()?;
        for axis in [Axis::Tensor, Axis::Context] {
            if param.grad_partial().contains(axis) {
                sum = mesh.axis(axis).all_reduce(sum, Reduction::Sum)?.wait()?;
            }
        }
        let want = part(&serial[param.name()], param.shard_spec());
        assert_close(&format!("{what}: gradient of {}", param.name()), &sum, &want, tolerance);
    }
    Ok(())
}

/// A way to spread a layer: ranks along tensor and context axes.
#[derive(Debug, Clone, Copy)]
pub struct Spread {
    pub tp: usize,
    pub sequence: SequenceParallel,
    pub cp: usize,
}

/// One rank of a spread layer.
pub struct Rank {
    pub mesh: Mesh,
    pub tp: TensorParallel,
    pub cp: ContextParallel,
    pub ctx: Context,
}

impl Spread {
    pub fn ranks(self) -> usize {
        self.tp * self.cp
    }

    /// This rank's groups, and the context of step 3 with what it has of `batch` sequences of `length`.
    pub fn rank(self, world: &World, batch: usize, length: usize) -> Result<Rank> {
        let layout = ParallelDims::new(world.size(), self.tp, self.cp, 1)?;
        let mesh = Mesh::new(world, layout, self.sequence)?;
        let tp = mesh.tensor_parallel();
        let cp = ContextParallel::new(mesh.axis(Axis::Context).clone());
        let mut ctx = Context::new(SEED, 3, Mode::Train, batch, length);
        ctx.sequence = cp.sequence(length)?;
        ctx.residual = tp.residual(&ctx.sequence)?;
        Ok(Rank { mesh, tp, cp, ctx })
    }
}

/// The scope of a layer in f64.
pub fn scope(name: &str) -> ferrotron_nn::Scope {
    ferrotron_nn::Scope::new(&device(), DType::F64, SEED).child(name)
}

/// This rank's part of an activation (B, T, C) of the residual stream.
pub fn residual(tp: &TensorParallel, x: &Tensor) -> Tensor {
    let positions = tp.residual(&DimShard::unsharded(x.dims()[1])).unwrap();
    let &[(start, len)] = &positions.pieces[..] else { panic!("one piece") };
    x.narrow(1, start, len).unwrap()
}
