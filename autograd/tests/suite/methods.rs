//! Gradients of methods where their formulas have no derivative, and their bits.

use ferrotron_autograd::Leaf;
use ferrotron_tensor::ops::reduce::KeepDims;
use ferrotron_tensor::{Device, Result, Tensor};

fn gradient(leaf: &Leaf) -> Result<Vec<f64>> {
    leaf.gradient()?.expect("a gradient").to_f64()
}

/// `torch.linalg.vector_norm(x, p, dim=1).sum().backward()` of PyTorch 2.15 in f64.
#[test]
fn norms_have_gradient_zero_at_zero() -> Result<()> {
    let device = Device::cpu(1)?;
    let values = [0.0, 0.0, 0.0, 3.0, 0.0, -4.0];
    let third = [3.0_f64, 4.0].map(|x| x * x * 91.0_f64.powf(-2.0 / 3.0));
    let half = [3.0_f64, 4.0].map(|x| (3.0_f64.sqrt() + 2.0) / x.sqrt());
    for (p, want) in [
        (0.5, [half[0], 0.0, -half[1]]),
        (1.0, [1.0, 0.0, -1.0]),
        (2.0, [0.6, 0.0, -0.8]),
        (3.0, [third[0], 0.0, -third[1]]),
    ] {
        let x = Leaf::new("x", Tensor::from_slice(&device, &values, &[2, 3])?);
        x.var()?.norm(p, &[1], KeepDims::Drop)?.sum_all()?.backward()?;
        let got = gradient(&x)?;
        assert_eq!(got[..3], [0.0; 3], "p = {p}");
        for (got, want) in got[3..].iter().zip(want) {
            assert!((got - want).abs() <= 1e-14 * (1.0 + want.abs()), "p = {p}: {got}, {want}");
        }
    }
    Ok(())
}

#[test]
fn gradients_of_quotients_and_means_are_divided() -> Result<()> {
    let device = Device::cpu(1)?;
    let dy: Vec<f32> = (1..50).map(|i| i as f32 * 0.37).collect();
    let x = Leaf::new("x", Tensor::from_slice(&device, &dy, &[49])?);
    let dy = Tensor::from_slice(&device, &dy, &[49])?;
    let want: Vec<f64> = dy.to_vec::<f32>()?.iter().map(|x| f64::from(x / 3.0)).collect();
    let product = (x.var()? / 3.0)?.mul(&ferrotron_autograd::Var::constant(dy))?;
    product.sum_all()?.backward()?;
    assert_eq!(gradient(&x)?, want);
    x.zero_gradient();
    x.var()?.mean_all()?.backward_scaled(3.0)?;
    assert_eq!(gradient(&x)?, [f64::from(3.0_f32 / 49.0); 49]);
    x.zero_gradient();
    x.var()?.mean(&[0], KeepDims::Drop)?.backward_scaled(3.0)?;
    assert_eq!(gradient(&x)?, [f64::from(3.0_f32 / 49.0); 49]);
    Ok(())
}
