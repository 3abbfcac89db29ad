//! Gradient checks by finite differences through collectives: compares each rank's gradient with the derivative of
//! the value that all ranks compute together.

use ferrotron_autograd::{GradcheckOptions, Leaf, Var, gradcheck_leaves};
use ferrotron_nn::{Axis, Param};
use ferrotron_tensor::{DType, Device, Result, Tensor};

use crate::collective::Group;

/// Checks the gradient of `f` with respect to `params` (f64) by finite differences. All ranks of `group`, which is
/// along `axis`, call this together.
///
/// `f` must return the same value on every rank: a loss, or the result of
/// [`reduce_from_tp`](crate::tensor_parallel::mappings::reduce_from_tp) on partial losses. A parameter that is
/// sharded along the axis, or whose gradient is partial, is perturbed on one rank at a time. The other ranks then
/// evaluate `f` with unchanged parameters. Other parameters are perturbed on all ranks at once.
///
/// For functions of replicated inputs that are sharded internally, use
/// [`gradcheck`](ferrotron_autograd::gradcheck()): it evaluates the same calls in the same order on every rank.
///
/// Errors as [`gradcheck_leaves`], or if ranks have different numbers of parameters.
///
/// ```
/// use ferrotron_autograd::{GradcheckOptions, Var};
/// use ferrotron_nn::{Axis, Bias, Init, Module, Scope};
/// use ferrotron_parallel::collective::{WorldConfig, run_threads};
/// use ferrotron_parallel::gradcheck::gradcheck_params;
/// use ferrotron_parallel::tensor_parallel::mappings::reduce_from_tp;
/// use ferrotron_parallel::tensor_parallel::{ColumnParallelLinear, SequenceParallel, TensorParallel};
/// use ferrotron_tensor::{DType, Device, Tensor};
/// let checked = run_threads(2, &WorldConfig::default(), |world| {
///     let group = world.group("tp", &[0, 1])?;
///     let tp = TensorParallel::new(group.clone(), SequenceParallel::Off);
///     let device = Device::cpu(1)?;
///     let scope = Scope::new(&device, DType::F64, 7).child("fc");
///     let fc = ColumnParallelLinear::new(&scope, &tp, 3, &[5], Bias::Yes, Init::XavierUniform)?;
///     let x = Var::constant(Tensor::full(&device, DType::F64, &[1, 2, 3], 0.5)?);
///     let loss = || reduce_from_tp(&fc.forward(&x)?.tanh()?.sum_all()?, &group);
///     gradcheck_params(loss, &fc.params(), (&group, Axis::Tensor), &GradcheckOptions::default())
/// });
/// checked.into_iter().collect::<Result<Vec<_>, _>>()?;
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn gradcheck_params(
    f: impl Fn() -> Result<Var>,
    params: &[Param],
    (group, axis): (&Group, Axis),
    options: &GradcheckOptions,
) -> Result<()> {
    let (alike, own): (Vec<&Param>, Vec<&Param>) = params.iter().partition(|param| {
        param.replicated().contains(axis) && !param.grad_partial().contains(axis)
    });
    let leaves = |params: &[&Param]| -> Vec<Leaf> {
        params.iter().map(|param| param.leaf().clone()).collect()
    };
    // A mismatch on one rank must not stop it from joining the other ranks' evaluations.
    let mut found = gradcheck_leaves(&f, &leaves(&alike), options);
    let device =
        params.first().map_or_else(|| Device::cpu(1), |p| Ok(p.leaf().device().clone()))?;
    let sizes: Vec<i64> = own.iter().map(|param| param.leaf().numel() as i64).collect();
    let sizes = Tensor::from_slice(&device, &sizes, &[1, own.len()])?;
    let sizes = group.all_gather(sizes, group.size())?.wait()?.to_vec::<i64>()?;
    for (rank, sizes) in sizes.chunks(own.len().max(1)).enumerate() {
        if rank == group.rank() {
            found = found.and(gradcheck_leaves(&f, &leaves(&own), options));
            continue;
        }
        // Leaves of equal sizes that `f` does not use: they cause the same evaluations. Any change of the value comes
        // from the rank that is perturbing its parameters.
        let decoys = sizes.iter().map(|&numel| {
            Ok(Leaf::new("decoy", Tensor::zeros(&device, DType::F64, &[numel as usize])?))
        });
        match gradcheck_leaves(&f, &decoys.collect::<Result<Vec<_>>>()?, options) {
            Err(error) if error.op() != "gradcheck" => return Err(error),
            _ => (),
        }
    }
    found
}
