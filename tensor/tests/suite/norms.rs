//! LayerNorm and RMSNorm against naive f64 arithmetic and finite differences.

use crate::reference::*;
use ferrotron_tensor::ops::layer_norm::*;
use ferrotron_tensor::ops::rms_norm::*;
use ferrotron_tensor::{DType, Device, Result, Tensor};

const EPS: f64 = 1e-5;

/// (y, mean, rstd) of rows of `width`; `centred` tells LayerNorm from RMSNorm.
fn naive(x: &[f64], weight: &[f64], bias: &[f64], centred: bool) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let n = weight.len() as f64;
    let (mut y, mut means, mut rstds) = (vec![], vec![], vec![]);
    for row in x.chunks(weight.len()) {
        let mean = if centred { row.iter().sum::<f64>() / n } else { 0.0 };
        let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n;
        let rstd = 1.0 / (variance + EPS).sqrt();
        y.extend(row.iter().zip(weight).zip(bias).map(|((x, w), b)| (x - mean) * rstd * w + b));
        means.push(mean);
        rstds.push(rstd);
    }
    (y, means, rstds)
}

#[test]
fn forward_agrees_with_naive_arithmetic_in_every_dtype() -> Result<()> {
    let device = Device::cpu(2)?;
    for dtype in FLOATS {
        for (rows, width) in [(1, 1), (3, 2), (5, 63), (4, 64), (7, 65), (130, 130), (33, 768)] {
            let x = normal(&device, dtype, &[rows, width], "x")?;
            let weight = normal(&device, dtype, &[width], "weight")?;
            let bias = normal(&device, dtype, &[width], "bias")?;
            let zeros = vec![0.0; width];
            // A width of 1 divides x - mean = 0 by sqrt(eps): its error is that of the mean.
            let tolerance =
                16.0 * dtype.accumulator().epsilon() * (1.0 + 1.0 / EPS.sqrt()) + dtype.epsilon();
            let (xs, ws, bs) = (x.to_f64()?, weight.to_f64()?, bias.to_f64()?);
            let name = format!("{dtype} ({rows}, {width})");

            let (y, mean, rstd) = layer_norm(&x, &weight, Some(&bias), EPS)?;
            let want = naive(&xs, &ws, &bs, true);
            assert_eq!((y.dims(), mean.dims(), rstd.dims()), (x.dims(), &[rows][..], &[rows][..]));
            assert_close(&name, &y, &want.0, tolerance);
            assert_close(&name, &mean, &want.1, 8.0 * dtype.accumulator().epsilon());
            assert_close(&name, &rstd, &want.2, 64.0 * dtype.accumulator().epsilon());
            let (y, ..) = layer_norm(&x, &weight, None, EPS)?;
            assert_close(&name, &y, &naive(&xs, &ws, &zeros, true).0, tolerance);

            let (y, rstd) = rms_norm(&x, &weight, EPS)?;
            let want = naive(&xs, &ws, &zeros, false);
            assert_close(&name, &y, &want.0, tolerance);
            assert_close(&name, &rstd, &want.2, 64.0 * dtype.accumulator().epsilon());
        }
    }
    Ok(())
}

#[test]
fn gradients_of_weights_are_the_same_in_registers_and_behind_them() -> Result<()> {
    let device = Device::cpu(1)?;
    // Four rows together and one alone; columns 0 to 7 are in a register of 40 columns, and in none of 7.
    for dtype in FLOATS {
        let (x, dy) =
            (normal(&device, dtype, &[5, 40], "x")?, normal(&device, dtype, &[5, 40], "dy")?);
        let weight = normal(&device, dtype, &[40], "weight")?;
        let (_, mean, rstd) = layer_norm(&x, &weight, None, EPS)?;
        let (_, dw, db) = layer_norm_backward(&dy, &x, &mean, &rstd, &weight, None)?;
        let first = |x: &Tensor| x.narrow(-1, 0, 7);
        let (_, dw7, db7) =
            layer_norm_backward(&first(&dy)?, &first(&x)?, &mean, &rstd, &first(&weight)?, None)?;
        for (all, few) in [(dw, dw7), (db, db7)] {
            assert_eq!(first(&all)?.to_f64()?, few.to_f64()?, "{dtype}");
        }
    }
    Ok(())
}

