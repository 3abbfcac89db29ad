//! The conjugate pairs, exactly. Numbers are those of Megatron-LM's tests/unit_tests/tensor_parallel/test_mappings.py,
//! on 8 ranks as 2 stages of 4 along the tensor axis; shapes that it leaves out are added.

use ferrotron_autograd::{Leaf, Var, WeightGrads, backward};
use ferrotron_nn::Axis;
use ferrotron_parallel::collective::{Group, partition_range};
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_parallel::tensor_parallel::mappings::*;
use ferrotron_tensor::{Result, Tensor};

use crate::ranks::*;

/// Runs `f` on 8 ranks with the number of the rank and its group along the tensor axis.
fn on_two_stages(f: impl Fn(f64, &Group) -> Result<()> + Sync) {
    on_ranks(8, |world| {
        let mesh = Mesh::new(&world, ParallelDims::new(8, 4, 1, 2)?, SequenceParallel::Off)?;
        f(world.rank() as f64, mesh.axis(Axis::Tensor))
    });
}

/// Value of `f` at x and its gradient where the result's is dy.
fn both(x: &Tensor, dy: &Tensor, f: impl Fn(&Var) -> Result<Var>) -> Result<(Tensor, Tensor)> {
    let leaf = Leaf::new("x", x.clone());
    let y = f(&leaf.var()?)?;
    backward(&[(&y, dy.clone())], WeightGrads::Now)?.run()?;
    Ok((y.value().clone(), gradient(&leaf)))
}

fn filled(value: f64, dims: &[usize]) -> Tensor {
    tensor(&vec![value; dims.iter().product()], dims)
}

/// The sum of the ranks of a stage.
fn sum(rank: f64) -> f64 {
    if rank < 4.0 { 6.0 } else { 22.0 }
}

#[test]
fn copy_is_the_identity_and_sums_gradients() {
    on_two_stages(|rank, group| {
        let x = filled(rank, &[1]);
        let (y, dx) = both(&x, &x, |x| copy_to_tp(x, group))?;
        assert_equal("copy", &y, &x);
        assert_equal("copy, gradient", &dx, &filled(sum(rank), &[1]));
        Ok(())
    });
}

#[test]
fn reduce_sums_and_its_gradient_is_the_identity() {
    on_two_stages(|rank, group| {
        let x = filled(rank, &[1]);
        let (y, dx) = both(&x, &x, |x| reduce_from_tp(x, group))?;
        assert_equal("reduce", &y, &filled(sum(rank), &[1]));
        assert_equal("reduce, gradient", &dx, &x);
        Ok(())
    });
}

/// (8, 4) whose columns are the numbers of the ranks of a stage.
fn columns(rank: f64) -> Tensor {
    let first = if rank < 4.0 { 0.0 } else { 4.0 };
    let row = [first, first + 1.0, first + 2.0, first + 3.0];
    tensor(&row.repeat(8), &[8, 4])
}

#[test]
fn scatter_and_gather_of_columns() {
    on_two_stages(|rank, group| {
        let (whole, own) = (columns(rank), filled(rank, &[8, 1]));
        let (y, dx) = both(&whole, &own, |x| scatter_to_tp(x, 1, group))?;
        assert_equal("scatter", &y, &own);
        assert_equal("scatter, gradient", &dx, &whole);
        let (y, dx) = both(&own, &whole, |x| gather_from_tp(x, 1, 4, group))?;
        assert_equal("gather", &y, &whole);
        assert_equal("gather, gradient", &dx, &own);
        Ok(())
    });
}

#[test]
fn sequences_are_scattered_gathered_and_reduced() {
    on_two_stages(|rank, group| {
        let whole = columns(rank).transpose(0, 1)?.contiguous()?; // (4, 8), row r is rank r
        let own = filled(rank, &[1, 8]);
        let (y, dx) = both(&whole, &own, |x| scatter_to_tp(x, 0, group))?;
        assert_equal("scatter", &y, &own);
        assert_equal("scatter, gradient", &dx, &whole);
        let four_times = filled(4.0 * rank, &[1, 8]);
        let (y, dx) = both(&own, &whole, |x| gather_from_sp(x, 0, 4, group))?;
        assert_equal("gather", &y, &whole);
        assert_equal("gather, gradient", &dx, &four_times);
        let (y, dx) = both(&whole, &own, |x| reduce_scatter_to_sp(x, 0, group))?;
        assert_equal("reduce-scatter", &y, &four_times);
        assert_equal("reduce-scatter, gradient", &dx, &whole);
        Ok(())
    });
}

#[test]
fn all_to_all_exchanges_the_dim_that_is_cut() {
    let whole = normal(&[4, 3, 8], "whole");
    on_tensor_ranks(4, SequenceParallel::Off, |tp| {
        let group = tp.group();
        let own = |dim: usize| {
            let part = group.local_range(whole.dims()[dim]);
            whole.narrow(dim as isize, part.start, part.len())
        };
        let (y, dx) = both(&own(0)?, &own(2)?, |x| all_to_all(x, 2, 0, group))?;
        assert_equal("all-to-all", &y, &own(2)?);
        assert_equal("all-to-all, gradient", &dx, &own(0)?);
        Ok(())
    });
}

/// Parts that differ in length, some of them empty, along every dim.
#[test]
fn uneven_parts_come_together_again() {
    for ranks in 1..=5 {
        on_tensor_ranks(ranks, SequenceParallel::Off, |tp| {
            let group = tp.group();
            for dims in [[7, 3, 2], [2, 1, 9], [3, 4, 1]] {
                let whole = normal(&dims, "whole");
                for (dim, &len) in dims.iter().enumerate() {
                    let cut = partition_range(len, ranks, group.rank());
                    let own = whole.narrow(dim as isize, cut.start, cut.len())?;
                    let what = format!("dim {dim} of {dims:?} on {ranks} ranks");
                    let (y, dx) = both(&whole, &own, |x| scatter_to_tp(x, dim, group))?;
                    assert_equal(&what, &y, &own);
                    assert_equal(&what, &dx, &whole);
                    let (y, dx) = both(&own, &whole, |x| gather_from_tp(x, dim, len, group))?;
                    assert_equal(&what, &y, &whole);
                    assert_equal(&what, &dx, &own);
                    let (y, dx) = both(&own, &whole, |x| gather_from_sp(x, dim, len, group))?;
                    let times = ranks as f64;
                    let sum = own.mul_scalar(times)?;
                    assert_equal(&what, &y, &whole);
                    assert_close(&what, &dx, &sum, times * f64::EPSILON);
                    let (y, dx) = both(&whole, &own, |x| reduce_scatter_to_sp(x, dim, group))?;
                    assert_close(&what, &y, &sum, times * f64::EPSILON);
                    assert_equal(&what, &dx, &whole);
                }
            }
            Ok(())
        });
    }
}

/// 1600 rows over a world, and a last dim in equal parts: test_tensor_parallel_utils.py.
#[test]
fn ranges_of_a_vocabulary() {
    for ranks in [1, 2, 4, 8] {
        on_tensor_ranks(ranks, SequenceParallel::Off, |tp| {
            let (rank, each) = (tp.group().rank(), 1600 / ranks);
            assert_eq!(tp.group().local_range(1600), rank * each..(rank + 1) * each);
            let place = tp.shard(&[3, 1600], 1, &[800, 800])?;
            let half = each / 2;
            assert_eq!(place.pieces(0), [(0, 3)]);
            assert_eq!(place.pieces(1), [(rank * half, half), (800 + rank * half, half)]);
            Ok(())
        });
    }
}
