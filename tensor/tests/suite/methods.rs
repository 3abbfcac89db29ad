//! Values of the methods that tensors and variables share: those that PyTorch gives, or that the definition does.

use ferrotron_tensor::ops::argsort::SortOrder;
use ferrotron_tensor::ops::reduce::KeepDims;
use ferrotron_tensor::{DType, Device, RandomKey, Result, Tensor};

fn numbers(values: &[f64], dims: &[usize]) -> Result<Tensor> {
    Tensor::from_slice(&Device::cpu(1)?, values, dims)
}

fn message<T>(result: Result<T>) -> String {
    result.err().expect("an error").to_string()
}

#[test]
fn operators_take_tensors_and_numbers_on_either_side() -> Result<()> {
    let x = numbers(&[1.0, 2.0], &[2])?;
    let y = Tensor::from_slice(x.device(), &[4.0, 8.0], &[2])?;
    assert_eq!((&x + &y)?.to_f64()?, [5.0, 10.0]);
    assert_eq!((x.clone() - &y)?.to_f64()?, [-3.0, -6.0]);
    assert_eq!((&x * y.clone())?.to_f64()?, [4.0, 16.0]);
    assert_eq!((y.clone() / x.clone())?.to_f64()?, [4.0, 4.0]);
    assert_eq!((-&x)?.to_f64()?, [-1.0, -2.0]);
    assert_eq!((&x + 1.0)?.to_f64()?, [2.0, 3.0]);
    assert_eq!((1.0 - &x)?.to_f64()?, [0.0, -1.0]);
    assert_eq!((&x - 1.0)?.to_f64()?, [0.0, 1.0]);
    assert_eq!((2.0 * &x)?.to_f64()?, [2.0, 4.0]);
    assert_eq!((&x / 2.0)?.to_f64()?, [0.5, 1.0]);
    assert_eq!((2.0 / x)?.to_f64()?, [2.0, 1.0]);
    let error = message(&y + &numbers(&[1.0], &[1])?);
    assert!(error.contains("lhs on cpu(1 threads) and rhs on cpu(1 threads)"), "{error}");
    assert!(error.ends_with("copy one with Tensor::to_device"), "{error}");
    Ok(())
}

#[test]
fn views_and_parts_are_those_of_pytorch() -> Result<()> {
    let x = numbers(&(0..12).map(f64::from).collect::<Vec<_>>(), &[3, 4])?;
    assert_eq!(x.slice(0, -1..)?.dims(), [1, 4]);
    assert_eq!(x.slice(1, 1..=2)?.to_f64()?, [1.0, 2.0, 5.0, 6.0, 9.0, 10.0]);
    assert_eq!(x.select(0, 1)?.to_f64()?, [4.0, 5.0, 6.0, 7.0]);
    assert_eq!(message(x.select(0, 3)), "select: the range 3..4 is outside of a dim of 3");
    assert_eq!(x.squeeze(0)?.dims(), [3, 4]);
    assert_eq!(x.unsqueeze(-1)?.dims(), [3, 4, 1]);
    assert_eq!(
        message(x.unsqueeze(3)),
        "unsqueeze: no dim can be added at 3 of [3, 4]: use -3 to 2"
    );
    let sizes = |parts: Vec<Tensor>| parts.iter().map(|x| x.dims()[1]).collect::<Vec<_>>();
    assert_eq!(sizes(x.chunk(3, 1)?), [2, 2]);
    assert_eq!(sizes(x.chunk(4, -1)?), [1, 1, 1, 1]);
    let y = x.select(0, 0)?.repeat(&[2, 1])?;
    assert_eq!(y.to_f64()?, [0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0]);
    let stacked = Tensor::stack(&[&x, &x], -1)?;
    assert_eq!(stacked.dims(), [3, 4, 2]);
    assert_eq!(stacked.select(2, 1)?.to_f64()?, x.to_f64()?);
    Ok(())
}