#[test]
fn a_large_mean_does_not_spoil_the_variance() -> Result<()> {
    let device = Device::cpu(1)?;
    let x = of(&device, DType::F32, &[1, 4], &[1e4, 1e4 + 1.0, 1e4 + 2.0, 1e4 + 3.0])?;
    let weight = Tensor::full(&device, DType::F32, &[4], 1.0)?;
    let (_, mean, rstd) = layer_norm(&x, &weight, None, 0.0)?;
    assert_eq!(mean.item()?, 10001.5);
    assert_close("rstd", &rstd, &[1.0 / 1.25_f64.sqrt()], 4.0 * f64::from(f32::EPSILON));
    Ok(())
}

#[test]
fn gradients_agree_with_finite_differences() -> Result<()> {
    let device = Device::cpu(1)?;
    for (rows, width) in [(1, 1), (2, 3), (3, 5), (35, 2), (2, 66)] {
        let dims = [rows, width];
        let x = normal(&device, DType::F64, &dims, "x")?;
        let dy = normal(&device, DType::F64, &dims, "dy")?;
        let weight = normal(&device, DType::F64, &[width], "weight")?;
        let bias = normal(&device, DType::F64, &[width], "bias")?;
        // 0.1 keeps a row of one element from a curvature of eps^-3/2.
        let (_, mean, rstd) = layer_norm(&x, &weight, Some(&bias), 0.1)?;
        let (dx, dw, db) = layer_norm_backward(&dy, &x, &mean, &rstd, &weight, None)?;
        let layer =
            |x: &Tensor, w: &Tensor, b: &Tensor| dot(&layer_norm(x, w, Some(b), 0.1)?.0, &dy);
        assert_gradient("layer_norm dx", &x, &dx, |x| layer(x, &weight, &bias))?;
        assert_gradient("layer_norm dweight", &weight, &dw, |w| layer(&x, w, &bias))?;
        assert_gradient("layer_norm dbias", &bias, &db, |b| layer(&x, &weight, b))?;

        let (_, rstd) = rms_norm(&x, &weight, 0.1)?;
        let (dx, dw) = rms_norm_backward(&dy, &x, &rstd, &weight, None)?;
        let rms = |x: &Tensor, w: &Tensor| dot(&rms_norm(x, w, 0.1)?.0, &dy);
        assert_gradient("rms_norm dx", &x, &dx, |x| rms(x, &weight))?;
        assert_gradient("rms_norm dweight", &weight, &dw, |w| rms(&x, w))?;
    }
    Ok(())
}

#[test]
fn gradients_in_every_dtype_agree_with_f64() -> Result<()> {
    let device = Device::cpu(2)?;
    for dtype in FLOATS {
        let (rows, width) = (200, 70);
        let make = |dims: &[usize], site| normal(&device, dtype, dims, site);
        let (x, dy, weight) =
            (make(&[rows, width], "x")?, make(&[rows, width], "dy")?, make(&[width], "w")?);
        let wide = |t: &Tensor| of(&device, DType::F64, t.dims(), &t.to_f64()?);
        let (x64, dy64, weight64) = (wide(&x)?, wide(&dy)?, wide(&weight)?);
        let sums = 4.0 * rows as f64 * dtype.accumulator().epsilon();
        let each = 64.0 * dtype.accumulator().epsilon() + dtype.epsilon();

        let (_, mean, rstd) = layer_norm(&x, &weight, None, EPS)?;
        let got = layer_norm_backward(&dy, &x, &mean, &rstd, &weight, None)?;
        let (_, mean64, rstd64) = layer_norm(&x64, &weight64, None, EPS)?;
        let want = layer_norm_backward(&dy64, &x64, &mean64, &rstd64, &weight64, None)?;
        assert_close("dx", &got.0, &want.0.to_f64()?, each);
        assert_close("dweight", &got.1, &want.1.to_f64()?, sums);
        assert_close("dbias", &got.2, &want.2.to_f64()?, sums);
        let only = |before| layer_norm_backward_input(&dy, &x, &mean, &rstd, &weight, before);
        assert_same_bits("dx alone", &only(None)?, &got.0);
        assert_same_bits("dx and another gradient", &only(Some(&x))?, &got.0.add(&x)?);

        let (_, rstd) = rms_norm(&x, &weight, EPS)?;
        let got = rms_norm_backward(&dy, &x, &rstd, &weight, None)?;
        let (_, rstd64) = rms_norm(&x64, &weight64, EPS)?;
        let want = rms_norm_backward(&dy64, &x64, &rstd64, &weight64, None)?;
        assert_close("dx", &got.0, &want.0.to_f64()?, each);
        assert_close("dweight", &got.1, &want.1.to_f64()?, sums);
        let only = |before| rms_norm_backward_input(&dy, &x, &rstd, &weight, before);
        assert_same_bits("dx alone", &only(None)?, &got.0);
        assert_same_bits("dx and another gradient", &only(Some(&x))?, &got.0.add(&x)?);
    }
    Ok(())
}

