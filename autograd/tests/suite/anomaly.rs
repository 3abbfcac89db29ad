//! The search for a NaN, and the printed form of variables.

use ferrotron_autograd::{InputGrads, Leaf, Var, checkpoint, detect_anomaly, no_grad};
use ferrotron_tensor::{DType, Device, Error, Result, Tensor};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

fn leaf(device: &Device, name: &str, values: &[f64]) -> Result<Leaf> {
    Ok(Leaf::new(name, Tensor::from_slice(device, values, &[values.len()])?))
}

fn message(result: Result<()>) -> String {
    result.expect_err("an error").to_string()
}

#[test]
fn the_first_operation_whose_result_is_nan_is_named() -> Result<()> {
    let w = leaf(&Device::cpu(1)?, "blocks.3.weight", &[-1.0, 4.0])?;
    let f = || w.var()?.mul_scalar(2.0)?.sqrt()?.exp()?.sum_all()?.backward();
    f()?; // Without the search nothing is refused.
    let want = "detect_anomaly: sqrt: result 0, f64 [2], is NaN; the nearest parameter is 'blocks.3.weight'";
    assert_eq!(message(detect_anomaly(f)), want);
    f()?;
    // Infinities pass, and so does what is not recorded.
    detect_anomaly(|| w.var()?.square()?.mul_scalar(f64::INFINITY)?.sum_all().map(drop))?;
    detect_anomaly(|| no_grad(|| w.var()?.sqrt().map(drop)))
}

#[test]
fn the_operation_whose_gradient_is_nan_is_named_also_in_a_region() -> Result<()> {
    let device = Device::cpu(1)?;
    let (w, x) = (leaf(&device, "w", &[0.0, 4.0])?, leaf(&device, "x", &[0.0, 1.0])?);
    // 0 times the infinite derivative of the root.
    let f = |x: &Var| w.var()?.sqrt()?.mul(x);
    let want = "detect_anomaly: backward of sqrt: the gradient of operand 0, f64 [2], is NaN; the nearest parameter is 'w'";
    let loss = || f(&x.var()?)?.sum_all()?.backward();
    assert_eq!(message(detect_anomaly(loss)), want);
    w.zero_gradient();
    let w_again = w.clone();
    let region = || {
        let w = w_again.clone();
        let inside = move |v: &[Var]| Ok(vec![w.var()?.sqrt()?.mul(&v[0])?]);
        checkpoint(&[&x.var()?], inside)?[0].sum_all()?.backward()
    };
    assert!(message(detect_anomaly(region)).contains("backward of sqrt"));
    Ok(())
}

/// Two leaves may have one name: the operand is found by the leaf.
#[test]
fn leaves_of_one_name_are_told_apart() -> Result<()> {
    let device = Device::cpu(1)?;
    let (first, second) = (leaf(&device, "w", &[1.0])?, leaf(&device, "w", &[1.0])?);
    let (x, y) = (first.var()?, second.var()?);
    let both = Var::record(&[&x, &y], x.value().clone(), || {
        |dy: Tensor, dx: &mut InputGrads| {
            dx.accumulate(0, dy.clone())?;
            dx.accumulate(1, dy.mul_scalar(f64::NAN)?)
        }
    })?;
    let error = message(detect_anomaly(|| both.sum_all()?.backward()));
    assert!(error.contains("the gradient of operand 1, f64 [1], is NaN"), "{error}");
    Ok(())
}

/// An error for another reason stays as it is, although a gradient is NaN already.
#[test]
fn another_error_is_not_hidden_by_a_nan() -> Result<()> {
    let x = leaf(&Device::cpu(1)?, "w", &[1.0])?.var()?.mul_scalar(2.0)?;
    let y = Var::record(&[&x], x.value().clone(), || {
        |dy: Tensor, dx: &mut InputGrads| {
            dx.accumulate(0, dy.mul_scalar(f64::NAN)?)?;
            Err(Error::value("mine", "the disk is full"))
        }
    })?;
    let error = message(detect_anomaly(|| y.sum_all()?.backward()));
    assert_eq!(error, "mine: the disk is full");
    Ok(())
}

/// Ranks reduce a gradient while backward goes on: it is checked before that.
#[test]
fn a_gradient_is_checked_before_it_is_reduced() -> Result<()> {
    let device = Device::cpu(1)?;
    let w = leaf(&device, "w", &[0.0, 4.0])?;
    let reductions = Arc::new(AtomicUsize::new(0));
    let counter = reductions.clone();
    let owner = w.set_reduction(move || {
        counter.fetch_add(1, Relaxed);
        Ok(())
    })?;
    owner.expect(1);
    let root = || w.var()?.sqrt()?.sum_all()?.backward();
    let want = "detect_anomaly: backward of sqrt: the gradient of operand 0, f64 [2], is NaN; the nearest parameter is 'w'";
    let nan = || w.var()?.sqrt()?.mul_scalar(0.0)?.sum_all()?.backward();
    assert_eq!(message(detect_anomaly(nan)), want);
    assert_eq!(reductions.load(Relaxed), 0);
    w.zero_gradient();
    detect_anomaly(root)?;
    assert_eq!(reductions.load(Relaxed), 1);
    Ok(())
}

#[test]
fn a_variable_prints_its_value_and_origin() -> Result<()> {
    let w = leaf(&Device::cpu(1)?, "w", &[1.0, 2.0])?;
    let shown = "tensor([1., 4.], shape=[2], dtype=f64, device=cpu, from=square)";
    assert_eq!(w.var()?.square()?.to_string(), shown);
    assert!(w.var()?.to_string().ends_with("from=w)"));
    let constant = Var::constant(Tensor::zeros(&Device::cpu(1)?, DType::F32, &[])?);
    assert!(constant.to_string().ends_with("from=constant)"));
    Ok(())
}
