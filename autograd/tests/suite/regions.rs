//! Every row inside a checkpoint region: the same bits, dropout included.

use ferrotron_autograd::{Leaf, Var, WeightGrads, backward, checkpoint, checkpoint_discard_output};
use ferrotron_tensor::{DType, Device, Result, Tensor};
use std::sync::Arc;

use crate::inputs::{Seen, bits, cotangent, report, run, samples, which};
use crate::table::{OpCase, Shapes, table};

/// Value and gradients with the leaves captured by the region instead of given to it.
fn captured(case: &Arc<OpCase>, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    let leaves: Vec<Leaf> =
        inputs.iter().enumerate().map(|(i, x)| Leaf::new(format!("{i}"), x.clone())).collect();
    let (inside, case) = (leaves.clone(), case.clone());
    let y = checkpoint(&[], move |_| {
        Ok(vec![(case.f)(&inside.iter().map(Leaf::var).collect::<Result<Vec<_>>>()?)?])
    })?;
    backward(&[(&y[0], cotangent(&y[0])?)], WeightGrads::Now)?.run()?;
    let zeros = |leaf: &Leaf| Tensor::zeros(leaf.device(), leaf.dtype(), leaf.dims());
    let gradient = |leaf: &Leaf| leaf.gradient()?.map_or_else(|| zeros(leaf), Ok);
    let gradients = leaves.iter().map(gradient).collect::<Result<Vec<_>>>()?;
    Ok([y[0].value().clone()].into_iter().chain(gradients).collect())
}

/// The three ways: without a region, with the inputs given to it, with the leaves captured by it. In addition, a region
/// within a region, and one whose output is asked for again.
fn ways(case: &Arc<OpCase>, inputs: &[Tensor]) -> Result<[Vec<Tensor>; 5]> {
    let region = |x: &[Var]| {
        let case = case.clone();
        let operands: Vec<&Var> = x.iter().collect();
        Ok(checkpoint(&operands, move |x| Ok(vec![(case.f)(x)?]))?.remove(0))
    };
    let nested = |x: &[Var]| {
        let case = case.clone();
        let operands: Vec<&Var> = x.iter().collect();
        let outer = move |x: &[Var]| {
            let case = case.clone();
            checkpoint(&x.iter().collect::<Vec<_>>(), move |x| Ok(vec![(case.f)(x)?]))
        };
        Ok(checkpoint(&operands, outer)?.remove(0))
    };
    let discarded = |x: &[Var]| {
        let (case, operands) = (case.clone(), x.iter().collect::<Vec<_>>());
        let name = case.name();
        let y = checkpoint_discard_output(&operands, move |x| Ok(vec![(case.f)(x)?]))?.remove(0);
        let again = y.save().value()?;
        assert_eq!(bits(&again)?, bits(y.value())?, "{name}");
        Ok(y)
    };
    Ok([
        run(&case.f, inputs)?,
        run(&region, inputs)?,
        captured(case, inputs)?,
        run(&nested, inputs)?,
        run(&discarded, inputs)?,
    ])
}

fn compare(
    case: &Arc<OpCase>,
    shapes: Shapes,
    dtype: DType,
    failures: &mut Vec<String>,
) -> Result<()> {
    let device = Device::cpu(1)?;
    let inputs = samples(case, shapes, Seen::Contiguous, &device, dtype)?;
    let [plain, others @ ..] = ways(case, &inputs)?;
    for (way, other) in
        ["inputs given", "leaves captured", "nested", "discarded"].iter().zip(&others)
    {
        for (i, (want, got)) in plain.iter().zip(other).enumerate() {
            if bits(want)? != bits(got)? {
                let name = case.name();
                let (want, got) = (want.to_f64()?, got.to_f64()?);
                let what = which(i);
                failures.push(format!(
                    "{name} {shapes:?} {dtype}, {way}, {what}: want {want:?}, got {got:?}"
                ));
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_are_the_same_bits_in_a_checkpoint_region() {
    let mut failures = Vec::new();
    for case in table().into_iter().map(Arc::new) {
        for shapes in case.shapes {
            for dtype in [DType::F64, DType::F32, DType::BF16] {
                if let Err(error) = compare(&case, shapes, dtype, &mut failures) {
                    failures.push(format!("{} {shapes:?} {dtype}: {error}", case.name()));
                }
            }
        }
    }
    report(&failures);
}

#[test]
fn variables_returned_as_they_are_count_as_used() -> Result<()> {
    let device = Device::cpu(1)?;
    let leaf = |name, value| -> Result<Leaf> {
        Ok(Leaf::new(name, Tensor::from_slice(&device, &[value], &[1])?))
    };
    let (w, x) = (leaf("w", 3.0_f64)?, leaf("x", 0.5)?);
    let captured = w.clone();
    let both = checkpoint(&[&x.var()?], move |x| Ok(vec![captured.var()?, x[0].clone()]))?;
    both[0].mul(&both[1])?.backward()?;
    assert_eq!(w.gradient()?.expect("the captured leaf's").item()?, 0.5);
    assert_eq!(x.gradient()?.expect("the input's").item()?, 3.0);

    let outside = w.var()?.exp()?;
    let result = checkpoint(&[&x.var()?], move |_| Ok(vec![outside.clone()]));
    assert_eq!(
        result.unwrap_err().to_string(),
        "checkpoint: the region uses a variable made outside by exp; pass it as an input"
    );
    Ok(())
}
