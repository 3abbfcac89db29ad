//! Rows of linear layers.

use ferrotron_autograd::ops::linear::Gelu;

use super::{OpCase, Shapes, row};

const LINEAR: &[Shapes] = &[
    &[&[2, 3, 4], &[5, 4], &[5]],
    &[&[4], &[5, 4], &[5]],
    &[&[1, 1], &[1, 1], &[1]],
    &[&[0, 4], &[5, 4], &[5]],
    &[&[2, 0], &[5, 0], &[5]],
    &[&[2, 4], &[0, 4], &[0]],
];
const PLAIN_LINEAR: &[Shapes] = &[
    &[&[2, 3, 4], &[5, 4]],
    &[&[3, 3], &[3, 3]],
    &[&[4], &[5, 4]],
    &[&[1, 1], &[1, 1]],
    &[&[0, 4], &[5, 4]],
    &[&[2, 0], &[5, 0]],
    &[&[2, 4], &[0, 4]],
];
/// Shapes with eight features between two layers, which a GPU computes in one call in 16 bits, and others.
const LINEAR_GELU: &[Shapes] = &[
    &[&[2, 3, 4], &[8, 4], &[8], &[3, 8], &[3]],
    &[&[2, 3], &[5, 3], &[5], &[2, 5], &[2]],
    &[&[4], &[8, 4], &[8], &[1, 8], &[1]],
    &[&[0, 4], &[8, 4], &[8], &[2, 8], &[2]],
    &[&[2, 0], &[8, 0], &[8], &[2, 8], &[2]],
    &[&[2, 4], &[0, 4], &[0], &[2, 0], &[2]],
    &[&[2, 4], &[8, 4], &[8], &[0, 8], &[0]],
];
const PLAIN_LINEAR_GELU: &[Shapes] =
    &[&[&[2, 3, 4], &[8, 4], &[3, 8]], &[&[2, 1], &[5, 1], &[1, 5]], &[&[0, 4], &[8, 4], &[2, 8]]];
const LINEAR_ONTO: &[Shapes] = &[
    &[&[2, 3, 4], &[8, 4], &[2, 3, 8]],
    &[&[2, 1], &[5, 1], &[2, 5]],
    &[&[0, 4], &[8, 4], &[0, 8]],
    &[&[2, 0], &[8, 0], &[2, 8]],
];
const BIASED_ONTO: &[Shapes] = &[
    &[&[2, 3, 4], &[8, 4], &[2, 3, 8], &[8]],
    &[&[2, 1], &[5, 1], &[2, 5], &[5]],
    &[&[0, 4], &[8, 4], &[0, 8], &[8]],
];

pub fn layers() -> Vec<OpCase> {
    vec![
        row("linear", "", PLAIN_LINEAR, |x| x[0].linear(&x[1], None)),
        row("linear", "with bias", LINEAR, |x| x[0].linear(&x[1], Some(&x[2]))),
        row("linear_gelu", "", PLAIN_LINEAR_GELU, |x| {
            x[0].linear_gelu(&x[1], None)?.linear(&x[2], None)
        }),
        row("linear_gelu", "with bias", LINEAR_GELU, |x| {
            x[0].linear_gelu(&x[1], Some(&x[2]))?.linear(&x[3], Some(&x[4]))
        }),
        row("linear_onto", "", LINEAR_ONTO, |x| x[0].linear_onto(&x[2], &x[1], None)),
        row("linear_onto", "with bias", BIASED_ONTO, |x| {
            x[0].linear_onto(&x[2], &x[1], Some(&x[3]))
        }),
        row("linear_onto", "of GELU", LINEAR_ONTO, |x| {
            Gelu::new(x[0].clone(), None)?.linear_onto(&x[2], &x[1], None)
        }),
    ]
}
