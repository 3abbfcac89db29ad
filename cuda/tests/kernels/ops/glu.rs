use ferrotron_tensor::ops::glu::{GluKind, geglu, glu_backward, swiglu};

use crate::simulator::Simulator;
use crate::support::*;

pub fn check(simulator: &Simulator) {
    for dtype in FLOATS {
        for (rows, width) in [(1, 1), (5, 7), (3, 33), (6, 128), (2, 1032), (2, 2048), (0, 5)] {
            let x = random(dtype, &[rows, 2 * width], 1).mul_scalar(3.0).unwrap();
            let dy = random(dtype, &[rows, width], 2);
            let (grid, block) = rowwise(rows, width);
            for kind in [GluKind::SwiGlu, GluKind::GeGlu] {
                let (name, backward, value) = match kind {
                    GluKind::SwiGlu => ("swiglu", "swiglu_backward", swiglu(&x)),
                    GluKind::GeGlu => ("geglu", "geglu_backward", geglu(&x)),
                };
                // Two roundings, of which the first may go the other way.
                let eps = 3.0 * rounding(dtype) + 64.0 * dtype.accumulator().epsilon();
                let (source, mut memory) = (bytes(&x), room(dtype, rows * width));
                let kernel = simulator.kernel(name, element(dtype));
                let kernel = kernel.input(&source).output(&mut memory);
                kernel.value(rows as u64).value(width as u64).run(grid, block);
                let got = read(dtype, &[rows, width], &memory);
                assert_close(name, &got, &value.unwrap(), eps, 9.0 * eps);

                let (dy_bytes, mut memory) = (bytes(&dy), bytes(&x));
                let kernel = simulator.kernel(backward, element(dtype));
                let kernel = kernel.in_out(&mut memory).input(&dy_bytes);
                kernel.value(rows as u64).value(width as u64).run(grid, block);
                let got = read(dtype, &[rows, 2 * width], &memory);
                let want = glu_backward(kind, x.clone(), &dy).unwrap();
                assert_close(backward, &got, &want, eps, 9.0 * eps);
            }
        }
    }
}
