use ferrotron_tensor::ops::pointwise::{
    add_assign, binary, binary_backward, unary, unary_backward,
};
use ferrotron_tensor::ops::scale::scale;
use ferrotron_tensor::ops::table::{Binary, Saves, Unary};
use ferrotron_tensor::{DType, Tensor};

use crate::simulator::Simulator;
use crate::support::*;

pub fn check(simulator: &Simulator) {
    for dtype in FLOATS {
        for n in [0, 1, 33, 2500] {
            unary_rows(simulator, dtype, n);
        }
        for (a, b) in [
            (&[700][..], &[700][..]),
            (&[6, 5, 33], &[6, 5, 33]),
            (&[6, 5, 33], &[33]),
            (&[5, 1], &[3, 1, 7]),
        ] {
            binary_rows(simulator, dtype, a, b);
        }
        for n in [0, 1, 33, 2500] {
            let x = random(dtype, &[n], 1);
            let factor = Tensor::full(&device(), dtype.accumulator(), &[], 0.3).unwrap();
            let (mut memory, by) = (bytes(&x), bytes(&factor));
            let (grid, block) = elementwise(n);
            let kernel = simulator.kernel("scale", element(dtype));
            kernel.in_out(&mut memory).input(&by).value(n as u64).run(grid, block);
            assert_same("scale", &read(dtype, &[n], &memory), &scale(x, &factor).unwrap());
        }
        for dims in [&[1001][..], &[5, 33], &[3, 4, 9]] {
            let (y, x) = (random(dtype, dims, 1), random(dtype, dims, 2));
            let mut want = y.copy().unwrap();
            add_assign(&mut want, &x).unwrap();
            for (mut memory, view) in variants(&y) {
                let kernel = simulator.kernel("add_assign", element(dtype));
                let (grid, block) = elementwise(y.numel());
                let before = memory.clone();
                let kernel = kernel.in_out(&mut memory);
                let x = bytes(&x);
                kernel
                    .input(&x)
                    .value(y.numel() as u64)
                    .value(layout(dims, &[&view]))
                    .run(grid, block);
                let got = gather(dtype, dims, &memory, &view);
                assert_same("add_assign", &got, &want);
                assert!(
                    view.is_contiguous() || untouched(dtype, &memory, &before, &view),
                    "add_assign {dims:?} writes between rows"
                );
            }
        }
    }
}

/// The elements of a view in memory that begins where it does.
fn gather(dtype: DType, dims: &[usize], memory: &[u8], view: &Tensor) -> Tensor {
    let size = dtype.size();
    let picked: Vec<u8> =
        positions(dims, view).iter().flat_map(|at| memory[at * size..][..size].to_vec()).collect();
    read(dtype, dims, &picked)
}

fn untouched(dtype: DType, memory: &[u8], before: &[u8], view: &Tensor) -> bool {
    let own = positions(view.dims(), view);
    let size = dtype.size();
    let elements = memory.chunks(size).zip(before.chunks(size)).enumerate();
    elements.filter(|(at, _)| !own.contains(at)).all(|(_, (now, before))| now == before)
}

fn positions(dims: &[usize], view: &Tensor) -> Vec<usize> {
    let strides = view.layout().strides();
    (0..dims.iter().product())
        .map(|index| {
            let mut rest = index;
            (0..dims.len())
                .rev()
                .map(|d| {
                    let coordinate = rest % dims[d];
                    rest /= dims[d];
                    coordinate * strides[d]
                })
                .sum()
        })
        .collect()
}

/// Both sides compute in A within a few of its ulps, magnified where a derivative is a difference (1 - s^2), and round
/// once. So they are at most one ulp of the dtype apart, and in A the ulps themselves.
fn close(what: &str, got: &Tensor, want: &Tensor) {
    let computed = 32.0 * got.dtype().accumulator().epsilon();
    let rounded = rounding(got.dtype());
    // The smallest numbers of f16 are 2^-24 apart.
    let smallest = if got.dtype() == DType::F16 { 2.0_f64.powi(-24) } else { 0.0 };
    assert_close(what, got, want, computed + rounded, computed + smallest);
}

