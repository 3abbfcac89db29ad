use super::*;
use crate::Device;
use crate::ops::testing::*;

/// Reduces the elements of each result, in f64.
fn naive(
    x: &[f64],
    dims: &[usize],
    goes: &[usize],
    start: f64,
    f: impl Fn(f64, f64) -> f64,
) -> Vec<f64> {
    let kept: Vec<usize> = (0..dims.len()).filter(|d| !goes.contains(d)).collect();
    let mut out = vec![start; kept.iter().map(|&d| dims[d]).product()];
    for (flat, &x) in x.iter().enumerate() {
        let coordinate = |d: usize| flat / dims[d + 1..].iter().product::<usize>() % dims[d];
        let at = kept.iter().fold(0, |at, &d| at * dims[d] + coordinate(d));
        out[at] = f(out[at], x);
    }
    out
}

const CASES: &[(&[usize], &[isize])] = &[
    (&[], &[]),
    (&[5], &[0]),
    (&[3, 4], &[1]),
    (&[3, 4], &[0]),
    (&[700, 33], &[0]),
    (&[33, 700], &[-1]),
    (&[2, 9000], &[1]),
    (&[4, 3, 5], &[1]),
    (&[4, 3, 5], &[0, 2]),
    (&[4, 3, 5], &[2, 0, 1]),
    (&[4, 3, 5], &[]),
    (&[2, 300, 3, 5], &[1, 2]),
    (&[1, 7, 1], &[0]),
    (&[0, 3], &[0]),
    (&[3, 0], &[0]),
];

#[test]
fn reductions_equal_naive_ones_in_every_dtype_and_layout() {
    let device = Device::cpu(2).unwrap();
    for &(dims, reduced) in CASES {
        let values = values(dims.iter().product(), 1);
        let goes: Vec<usize> =
            reduced.iter().map(|d| d.rem_euclid(dims.len() as isize) as usize).collect();
        let n: usize = goes.iter().map(|&d| dims[d]).product();
        let sums = naive(&values, dims, &goes, 0.0, |a, x| a + x);
        let magnitude = naive(&values, dims, &goes, 0.0, |a, x| a + x.abs());
        let largest = magnitude.iter().fold(1.0, |a: f64, x| a.max(*x));
        let means: Vec<f64> = sums.iter().map(|x| x / n as f64).collect();
        let maxima = naive(&values, dims, &goes, f64::NEG_INFINITY, f64::max);
        let exps = naive(&values, dims, &goes, 0.0, |a, x| a + x.exp());
        let logs: Vec<f64> = exps.iter().map(|x| x.ln()).collect();
        for dtype in FLOATS {
            // One rounding of the result, and of up to 128 + 32 partial sums in f32.
            let eps = dtype.epsilon().max(160.0 * f32::EPSILON as f64 * largest);
            let eps = if dtype == DType::F64 { 160.0 * dtype.epsilon() * largest } else { eps };
            for x in variants(&tensor(&device, dtype, dims, &values)) {
                let what = |op: &str| format!("{op} {dims:?} over {reduced:?} {dtype}");
                let keep = KeepDims::Drop;
                assert_close(&what("sum"), &sum(&x, reduced, keep).unwrap(), &sums, eps);
                assert_close(&what("mean"), &mean(&x, reduced, keep).unwrap(), &means, eps);
                let logs_got = log_sum_exp(&x, reduced, keep).unwrap();
                assert_close(&what("log_sum_exp"), &logs_got, &logs, 4.0 * eps);
                if n == 0 {
                    assert!(
                        message(amax(&x, reduced, keep)).starts_with("amax: nothing to choose")
                    );
                } else {
                    assert_close(&what("amax"), &amax(&x, reduced, keep).unwrap(), &maxima, 0.0);
                }
                let kept = sum(&x, reduced, KeepDims::Keep).unwrap();
                assert_eq!(kept.rank(), dims.len());
                assert!(goes.iter().all(|&d| kept.dims()[d] == 1), "{kept:?}");
            }
        }
    }
}

