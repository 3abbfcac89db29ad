//! Every row on one and on two threads: the same bits.

use ferrotron_tensor::{DType, Device, Result};

use crate::inputs::{bits, report, run, tensor, values, which};
use crate::table::{OpCase, table};

/// Dims of the table are multiplied with this, so that loops are long enough to be shared out.
const SCALE: usize = 8;

fn compare(case: &OpCase, dtype: DType, failures: &mut Vec<String>) -> Result<()> {
    let answers = |threads| {
        let device = Device::cpu(threads)?;
        let sample = |(input, dims): (usize, &&[usize])| {
            let larger = |&size: &usize| if size > 1 { SCALE * size } else { size };
            let dims: Vec<usize> = dims.iter().map(larger).collect();
            let values = values(case.domain, input, dims.iter().product());
            tensor(&device, dtype, &dims, &values)
        };
        let inputs: Vec<_> =
            case.shapes[0].iter().enumerate().map(sample).collect::<Result<_>>()?;
        run(&case.f, &inputs)
    };
    for (i, (one, two)) in answers(1)?.iter().zip(&answers(2)?).enumerate() {
        if bits(one)? != bits(two)? {
            failures.push(format!("{} {dtype}: {} differs", case.name(), which(i)));
        }
    }
    Ok(())
}

#[test]
fn one_and_two_threads_give_the_same_bits() {
    let mut failures = Vec::new();
    for case in table() {
        for dtype in [DType::F32, DType::BF16] {
            if let Err(error) = compare(&case, dtype, &mut failures) {
                failures.push(format!("{} {dtype}: {error}", case.name()));
            }
        }
    }
    report(&failures);
}