#[test]
fn choices_and_triangles() -> Result<()> {
    let x = numbers(&[f64::NAN, -3.0, 0.5, 9.0], &[2, 2])?;
    let limited = x.clamp(-1.0, 1.0)?.to_f64()?;
    assert!(limited[0].is_nan() && limited[1..] == [-1.0, 0.5, 1.0]);
    assert_eq!(message(x.clamp(1.0, -1.0)), "clamp: min 1 is not at most max -1");
    let ones = Tensor::ones(x.device(), DType::F64, &[3, 3])?;
    assert_eq!(ones.tril(0)?.to_f64()?, [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]);
    assert_eq!(ones.tril(-1)?.to_f64()?, [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0]);
    assert_eq!(ones.triu(1)?.to_f64()?, [0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]);
    assert_eq!(ones.triu(-1)?.to_f64()?, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0]);
    let (all, none) = (vec![1.0; 9], vec![0.0; 9]);
    for (far, below, above) in [(isize::MAX, &all, &none), (isize::MIN, &none, &all)] {
        assert_eq!((&ones.tril(far)?.to_f64()?, &ones.triu(far)?.to_f64()?), (below, above));
    }
    let wide = ones.unsqueeze(0)?.broadcast_to(&[2, 3, 3])?;
    assert_eq!(wide.tril(0)?.sum_all()?.item()?, 12.0);
    let mask = x.lt(&Tensor::zeros(x.device(), DType::F64, &[])?)?;
    assert_eq!(mask.to_vec::<u8>()?, [0, 1, 0, 0]);
    let filled = x.masked_fill(&mask, f64::NEG_INFINITY)?.to_f64()?;
    assert_eq!(filled[1..], [f64::NEG_INFINITY, 0.5, 9.0]);
    assert!(
        message(x.masked_fill(&Tensor::zeros(x.device(), DType::U8, &[3])?, 0.0)).contains("[3]")
    );
    let want = "where: the condition is f64: it must be u8, as `gt` gives";
    assert_eq!(message(x.masked_fill(&x, 0.0)), want);
    let elsewhere = Tensor::zeros(&Device::cpu(1)?, DType::U8, &[2, 2])?;
    assert!(message(x.masked_fill(&elsewhere, 0.0)).contains("different devices"));
    Ok(())
}

#[test]
fn extremes_and_moments() -> Result<()> {
    let x = numbers(&[1.0, 3.0, 3.0, 2.0, 0.0, f64::NAN], &[2, 3])?;
    let (values, indices) = x.max(-1, KeepDims::Drop)?;
    assert!(values.to_f64()?[0] == 3.0 && values.to_f64()?[1].is_nan());
    assert_eq!(indices.to_vec::<i64>()?, [1, 2]);
    let (values, indices) = x.min(1, KeepDims::Keep)?;
    assert_eq!((values.dims(), values.to_f64()?[0]), (&[2, 1][..], 1.0));
    assert_eq!(indices.to_vec::<i64>()?, [0, 2]);
    assert_eq!(x.slice(0, ..1)?.amin(&[0, 1], KeepDims::Drop)?.item()?, 1.0);
    // numpy.var([1, 2, 4, 9]) = 9.5, with one degree of freedom less 38 / 3.
    let x = numbers(&[1.0, 2.0, 4.0, 9.0], &[4])?;
    assert_eq!(x.var_with_correction(&[0], 0, KeepDims::Drop)?.item()?, 9.5);
    assert!((x.var(&[0], KeepDims::Drop)?.item()? - 38.0 / 3.0).abs() < 1e-14);
    assert!((x.std(&[0], KeepDims::Drop)?.item()? - (38.0_f64 / 3.0).sqrt()).abs() < 1e-14);
    assert!(x.slice(0, ..1)?.var(&[0], KeepDims::Drop)?.item()?.is_nan());
    // In 16 bits the mean is not rounded before it is subtracted.
    let near = numbers(&[256.0, 258.0, 260.0, 262.0], &[4])?.cast(DType::BF16)?;
    assert_eq!(near.var_with_correction(&[0], 0, KeepDims::Drop)?.item()?, 5.0);
    assert_eq!(x.norm(1.0, &[0], KeepDims::Drop)?.item()?, 16.0);
    assert!((x.norm(3.0, &[0], KeepDims::Drop)?.item()? - 802_f64.cbrt()).abs() < 1e-12);
    assert_eq!(message(x.norm(0.0, &[0], KeepDims::Drop)), "norm: needs a positive order, got 0");
    Ok(())
}

#[test]
fn sorts_are_stable_and_nan_is_largest() -> Result<()> {
    let x = numbers(&[2.0, f64::NAN, 1.0, 2.0], &[4])?;
    let order = |order| x.argsort(0, order)?.to_vec::<i64>();
    assert_eq!(order(SortOrder::Ascending)?, [2, 0, 3, 1]);
    assert_eq!(order(SortOrder::Descending)?, [1, 0, 3, 2]);
    let (values, indices) = x.slice(0, 2..)?.sort(0, SortOrder::Descending)?;
    assert_eq!((values.to_f64()?, indices.to_vec::<i64>()?), (vec![2.0, 1.0], vec![1, 0]));
    Ok(())
}