#[test]
fn bits_do_not_depend_on_threads_or_strides() -> Result<()> {
    let run = |threads: usize| -> Result<Vec<Tensor>> {
        let device = Device::cpu(threads)?;
        let x = normal(&device, DType::F32, &[300, 2, 96], "x")?;
        let dy = normal(&device, DType::F32, &[300, 2, 96], "dy")?;
        let weight = normal(&device, DType::F32, &[96], "w")?;
        let (y, mean, rstd) = layer_norm(&x, &weight, Some(&weight), EPS)?;
        let (dx, dw, db) = layer_norm_backward(&dy, &x, &mean, &rstd, &weight, None)?;
        // The same values seen through other strides.
        let strided = |t: &Tensor| t.transpose(0, 2)?.contiguous()?.transpose(0, 2);
        let (x, dy) = (strided(&x)?, strided(&dy)?);
        assert_same_bits("y", &y, &layer_norm(&x, &weight, Some(&weight), EPS)?.0);
        let (dx2, dw2, db2) = layer_norm_backward(&dy, &x, &mean, &rstd, &weight, None)?;
        for (a, b) in [(&dx, &dx2), (&dw, &dw2), (&db, &db2)] {
            assert_same_bits("strided", a, b);
        }
        let broadcast = x.narrow(0, 3, 1)?.broadcast_to(&[300, 2, 96])?;
        let dense = broadcast.contiguous()?;
        let (a, b) = (rms_norm(&broadcast, &weight, EPS)?.0, rms_norm(&dense, &weight, EPS)?.0);
        assert_same_bits("broadcast", &a, &b);
        Ok(vec![y, mean, rstd, dx, dw, db])
    };
    let one = run(1)?;
    for threads in [2, 3] {
        for (a, b) in one.iter().zip(run(threads)?) {
            assert_same_bits(&format!("{threads} threads"), a, &b);
        }
    }
    Ok(())
}

#[test]
fn empty_tensors_pass() -> Result<()> {
    let device = Device::cpu(2)?;
    for dims in [[0, 4], [3, 0]] {
        let x = Tensor::zeros(&device, DType::F32, &dims)?;
        let weight = Tensor::full(&device, DType::F32, &dims[1..], 1.0)?;
        let (y, mean, rstd) = layer_norm(&x, &weight, Some(&weight), EPS)?;
        assert_eq!((y.dims(), mean.dims()), (&dims[..], &dims[..1]));
        let (dx, dw, db) = layer_norm_backward(&y, &x, &mean, &rstd, &weight, None)?;
        assert_eq!((dx.dims(), dw.dims(), db.dims()), (&dims[..], &dims[1..], &dims[1..]));
        assert!(dw.to_f64()?.iter().all(|&x| x == 0.0));
        let (y, rstd) = rms_norm(&x, &weight, EPS)?;
        assert_eq!(rms_norm_backward(&y, &x, &rstd, &weight, None)?.0.dims(), dims);
    }
    Ok(())
}

