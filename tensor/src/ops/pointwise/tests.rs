use super::*;
use crate::ops::testing::bits;
use crate::{DType, Device};

fn tensor(dims: &[usize], f: impl Fn(usize) -> f64) -> Result<Tensor> {
    let n = dims.iter().product();
    Tensor::from_slice(&Device::cpu(2)?, &(0..n).map(f).collect::<Vec<_>>(), dims)
}

#[test]
fn binary_operations_broadcast_any_strides() -> Result<()> {
    let device = Device::cpu(2)?;
    let a = Tensor::from_slice(&device, &(0..6).map(f64::from).collect::<Vec<_>>(), &[2, 3])?;
    let b = Tensor::from_slice(&device, &[10.0, 20.0, 30.0], &[3])?;
    assert_eq!(a.add(&b)?.to_f64()?, [10.0, 21.0, 32.0, 13.0, 24.0, 35.0]);
    assert_eq!(b.sub(&a)?.to_f64()?, [10.0, 19.0, 28.0, 7.0, 16.0, 25.0]);
    let t = a.transpose(0, 1)?; // (3, 2)
    assert_eq!(t.mul(&b.reshape(&[3, 1])?)?.to_f64()?, [0.0, 30.0, 20.0, 80.0, 60.0, 150.0]);
    assert_eq!(t.add(&t)?.to_f64()?, [0.0, 6.0, 2.0, 8.0, 4.0, 10.0]);
    let error = a.add(&t).unwrap_err();
    assert_eq!(error.to_string(), "add: shapes do not broadcast: lhs [2, 3], rhs [3, 2]");
    Ok(())
}

#[test]
fn strided_parts_are_added_to_and_copied_into() -> Result<()> {
    let device = &Device::cpu(2)?;
    let ramp = |dims: &[usize], first: usize, dtype| {
        let values: Vec<_> =
            (first..first + dims.iter().product::<usize>()).map(|i| i as f64).collect();
        Tensor::from_slice(device, &values, dims)?.cast(dtype)
    };
    type Part<'a> = &'a dyn Fn(&mut Tensor, &dyn Fn(&mut Tensor) -> Result<()>) -> Result<()>;
    let parts: [(Part, &[usize]); 4] = [
        (&|x, f| x.narrow_mut(1, 2, 3, f), &[5, 3]),
        (&|x, f| x.narrow_mut(1, 4, 1, f), &[5, 1]),
        (&|x, f| x.narrow_mut(1, 1, 0, f), &[5, 0]),
        (&|x, f| x.narrow_mut(0, 3, 2, f), &[2, 6]),
    ];
    for dtype in [DType::F32, DType::BF16] {
        let x = || ramp(&[5, 6], 0, dtype);
        for (part, dims) in &parts {
            let y = ramp(dims, 100, dtype)?;
            let (mut added, mut copied) = (x()?, x()?);
            part(&mut added, &|x| add_assign(x, &y))?;
            part(&mut copied, &|x| x.copy_from(&y))?;
            // The elements of the part are those that a copy changes.
            let mut ys = y.to_f64()?.into_iter();
            let [before, added, copied] = [x()?, added, copied].map(|x| x.to_f64().unwrap());
            for (i, &x) in before.iter().enumerate() {
                let y = if copied[i] == x { None } else { ys.next() };
                assert_eq!([added[i], copied[i]], y.map_or([x, x], |y| [x + y, y]), "{dims:?} {i}");
            }
            assert_eq!(ys.next(), None);
        }
        let (mut turned, y) = (x()?.transpose(0, 1)?, ramp(&[6, 5], 0, dtype)?);
        add_assign(&mut turned, &y)?;
        let want = x()?.transpose(0, 1)?.add(&y)?;
        assert_eq!(turned.to_f64()?, want.to_f64()?);
        turned.copy_from(&y)?;
        assert_eq!(turned.to_f64()?, y.to_f64()?);
    }
    Ok(())
}

#[test]
fn gelu_and_its_gradient_in_one_pass_have_the_bits_of_two() -> Result<()> {
    // Whole vectors and some elements behind them, and more than one thread takes.
    for n in [0, 7, 64, 300_001] {
        let x = tensor(&[n], |i| (i as f64 * 0.618_033_988_749).fract() * 24.0 - 12.0)?;
        let dy = tensor(&[n], |i| (i as f64 * 0.754_877_666).fract() - 0.5)?;
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            let (x, dy) = (x.cast(dtype)?, dy.cast(dtype)?);
            let [value, dx] = gelu_and_backward(dy.copy()?, &x)?;
            let want = [
                unary(Unary::GeluTanh, 0.0, &x)?,
                unary_backward(Unary::GeluTanh, 0.0, dy, Some(&x))?,
            ];
            for (got, want) in [value, dx].iter().zip(&want) {
                assert!(bits(got) == bits(want), "{n} of {dtype}");
            }
        }
    }
    Ok(())
}

#[test]
fn every_unary_row_agrees_across_dtypes() -> Result<()> {
    let n = 2000;
    let x = tensor(&[n], |i| 0.01 + 3.0 * i as f64 / n as f64)?;
    for &op in Unary::ALL {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let rounded = x.cast(dtype)?;
            let want = unary(op, 1.5, &rounded.cast(DType::F64)?)?.to_f64()?;
            let got = unary(op, 1.5, &rounded)?.to_f64()?;
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let tolerance = 4.0 * dtype.epsilon() * want.abs().max(1.0);
                assert!(
                    (got - want).abs() <= tolerance,
                    "{} {dtype} [{i}]: got {got}, want {want}",
                    op.name()
                );
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_reuse_a_unique_buffer() -> Result<()> {
    let x = tensor(&[4], |i| i as f64)?;
    let dy = tensor(&[4], |_| 1.0)?;
    let id = dy.buffer_id();
    let dx = unary_backward(Unary::Square, 0.0, dy, Some(&x))?;
    assert_eq!((dx.buffer_id(), dx.to_f64()?), (id, vec![0.0, 2.0, 4.0, 6.0]));
    let kept = dx.clone();
    let other = unary_backward(Unary::Neg, 0.0, dx, None)?;
    assert_eq!((kept.to_f64()?[3], other.to_f64()?[3]), (6.0, -6.0));
    Ok(())
}

#[test]
fn comparisons_and_where_select() -> Result<()> {
    let device = Device::cpu(1)?;
    let a = Tensor::from_slice(&device, &[1.0_f32, 2.0, 3.0], &[3])?;
    let b = Tensor::from_slice(&device, &[2.0_f32], &[1])?;
    let less = compare(Comparison::Lt, &a, &b)?;
    assert_eq!(less.to_vec::<u8>()?, [1, 0, 0]);
    assert_eq!(where_cond(&less, &a, &b)?.to_f64()?, [1.0, 2.0, 2.0]);
    Ok(())
}
