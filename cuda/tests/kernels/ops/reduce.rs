use ferrotron_tensor::ops::reduce::{KeepDims, amax, argmax, log_sum_exp, mean, sum};
use ferrotron_tensor::{DType, Tensor};

use crate::simulator::Simulator;
use crate::support::*;

pub fn check(simulator: &Simulator) {
    for dtype in FLOATS {
        for (outer, reduced) in [(1, 1), (5, 7), (3, 33), (2, 1500), (0, 3), (3, 0)] {
            check_rows(simulator, &random(dtype, &[outer, reduced], 1), 512);
        }
        let inf = f64::INFINITY;
        let special = [1.0, f64::NAN, 3.0, inf, -inf, 0.0, -inf, -inf, -inf, 2.0, 2.0, 1.0];
        check_rows(simulator, &tensor(dtype, &[4, 3], &special), 2);
        for (outer, reduced, inner) in [(1, 1, 2), (3, 5, 7), (2, 70, 130), (1, 300, 3), (2, 0, 3)]
        {
            check_columns(simulator, &random(dtype, &[outer, reduced, inner], 2), 64);
        }
    }
}

/// Sums of n numbers up to 2, in different orders, and one rounding.
fn close(what: &str, dtype: DType, memory: &[u8], want: &Tensor, n: usize) {
    let sums = dtype.accumulator().epsilon() * (n as f64 / 32.0 + 40.0);
    let rounded = rounding(dtype);
    assert_close(what, &read(dtype, want.dims(), memory), want, rounded + sums, sums * 2.0);
}

fn check_rows(simulator: &Simulator, x: &Tensor, block_size: usize) {
    let (dtype, acc) = (x.dtype(), x.dtype().accumulator());
    let (outer, reduced) = (x.dims()[0], x.dims()[1]);
    let blocks = reduced.div_ceil(block_size);
    let source = bytes(x);
    let (grid, block) = rowwise(outer * blocks, reduced.min(block_size));
    let (finish, finish_block) = ([outer.div_ceil(128), 1, 1], [128, 1, 1]);
    let sizes = [outer, reduced, blocks, block_size].map(|size| size as u64);

    let mut partials = room(acc, outer * blocks);
    let fold = |name: &str, max: Option<&[u8]>, partials: &mut [u8]| {
        let kernel = simulator.kernel(name, element(dtype)).input(&source);
        let kernel = match max {
            Some(max) => kernel.input(max),
            None => kernel,
        };
        let kernel = kernel.output(partials);
        sizes.iter().fold(kernel, |kernel, &size| kernel.value(size)).run(grid, block);
    };
    fold("sum_rows", None, &mut partials);
    for (what, divisor) in [("sum", 1), ("mean", reduced)] {
        let mut y = room(dtype, outer);
        let kernel = simulator.kernel("sum_finish", element(dtype)).input(&partials).output(&mut y);
        let kernel =
            kernel.value(outer as u64).value(1_u64).value(blocks as u64).value(divisor as f64);
        kernel.run(finish, finish_block);
        let want = if what == "sum" {
            sum(x, &[1], KeepDims::Drop)
        } else {
            mean(x, &[1], KeepDims::Drop)
        };
        close(what, dtype, &y, &want.unwrap(), reduced);
    }

    fold("max_rows", None, &mut partials);
    let (mut y, mut largest) = (room(dtype, outer), room(acc, outer));
    let kernel = simulator
        .kernel("max_finish", element(dtype))
        .input(&partials)
        .output(&mut y)
        .output(&mut largest);
    kernel.value(outer as u64).value(1_u64).value(blocks as u64).run(finish, finish_block);
    if reduced > 0 {
        let want = amax(x, &[1], KeepDims::Drop).unwrap();
        assert_same("max", &read(dtype, &[outer], &y), &want);
        assert_same("max in A", &read(acc, &[outer], &largest), &want.cast(acc).unwrap());
        let mut index = vec![0_i64; outer];
        let (grid, block) = rowwise(outer, reduced);
        let kernel =
            simulator.kernel("argmax_rows", element(dtype)).input(&source).output(&mut index);
        kernel.value(outer as u64).value(reduced as u64).run(grid, block);
        assert_eq!(
            index,
            argmax(x, 1, KeepDims::Drop).unwrap().to_vec::<i64>().unwrap(),
            "argmax {x:?}"
        );
    }

    fold("sum_exp_rows", Some(&largest), &mut partials);
    let mut y = room(dtype, outer);
    let kernel =
        simulator.kernel("log_sum_exp_finish", element(dtype)).input(&partials).input(&largest);
    kernel.output(&mut y).value(outer as u64).value(blocks as u64).run(finish, finish_block);
    close("log_sum_exp", dtype, &y, &log_sum_exp(x, &[1], KeepDims::Drop).unwrap(), reduced);
}

fn check_columns(simulator: &Simulator, x: &Tensor, block_size: usize) {
    let (dtype, acc) = (x.dtype(), x.dtype().accumulator());
    let &[outer, reduced, inner] = x.dims() else { unreachable!() };
    let blocks = reduced.div_ceil(block_size);
    let source = bytes(x);
    let sizes = [outer, reduced, inner, blocks, block_size].map(|size| size as u64);
    // Fewer blocks of threads than rows of partial values: each takes several.
    let grid = [inner.div_ceil(128), (outer * blocks).min(2), 1];
    let finish = [(outer * inner).div_ceil(128), 1, 1];
    for name in ["sum", "max"] {
        let mut partials = room(acc, outer * blocks * inner);
        let kernel = simulator.kernel(&format!("{name}_columns"), element(dtype));
        let kernel = kernel.input(&source).output(&mut partials);
        sizes.iter().fold(kernel, |kernel, &size| kernel.value(size)).run(grid, [128, 1, 1]);
        let mut y = room(dtype, outer * inner);
        let kernel = simulator
            .kernel(&format!("{name}_finish"), element(dtype))
            .input(&partials)
            .output(&mut y);
        let kernel = if name == "max" { kernel.null() } else { kernel };
        let kernel = kernel.value(outer as u64).value(inner as u64).value(blocks as u64);
        let kernel = if name == "sum" { kernel.value(1.0) } else { kernel };
        kernel.run(finish, [128, 1, 1]);
        if name == "sum" {
            close("sum of columns", dtype, &y, &sum(x, &[1], KeepDims::Drop).unwrap(), reduced);
        } else if reduced > 0 {
            assert_same(
                "max of columns",
                &read(dtype, &[outer, inner], &y),
                &amax(x, &[1], KeepDims::Drop).unwrap(),
            );
        }
    }
}