#[test]
fn wrong_operands_are_refused_by_name() -> Result<()> {
    let device = Device::cpu(1)?;
    let x = Tensor::zeros(&device, DType::F32, &[2, 4])?;
    let short = Tensor::zeros(&device, DType::F32, &[3])?;
    let wide = Tensor::zeros(&device, DType::F64, &[4])?;
    let weight = Tensor::zeros(&device, DType::F32, &[4])?;
    let ids = Tensor::zeros(&device, DType::U32, &[4])?;
    let says = |r: Result<(Tensor, Tensor, Tensor)>| r.unwrap_err().to_string();
    assert_eq!(
        says(layer_norm(&x, &short, None, EPS)),
        "layer_norm: x [2, 4] needs a weight [4], got [3]"
    );
    assert_eq!(
        says(layer_norm(&x, &weight, Some(&short), EPS)),
        "layer_norm: x [2, 4] needs a bias [4], got [3]"
    );
    assert_eq!(
        says(layer_norm(&x, &wide, None, EPS)),
        "layer_norm: operands differ: lhs f32, rhs f64; cast one of them"
    );
    assert_eq!(
        says(layer_norm(&ids, &ids, None, EPS)),
        "layer_norm: takes floating-point tensors, got u32"
    );
    assert_eq!(
        says(layer_norm(&x, &weight, None, -1.0)),
        "layer_norm: eps must be finite and at least 0, got -1"
    );
    let scalar = Tensor::zeros(&device, DType::F32, &[])?;
    assert_eq!(
        rms_norm(&scalar, &weight, EPS).unwrap_err().to_string(),
        "rms_norm: x is a scalar, needs at least one dim"
    );
    assert_eq!(
        rms_norm_backward(&x, &x, &weight, &weight, None).unwrap_err().to_string(),
        "rms_norm_backward: x [2, 4] needs rstd [2], got [4]"
    );
    assert_eq!(
        rms_norm_backward(&weight, &x, &weight, &weight, None).unwrap_err().to_string(),
        "rms_norm_backward: dy [4] is not of x's [2, 4]"
    );
    let rstd = x.narrow(-1, 0, 1)?.reshape(&[2])?;
    assert_eq!(
        rms_norm_backward(&x, &x, &rstd, &weight, Some(&weight)).unwrap_err().to_string(),
        "rms_norm_backward: the gradient before [4] is not of x's [2, 4]"
    );
    Ok(())
}

/// Weights in f32 beside 16-bit activations are those of the same rows in f32: the sums add up in f32 either way.
#[test]
fn wide_weights_are_not_rounded() -> Result<()> {
    let device = Device::cpu(2)?;
    for dtype in [DType::BF16, DType::F16] {
        let (rows, width) = (70, 65);
        let [x, dy] = ["x", "dy"].map(|site| normal(&device, dtype, &[rows, width], site));
        let [weight, bias] = ["w", "b"].map(|site| normal(&device, DType::F32, &[width], site));
        let (x, dy, weight, bias) = (x?, dy?, weight?, bias?);
        let [wide_x, wide_dy] = [&x, &dy].map(|tensor| tensor.cast(DType::F32));
        let (wide_x, wide_dy) = (wide_x?, wide_dy?);

        let (y, mean, rstd) = layer_norm(&x, &weight, Some(&bias), EPS)?;
        let want = layer_norm(&wide_x, &weight, Some(&bias), EPS)?.0.cast(dtype)?;
        assert_eq!((y.dtype(), y.to_f64()?), (dtype, want.to_f64()?));
        let (dx, dw, db) = layer_norm_backward(&dy, &x, &mean, &rstd, &weight, None)?;
        let want = layer_norm_backward(&wide_dy, &wide_x, &mean, &rstd, &weight, None)?;
        assert_eq!((dw.dtype(), db.dtype()), (DType::F32, DType::F32));
        assert_eq!((dw.to_f64()?, db.to_f64()?), (want.1.to_f64()?, want.2.to_f64()?));
        assert_eq!(dx.to_f64()?, want.0.cast(dtype)?.to_f64()?);

        let (y, rstd) = rms_norm(&x, &weight, EPS)?;
        let want = rms_norm(&wide_x, &weight, EPS)?.0.cast(dtype)?;
        assert_eq!((y.dtype(), y.to_f64()?), (dtype, want.to_f64()?));
        let (dx, dw) = rms_norm_backward(&dy, &x, &rstd, &weight, None)?;
        let want = rms_norm_backward(&wide_dy, &wide_x, &rstd, &weight, None)?;
        assert_eq!(dw.to_f64()?, want.1.to_f64()?);
        assert_eq!(dx.to_f64()?, want.0.cast(dtype)?.to_f64()?);

        let error = rms_norm(&x, &weight.cast(DType::F64)?, EPS).unwrap_err().to_string();
        assert!(error.contains("operands differ"), "{error}");
    }
    Ok(())
}
