//! Results of methods on integers, of numbers that must be divided, of strides, and of sizes that fit no memory.

use ferrotron_tensor::ops::argsort::SortOrder;
use ferrotron_tensor::{DType, Device, Result, Tensor};

const INTEGERS: [DType; 3] = [DType::U8, DType::U32, DType::I64];

fn message<T>(result: Result<T>) -> String {
    result.err().expect("an error").to_string()
}

#[test]
fn a_quotient_by_a_number_is_divided() -> Result<()> {
    let device = Device::cpu(1)?;
    let values: Vec<f32> = (1..1000).map(|i| i as f32 * 0.37).collect();
    let x = Tensor::from_slice(&device, &values, &[999])?;
    let products = values.iter().filter(|&&x| x / 3.0 != x * (1.0 / 3.0)).count();
    assert!(products > 100, "only {products} differ from a product with 1/3");
    let want: Vec<f32> = values.iter().map(|x| x / 3.0).collect();
    assert_eq!((&x / 3.0)?.to_vec::<f32>()?, want);
    assert_eq!(x.div_scalar(3.0)?.to_vec::<f32>()?, want);
    for count in [3, 7, 49, 999] {
        let x = x.narrow(0, 0, count)?;
        let sum = x.sum_all()?.to_vec::<f32>()?[0];
        assert_eq!(x.mean_all()?.to_vec::<f32>()?, [sum / count as f32], "{count}");
    }
    Ok(())
}

#[test]
fn integers_are_filled_masked_cut_and_sorted() -> Result<()> {
    let device = Device::cpu(2)?;
    for dtype in INTEGERS {
        assert_eq!(Tensor::ones(&device, dtype, &[2, 2])?.cast(DType::F64)?.to_f64()?, [1.0; 4]);
        assert_eq!(Tensor::full(&device, dtype, &[3], 7.0)?.cast(DType::F64)?.to_f64()?, [7.0; 3]);
        assert_eq!(Tensor::full(&device, dtype, &[0, 3], 7.0)?.dims(), [0, 3]);
        let x = Tensor::arange(&device, dtype, 1.0, 10.0, 1.0)?.reshape(&[3, 3])?;
        assert_eq!(
            x.tril(0)?.cast(DType::F64)?.to_f64()?,
            [1.0, 0.0, 0.0, 4.0, 5.0, 0.0, 7.0, 8.0, 9.0]
        );
        assert_eq!(
            x.triu(1)?.cast(DType::F64)?.to_f64()?,
            [0.0, 2.0, 3.0, 0.0, 0.0, 6.0, 0.0, 0.0, 0.0]
        );
        let mask = x.gt(&Tensor::full(&device, dtype, &[], 4.0)?)?;
        let masked = x.masked_fill(&mask, 0.0)?.cast(DType::F64)?.to_f64()?;
        assert_eq!(masked, [1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        let (sorted, places) = x.sort(1, SortOrder::Descending)?;
        assert_eq!(
            sorted.cast(DType::F64)?.to_f64()?,
            [3.0, 2.0, 1.0, 6.0, 5.0, 4.0, 9.0, 8.0, 7.0]
        );
        assert_eq!(places.to_vec::<i64>()?, [2, 1, 0, 2, 1, 0, 2, 1, 0]);
        assert_eq!(x.ones_like()?.dtype(), dtype);
    }
    let full = |dtype, value| message(Tensor::full(&device, dtype, &[2], value));
    assert_eq!(full(DType::U8, 256.0), "full: 256 is no value of u8");
    assert_eq!(full(DType::U32, -1.0), "full: -1 is no value of u32");
    assert_eq!(full(DType::I64, 0.5), "full: 0.5 is no value of i64");
    assert_eq!(full(DType::I64, f64::NAN), "full: NaN is no value of i64");
    Ok(())
}

#[test]
fn choices_are_right_for_every_combination_of_strides() -> Result<()> {
    let device = Device::cpu(2)?;
    let n = [7, 5, 6];
    let number = |dtype: DType, scale: f64| {
        Tensor::arange(&device, DType::F64, 0.0, 210.0, 1.0)?.mul_scalar(scale)?.cast(dtype)
    };
    // Dense, transposed, broadcast along either end, and one number.
    let variants = |x: &Tensor| -> Result<Vec<Tensor>> {
        let dense = x.reshape(&n)?;
        let turned = x.reshape(&[6, 5, 7])?.transpose(0, 2)?;
        let [first, last] = [x.narrow(0, 3, 6)?, x.narrow(0, 3, 35)?.reshape(&[7, 5, 1])?];
        Ok(vec![dense, turned, first, last, x.narrow(0, 5, 1)?.reshape(&[])?])
    };
    for dtype in [DType::F32, DType::BF16, DType::I64] {
        let flags = number(DType::F64, 37.0)?.sin()?;
        let flags = flags.gt(&Tensor::zeros(&device, DType::F64, &[])?)?;
        let (yes, no) = (number(dtype, 1.0)?, number(dtype, -1.0)?);
        for condition in variants(&flags)? {
            for yes in variants(&yes)? {
                for no in variants(&no)? {
                    let got = yes.where_cond(&condition, &no)?;
                    let spread =
                        |x: &Tensor| x.broadcast_to(got.dims())?.cast(DType::F64)?.to_f64();
                    let (c, y, n) = (spread(&condition)?, spread(&yes)?, spread(&no)?);
                    let want: Vec<f64> =
                        (0..c.len()).map(|i| if c[i] != 0.0 { y[i] } else { n[i] }).collect();
                    assert_eq!(
                        got.cast(DType::F64)?.to_f64()?,
                        want,
                        "{condition:?} {yes:?} {no:?}"
                    );
                }
            }
        }
    }
    Ok(())
}

#[test]
fn an_empty_dim_has_as_many_chunks_as_asked_for() -> Result<()> {
    let x = Tensor::zeros(&Device::cpu(1)?, DType::F32, &[2, 0])?;
    let chunks = x.chunk(3, 1)?;
    assert_eq!(chunks.iter().map(Tensor::dims).collect::<Vec<_>>(), [[2, 0]; 3]);
    Ok(())
}

/// None of these may end the process.
#[test]
fn sizes_that_fit_no_memory_are_errors_that_name_them() -> Result<()> {
    let device = Device::cpu(1)?;
    assert_eq!(
        message(Tensor::arange(&device, DType::F32, 0.0, 1e15, 1.0)),
        "arange: no memory for the 1000000000000000 steps of 1 from 0 to 1000000000000000"
    );
    assert_eq!(
        message(Tensor::linspace(&device, DType::F32, 0.0, 1.0, usize::MAX)),
        format!("linspace: no memory for {} numbers from 0 to 1", usize::MAX)
    );
    let x = Tensor::zeros(&device, DType::F32, &[3, 3])?;
    assert_eq!(
        message(x.repeat(&[1 << 40, 1 << 40])),
        format!("repeat: {:?} times [3, 3] are too many elements", [1_u64 << 40; 2])
    );
    let error = message(x.repeat(&[1 << 30, 1 << 25]));
    assert!(!error.is_empty() && !error.contains('\n'), "{error}");
    let error = message(x.slice(0, 0..=isize::MAX));
    assert!(error.starts_with("slice: the range 0.."), "{error}");
    let error = message(x.select(0, isize::MIN));
    assert!(error.starts_with("select: the range"), "{error}");
    for dims in [vec![1 << 50], vec![usize::MAX, 2], vec![1 << 62]] {
        let error = message(Tensor::zeros(&device, DType::F32, &dims));
        assert!(!error.is_empty() && !error.contains('\n'), "{error}");
    }
    Ok(())
}
