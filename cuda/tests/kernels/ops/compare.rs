use ferrotron_tensor::DType;
use ferrotron_tensor::ops::pointwise::{Comparison, compare};

use crate::simulator::Simulator;
use crate::support::*;

/// The comparisons in the order of the kernel's numbers.
const COMPARISONS: [Comparison; 6] = [
    Comparison::Eq,
    Comparison::Ne,
    Comparison::Lt,
    Comparison::Le,
    Comparison::Gt,
    Comparison::Ge,
];

pub fn check(simulator: &Simulator) {
    for dtype in DType::ALL {
        for (a_dims, b_dims) in
            [(&[700][..], &[700][..]), (&[6, 5, 33], &[33]), (&[5, 1], &[3, 1, 7])]
        {
            // Few different numbers, so that some are equal; and NaN among the floats.
            let few = |dims: &[usize], seed| {
                let mut all: Vec<f64> =
                    values(dims.iter().product(), seed).iter().map(|x| (x + 2.0).floor()).collect();
                if dtype.is_float() {
                    all[0] = f64::NAN;
                }
                tensor(dtype, dims, &all)
            };
            let (a, b) = (few(a_dims, 1), few(b_dims, 2));
            for (number, comparison) in COMPARISONS.into_iter().enumerate() {
                let want = compare(comparison, &a, &b).unwrap();
                let n = want.numel();
                let (grid, block) = elementwise(n);
                for (a_memory, a_view) in variants(&a) {
                    for (b_memory, b_view) in variants(&b) {
                        let mut out = vec![0_u8; n];
                        let kernel = simulator
                            .kernel("compare", element(dtype))
                            .input(&a_memory)
                            .input(&b_memory);
                        let kernel = kernel.output(&mut out).value(n as u64).value(number as i32);
                        kernel.value(layout(want.dims(), &[&a_view, &b_view])).run(grid, block);
                        assert_same(
                            &format!("{comparison:?} {dtype}"),
                            &read(DType::U8, want.dims(), &out),
                            &want,
                        );
                    }
                }
            }
        }
    }
}