#[test]
fn ranges_and_constants() -> Result<()> {
    let device = Device::cpu(1)?;
    let range = |start, end, step| Tensor::arange(&device, DType::F64, start, end, step)?.to_f64();
    assert_eq!(range(1.0, 2.5, 0.5)?, [1.0, 1.5, 2.0]);
    assert_eq!(range(3.0, 0.0, -1.0)?, [3.0, 2.0, 1.0]);
    assert!(range(1.0, 1.0, 1.0)?.is_empty());
    let refused = "arange: no steps of -1 lead from 0 to 3";
    assert_eq!(message(range(0.0, 3.0, -1.0)), refused);
    assert!(range(0.0, 3.0, 0.0).is_err());
    let line = |count| Tensor::linspace(&device, DType::F64, 0.0, 0.3, count)?.to_f64();
    assert_eq!(line(4)?[3], 0.3);
    assert_eq!((line(1)?, line(0)?), (vec![0.0], vec![]));
    let x = Tensor::zeros(&device, DType::BF16, &[2, 3])?;
    let like = x.ones_like()?;
    assert_eq!((like.dtype(), like.dims(), like.to_f64()?), (DType::BF16, x.dims(), vec![1.0; 6]));
    let key = RandomKey::new(7, 0, "noise");
    let noise = Tensor::randn(&device, DType::F64, &[40_000], &key)?;
    assert!(noise.mean_all()?.item()?.abs() < 0.02);
    assert!((noise.var(&[0], KeepDims::Drop)?.item()? - 1.0).abs() < 0.03);
    let uniform = Tensor::rand(&device, DType::F64, &[40_000], &key)?;
    assert!((uniform.mean_all()?.item()? - 0.5).abs() < 0.01);
    let ids = Tensor::from_slice(&device, &[1_u32, 0], &[1, 2])?;
    assert_eq!(ids.one_hot(2)?.dims(), [1, 2, 2]);
    assert_eq!(ids.one_hot(2)?.to_vec::<i64>()?, [0, 1, 1, 0]);
    Ok(())
}

#[test]
fn scattered_elements_replace_in_order() -> Result<()> {
    let x = numbers(&[0.0; 3], &[3])?;
    let index = Tensor::from_slice(x.device(), &[1_i64, 1, 2], &[3])?;
    let source = Tensor::from_slice(x.device(), &[5.0, 6.0, -0.0], &[3])?;
    assert_eq!(x.scatter(0, &index, &source)?.to_f64()?, [0.0, 6.0, -0.0]);
    assert_eq!(x.scatter_add(0, &index, &source)?.to_f64()?, [0.0, 11.0, 0.0]);
    Ok(())
}

#[test]
fn a_matrix_on_the_right_makes_one_product() -> Result<()> {
    let x = numbers(&(0..24).map(f64::from).collect::<Vec<_>>(), &[2, 3, 4])?;
    let w = Tensor::from_slice(x.device(), &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.5, 2.0], &[4, 2])?;
    let each = [0, 1].map(|b| x.select(0, b).and_then(|x| x.matmul(&w)).unwrap());
    let stacked = Tensor::stack(&[&each[0], &each[1]], 0)?;
    assert_eq!(x.matmul(&w)?.to_f64()?, stacked.to_f64()?);
    let turned = x.transpose(0, 1)?;
    assert_eq!(turned.matmul(&w)?.to_f64()?, stacked.transpose(0, 1)?.to_f64()?);
    let error = "matmul: inner dimensions differ: lhs [2, 3, 4] x rhs [3, 2]";
    assert_eq!(message(x.matmul(&w.slice(0, ..3)?)), error);
    Ok(())
}

#[test]
fn a_view_shows_its_strides() -> Result<()> {
    let x = numbers(&[1.0, 2.0], &[2, 1])?;
    assert_eq!(format!("{x:?}"), "Tensor(f64 [2, 1])");
    assert_eq!(format!("{:?}", x.broadcast_to(&[2, 3])?), "Tensor(f64 [2, 3], strides [1, 0])");
    Ok(())
}
