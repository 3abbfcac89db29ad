use ferrotron_tensor::ops::rotary::{Direction, RotaryTable, rotary};

use super::far;
use crate::simulator::Simulator;
use crate::support::*;

pub fn check(simulator: &Simulator) {
    for dtype in FLOATS {
        // (B, T, H, D), rotated heads, rotated elements of each
        for (dims, heads, turned) in [
            ([1, 1, 1, 2], 1, 2),
            ([2, 5, 6, 8], 4, 8),
            ([2, 3, 2, 10], 2, 6),
            ([1, 7, 3, 64], 0, 64),
        ] {
            let x = random(dtype, &dims, 1);
            let table =
                RotaryTable::new(&device(), dtype, 3..3 + dims[1], turned, 10_000.0).unwrap();
            let [cos, sin] = table.tensors().map(bytes);
            for (direction, sign) in [(Direction::Forward, 1_i32), (Direction::Backward, -1)] {
                let want = rotary(&x, &table, heads, direction).unwrap();
                for (memory, view) in variants(&x) {
                    let strides = view.layout().strides();
                    if strides[3] != 1 {
                        continue;
                    }
                    let mut out = room(dtype, x.numel());
                    let (grid, block) = elementwise(x.numel());
                    let kernel = simulator.kernel("rotary", element(dtype));
                    let kernel = kernel.input(&memory).input(&cos).input(&sin).output(&mut out);
                    let sizes = [dims[0], dims[1], dims[2], heads, dims[3], turned / 2];
                    let kernel =
                        sizes.iter().fold(kernel, |kernel, &size| kernel.value(size as u64));
                    let kernel = strides[..3]
                        .iter()
                        .fold(kernel, |kernel, &stride| kernel.value(stride as i64));
                    kernel.value(sign).run(grid, block);
                    // Two products of numbers up to 2 and their sum, fused or not.
                    let eps = dtype.accumulator().epsilon();
                    let rounded = rounding(dtype);
                    assert_close(
                        &format!("rotary of {view:?}"),
                        &read(dtype, &dims, &out),
                        &want,
                        rounded + eps,
                        4.0 * eps,
                    );
                }
            }
        }
    }
    far::rotations(simulator);
}
