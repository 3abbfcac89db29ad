//! The division of parameters into buckets: the axes that decide it, and the order of tied parameters on two stages.

use ferrotron_nn::{Axis, AxisSet, Init, Module, Param, Scope, WeightDecay};
use ferrotron_parallel::collective::{WorldConfig, run_threads};
use ferrotron_parallel::data_parallel::{DataParallel, DataParallelConfig};
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, Device, Result};

struct Params(Vec<Param>);

impl Module for Params {
    fn visit(&self, f: &mut dyn FnMut(&Param)) {
        self.0.iter().for_each(f);
    }
}

impl Params {
    /// A vector of each scope.
    fn new<const N: usize>(scopes: [(&str, &Scope); N]) -> Params {
        let make =
            |(name, scope): (&str, &Scope)| scope.param(name, &[6], Init::Ones, WeightDecay::On);
        Params(scopes.map(make).into())
    }
}

/// Runs `f` on ranks with the sizes of the axes tensor, context, data and pipeline.
fn on_ranks<T: Send>(
    [tensor, context, data, pipeline]: [usize; 4],
    f: impl Fn(&Mesh, &Scope) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let ranks = tensor * context * data * pipeline;
    run_threads(ranks, &WorldConfig::default(), |world| {
        let layout = ParallelDims::new(ranks, tensor, context, pipeline)?;
        let mesh = Mesh::new(&world, layout, SequenceParallel::Off)?;
        f(&mesh, &mesh.scope(&Device::cpu(1)?, DType::F64, 1))
    })
}

/// Sharded parameters are reduced together with replicated ones along an axis with one rank. Ranks along the context and
/// the data axis sum gradients at once, so that both count if one has several.
#[test]
fn axes_with_several_ranks_divide_buckets() -> Result<()> {
    let batch = [Axis::Context, Axis::Data];
    for (sizes, axes, buckets) in [
        ([1, 1, 1, 1], AxisSet::none(), vec![vec!["a", "b"]]),
        ([1, 1, 3, 1], AxisSet::from(batch), vec![vec!["a", "b"]]),
        ([1, 2, 1, 1], AxisSet::from(batch), vec![vec!["a", "b"]]),
        ([2, 1, 1, 1], AxisSet::from([Axis::Tensor]), vec![vec!["b"], vec!["a"]]),
        ([2, 1, 2, 1], AxisSet::from(batch).with(Axis::Tensor), vec![vec!["b"], vec!["a"]]),
    ] {
        let found = on_ranks(sizes, |mesh, scope| {
            let sharded = scope.clone().sharded_along(Axis::Tensor);
            let params = Params::new([("a", scope), ("b", &sharded)]);
            let parallel = DataParallel::new(&[&params], mesh, &DataParallelConfig::default())?;
            let groups = parallel.buffers().groups();
            assert_eq!(groups.last().unwrap().replicated, axes, "{sizes:?}");
            let name = |param: &Param| param.name().to_string();
            let names = groups.iter().map(|group| group.params.iter().map(name).collect());
            Ok(names.collect::<Vec<Vec<String>>>())
        });
        for found in found {
            assert_eq!(found?, buckets, "{sizes:?}");
        }
    }
    Ok(())
}

/// The gradients of a bucket are summed as they lie.
#[test]
fn tied_parameters_in_two_orders_are_refused() {
    for swapped in [false, true] {
        let results = on_ranks([1, 1, 1, 2], |mesh, scope| {
            let tied = mesh.tied_scope(scope);
            let mut names = ["a", "b"];
            if swapped && mesh.axis(Axis::Pipeline).rank() == 1 {
                names.reverse();
            }
            let params = Params::new(names.map(|name| (name, &tied)));
            DataParallel::new(&[&params], mesh, &DataParallelConfig::default()).map(drop)
        });
        for result in results {
            let error = result.err().map(|error| error.to_string()).unwrap_or_default();
            let want = "pipeline stage 0 meets the tied parameter 'a' where stage 1 meets 'b'";
            assert_eq!(error.contains(want), swapped, "{error}");
        }
    }
}
