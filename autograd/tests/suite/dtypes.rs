//! Every row in f32, bf16 and f16 against f64 at the same inputs.

use ferrotron_tensor::{DType, Device, Result};

use crate::inputs::{Seen, report, run, samples, which};
use crate::table::{OpCase, Shapes, table};

/// Allowed difference: a dozen roundings of numbers as large as the largest that is involved. Values are
/// rounded once, gradients also through what was kept in the narrow dtype.
fn tolerance(dtype: DType, want: &[f64]) -> f64 {
    let largest = want.iter().filter(|x| x.is_finite()).fold(1.0, |a: f64, b| a.max(b.abs()));
    12.0 * dtype.epsilon() * largest
}

fn compare(case: &OpCase, shapes: Shapes, dtype: DType, failures: &mut Vec<String>) -> Result<()> {
    let device = Device::cpu(1)?;
    let answers = |dtype| run(&case.f, &samples(case, shapes, Seen::Contiguous, &device, dtype)?);
    for (i, (want, got)) in answers(DType::F64)?.iter().zip(&answers(dtype)?).enumerate() {
        let (want, got) = (want.to_f64()?, got.to_f64()?);
        let allowed = tolerance(dtype, &want);
        for (element, (want, got)) in want.iter().zip(&got).enumerate() {
            if !(want == got || (want - got).abs() <= allowed) {
                let (name, what) = (case.name(), which(i));
                failures.push(format!(
                    "{name} {shapes:?} {dtype}, {what}, element {element}: got {got}, want {want} +- {allowed}"
                ));
            }
        }
    }
    Ok(())
}

#[test]
fn narrow_dtypes_agree_with_f64() {
    let mut failures = Vec::new();
    for case in table() {
        for shapes in case.shapes {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                if let Err(error) = compare(&case, shapes, dtype, &mut failures) {
                    failures.push(format!("{} {shapes:?} {dtype}: {error}", case.name()));
                }
            }
        }
    }
    report(&failures);
}

/// A gradient comes back in the dtype of its input, whatever the result's.
#[test]
fn gradients_have_the_dtype_of_their_input() -> Result<()> {
    let device = Device::cpu(1)?;
    for case in table() {
        for dtype in [DType::F32, DType::BF16] {
            let inputs = samples(&case, case.shapes[0], Seen::Contiguous, &device, dtype)?;
            for gradient in &run(&case.f, &inputs)?[1..] {
                assert_eq!(gradient.dtype(), dtype, "{}", case.name());
            }
        }
    }
    Ok(())
}
