//! Finite differences of every row. Inputs are views, in every subset of wanted gradients; inputs and results are used
//! twice; dims are 1 and 0.

use ferrotron_autograd::{GradcheckOptions, Leaf, Var, gradcheck, gradcheck_leaves};
use ferrotron_tensor::{DType, Device, Result};

use crate::inputs::{Seen, report, samples};
use crate::table::{OpCase, Shapes, table};

/// Small inputs in full, others element by element under a random cotangent.
const OPTIONS: GradcheckOptions =
    GradcheckOptions { relative: 1e-6, absolute: 1e-8, full: 48, directions: 4, seed: 0 };

/// Calls `check` for every row and each of its shapes, and reports all that fail.
fn for_each_case(check: impl Fn(&OpCase, Shapes) -> Vec<(String, Result<()>)>) {
    let mut failures = Vec::new();
    for case in table() {
        for shapes in case.shapes {
            for (how, result) in check(&case, shapes) {
                if let Err(error) = result {
                    failures.push(format!("{} {shapes:?}, {how}: {error}", case.name()));
                }
            }
        }
    }
    report(&failures);
}

#[test]
fn gradients_are_the_derivatives_through_any_view() {
    let device = Device::cpu(1).unwrap();
    for_each_case(|case, shapes| {
        let check = |seen: Seen| {
            let inputs = samples(case, shapes, seen, &device, DType::F64)?;
            let f = |leaves: &[Var]| {
                let view = |(leaf, dims): (&Var, &&[usize])| seen.view(leaf, dims);
                (case.f)(&leaves.iter().zip(shapes).map(view).collect::<Result<Vec<_>>>()?)
            };
            gradcheck(f, &inputs, &OPTIONS)
        };
        Seen::ALL.map(|seen| (format!("{seen:?}"), check(seen))).into()
    });
}

#[test]
fn every_subset_of_wanted_gradients_is_right() {
    let device = Device::cpu(1).unwrap();
    for_each_case(|case, shapes| {
        let check = |subset: usize| {
            let inputs = samples(case, shapes, Seen::Contiguous, &device, DType::F64)?;
            let wanted = |i: &usize| subset >> i & 1 == 1;
            let leaves: Vec<Leaf> = (0..inputs.len())
                .filter(wanted)
                .map(|i| Ok(Leaf::new(format!("input {i}"), inputs[i].copy()?)))
                .collect::<Result<_>>()?;
            let f = || {
                let mut wanted_leaves = leaves.iter();
                let variable = |i: usize| match wanted(&i).then(|| wanted_leaves.next()).flatten() {
                    Some(leaf) => leaf.var(),
                    None => Ok(Var::constant(inputs[i].clone())),
                };
                (case.f)(&(0..inputs.len()).map(variable).collect::<Result<Vec<_>>>()?)
            };
            gradcheck_leaves(f, &leaves, &OPTIONS)
        };
        // The full set is the business of the test above.
        (1..(1_usize << shapes.len()) - 1)
            .map(|subset| (format!("wanted {subset:03b}, input 0 last"), check(subset)))
            .collect()
    });
}

#[test]
fn a_result_used_twice_and_an_input_used_twice_add_up() {
    let device = Device::cpu(1).unwrap();
    for_each_case(|case, shapes| {
        let inputs = samples(case, shapes, Seen::Contiguous, &device, DType::F64).unwrap();
        let twice = |x: &[Var]| {
            let y = (case.f)(x)?;
            y.mul(&y)?.add(&y)
        };
        let mut checks = vec![("result twice".into(), gradcheck(twice, &inputs, &OPTIONS))];
        if shapes.len() > 1 && shapes.iter().all(|dims| dims == &shapes[0]) {
            let same = |x: &[Var]| (case.f)(&vec![x[0].clone(); shapes.len()]);
            checks.push(("one leaf as all inputs".into(), gradcheck(same, &inputs[..1], &OPTIONS)));
        }
        checks
    });
}