fn unary_rows(simulator: &Simulator, dtype: DType, n: usize) {
    let (grid, block) = elementwise(n);
    for &op in Unary::ALL {
        let what = format!("{} of {n}", op.name());
        let domain = match op {
            Unary::Log | Unary::Log1p | Unary::Sqrt | Unary::Recip | Unary::Powf => {
                |x: f64| x.abs() + 0.25
            }
            _ => |x: f64| x,
        };
        let x: Vec<f64> = values(n, 3).into_iter().map(domain).collect();
        let x = tensor(dtype, &[n], &x);
        let p = 1.5;
        let want = unary(op, p, &x).unwrap();
        // One element further on, memory is no longer aligned for loads of 16 bytes.
        let mut memory = room(dtype, n);
        let x_bytes = bytes(&x);
        simulator
            .kernel(op.name(), element(dtype))
            .input(&x_bytes)
            .output(&mut memory)
            .value(n as u64)
            .value(p)
            .run(grid, block);
        close(&what, &read(dtype, &[n], &memory), &want);
        if op.saves() == Saves::Nothing {
            continue;
        }
        let saved = if op.saves() == Saves::Input { &x } else { &want };
        let dy = random(dtype, &[n], 4);
        let mut memory = bytes(&dy);
        let saved_bytes = bytes(saved);
        let kernel = simulator.kernel(&format!("{}_backward", op.name()), element(dtype));
        kernel.in_out(&mut memory).input(&saved_bytes).value(n as u64).value(p).run(grid, block);
        let want = unary_backward(op, p, dy, Some(saved)).unwrap();
        close(&format!("{what}, gradient"), &read(dtype, &[n], &memory), &want);
    }
}

fn binary_rows(simulator: &Simulator, dtype: DType, a_dims: &[usize], b_dims: &[usize]) {
    for &op in Binary::ALL {
        let positive = |dims: &[usize], seed| {
            let all: Vec<f64> =
                values(dims.iter().product(), seed).iter().map(|x| x.abs() + 0.25).collect();
            tensor(dtype, dims, &all)
        };
        let (a, b) = (positive(a_dims, 5), positive(b_dims, 6));
        let want = binary(op, &a, &b).unwrap();
        let dims = want.dims().to_vec();
        let n = want.numel();
        let (grid, block) = elementwise(n);
        for (a_memory, a_view) in variants(&a) {
            for (b_memory, b_view) in variants(&b) {
                let layout = layout(&dims, &[&a_view, &b_view]);
                let what = format!("{} of {a_view:?} and {b_view:?}", op.name());
                let mut memory = room(dtype, n);
                let kernel = simulator.kernel(op.name(), element(dtype));
                let kernel = kernel.input(&a_memory).input(&b_memory).output(&mut memory);
                kernel.value(n as u64).value(layout).run(grid, block);
                close(&what, &read(dtype, &dims, &memory), &want);
                for (side, reads) in op.reads().into_iter().enumerate() {
                    if reads == [false; 2] {
                        continue;
                    }
                    let dy = random(dtype, &dims, 7);
                    let mut memory = bytes(&dy);
                    let name = format!("{}_d_{}", op.name(), ["lhs", "rhs"][side]);
                    let kernel = simulator.kernel(&name, element(dtype));
                    let kernel = kernel.input(&a_memory).input(&b_memory).in_out(&mut memory);
                    kernel.value(n as u64).value(layout).run(grid, block);
                    let want = binary_backward(op, side, dy, Some(&a), Some(&b)).unwrap();
                    close(&format!("{name} {what}"), &read(dtype, &dims, &memory), &want);
                }
            }
        }
    }
}