#[test]
fn argmax_names_the_first_maximum_along_any_dim() {
    let device = Device::cpu(2).unwrap();
    let x = tensor(&device, DType::F32, &[2, 3], &[1.0, 5.0, 5.0, 7.0, 0.0, f64::NAN]);
    let ids = |dim| argmax(&x, dim, KeepDims::Drop).unwrap().to_vec::<i64>().unwrap();
    assert_eq!(ids(-1), [1, 2]);
    assert_eq!(ids(0), [1, 0, 1]);
    assert_eq!(argmax(&x, 0, KeepDims::Keep).unwrap().dims(), [1, 3]);
    let empty = Tensor::zeros(&device, DType::F32, &[2, 0]).unwrap();
    assert_eq!(
        message(argmax(&empty, 1, KeepDims::Drop)),
        "argmax: nothing to choose from in dims [1] of [2, 0]"
    );
}

#[test]
fn extremes_do_not_overflow_and_nan_shows() {
    let device = Device::cpu(1).unwrap();
    let inf = f64::INFINITY;
    let rows = [[1000.0, 1000.0], [-inf, -inf], [inf, 1.0], [f64::NAN, 1.0]];
    let x = tensor(&device, DType::F32, &[4, 2], &rows.concat());
    let logs = log_sum_exp(&x, &[1], KeepDims::Drop).unwrap();
    assert_close(
        "log_sum_exp",
        &logs,
        &[1000.0 + 2f64.ln(), -inf, inf, f64::NAN],
        f32::EPSILON.into(),
    );
    let maxima = amax(&x, &[1], KeepDims::Drop).unwrap();
    assert_close("max", &maxima, &[1000.0, -inf, inf, f64::NAN], 0.0);
}

#[test]
fn sum_to_undoes_broadcasts() {
    let device = Device::cpu(2).unwrap();
    let values = values(2 * 3 * 4, 2);
    let x = tensor(&device, DType::F64, &[2, 3, 4], &values);
    for (dims, goes) in [
        (&[4][..], &[0, 1][..]),
        (&[3, 4], &[0]),
        (&[3, 1], &[0, 2]),
        (&[2, 1, 4], &[1]),
        (&[1, 1, 1], &[0, 1, 2]),
        (&[], &[0, 1, 2]),
    ] {
        let want = naive(&values, &[2, 3, 4], goes, 0.0, |a, x| a + x);
        for x in variants(&x) {
            let got = sum_to_size(&x, dims).unwrap();
            assert_eq!(got.dims(), dims);
            assert_close("sum_to_size", &got, &want, 64.0 * f64::EPSILON);
        }
    }
    assert_eq!(sum_to_size(&x, &[2, 3, 4]).unwrap().buffer_id(), x.buffer_id());
    assert_eq!(
        message(sum_to_size(&x, &[2, 4])),
        "sum_to_size: [2, 4] does not broadcast to [2, 3, 4]"
    );
}

#[test]
fn the_number_of_threads_does_not_show() {
    let values = values(600 * 130, 3);
    assert_same_bits("reduce", |device| {
        let x = tensor(device, DType::F32, &[600, 130], &values);
        let row = x.reshape(&[600 * 130])?;
        Ok(vec![
            sum_to_size(&x, &[130])?,
            sum(&x, &[1], KeepDims::Drop)?,
            sum_all(&row)?,
            log_sum_exp(&x, &[0], KeepDims::Drop)?,
            mean(&x, &[0, 1], KeepDims::Keep)?,
        ])
    });
}

#[test]
fn errors_name_the_op_and_the_dims() {
    let device = Device::cpu(1).unwrap();
    let x = Tensor::zeros(&device, DType::F32, &[2, 3]).unwrap();
    assert_eq!(message(sum(&x, &[2], KeepDims::Drop)), "sum: there is no dim 2 in [2, 3]");
    assert_eq!(message(sum(&x, &[0, -2], KeepDims::Drop)), "sum: dim -2 is given twice in [0, -2]");
    let ids = Tensor::zeros(&device, DType::U32, &[2]).unwrap();
    assert_eq!(
        message(sum(&ids, &[0], KeepDims::Drop)),
        "sum: takes floating-point tensors, got u32"
    );
}
