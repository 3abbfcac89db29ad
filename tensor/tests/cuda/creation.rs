//! Tensors from nothing, and those of indices: the methods of the shared list that have no gradient.

use ferrotron_tensor::ops::reduce::KeepDims;
use ferrotron_tensor::{DType, Device, RandomKey, Result, Tensor};

use crate::support::{FLOATS, assert_like_cpu, gpu, ids, random};

#[test]
fn constants_and_ranges_have_every_dtype() -> Result<()> {
    let Some(gpu) = gpu("constants_and_ranges_have_every_dtype")? else { return Ok(()) };
    let like = |device: &Device, dtype| random(device, DType::F32, &[3, 70], 1)?.cast(dtype);
    for dtype in DType::ALL {
        for dims in [&[3, 70][..], &[], &[0, 4]] {
            let full = |device: &Device| Tensor::full(device, dtype, dims, 5.0);
            assert_like_cpu("full", &gpu, 0.0, full)?;
            assert_like_cpu("ones", &gpu, 0.0, |device| Tensor::ones(device, dtype, dims))?;
            assert_like_cpu("zeros", &gpu, 0.0, |device| Tensor::zeros(device, dtype, dims))?;
        }
        for (start, end, step) in [(0.0, 100.0, 1.0), (90.0, 3.0, -7.0), (2.0, 2.0, 1.0)] {
            let arange = |device: &Device| Tensor::arange(device, dtype, start, end, step);
            assert_like_cpu("arange", &gpu, 0.0, arange)?;
        }
        for count in [0, 1, 9] {
            let linspace = |device: &Device| Tensor::linspace(device, dtype, 16.0, 0.0, count);
            assert_like_cpu("linspace", &gpu, 0.0, linspace)?;
        }
    }
    for dtype in FLOATS {
        assert_like_cpu("zeros_like", &gpu, 0.0, |device| like(device, dtype)?.zeros_like())?;
        assert_like_cpu("ones_like", &gpu, 0.0, |device| like(device, dtype)?.ones_like())?;
        assert_like_cpu("full_like", &gpu, 0.0, |device| like(device, dtype)?.full_like(-0.5))?;
    }
    Ok(())
}

#[test]
fn random_tensors_are_those_of_the_cpu() -> Result<()> {
    let Some(gpu) = gpu("random_tensors_are_those_of_the_cpu")? else { return Ok(()) };
    let key = RandomKey::new(7, 3, "noise");
    for dtype in FLOATS {
        let tolerance = dtype.epsilon() + 4.0 * DType::F32.epsilon();
        for dims in [&[3, 70][..], &[], &[0, 4]] {
            let rand = |device: &Device| Tensor::rand(device, dtype, dims, &key);
            assert_like_cpu("rand", &gpu, tolerance, rand)?;
            let randn = |device: &Device| Tensor::randn(device, dtype, dims, &key);
            assert_like_cpu("randn", &gpu, tolerance, randn)?;
            let like = |device: &Device| random(device, dtype, dims, 1)?.randn_like(&key);
            assert_like_cpu("randn_like", &gpu, tolerance, like)?;
        }
    }
    Ok(())
}

#[test]
fn indices_are_those_of_the_cpu() -> Result<()> {
    let Some(gpu) = gpu("indices_are_those_of_the_cpu")? else { return Ok(()) };
    for dtype in [DType::U32, DType::I64] {
        let one_hot = |device: &Device| ids(device, dtype, &[5, 30], 9)?.one_hot(9);
        assert_like_cpu("one_hot", &gpu, 0.0, one_hot)?;
        let beyond = ids(&gpu, dtype, &[5, 30], 9)?.one_hot(8)?.to_vec::<i64>();
        let error = "one_hot: the index at position 1 in row-major order is out of range";
        assert_eq!(beyond.unwrap_err().to_string(), error);
    }
    for dtype in FLOATS {
        let x = |device: &Device| random(device, dtype, &[3, 130], 1);
        for dim in [0, -1] {
            assert_like_cpu("argmax", &gpu, 0.0, |device| x(device)?.argmax(dim, KeepDims::Keep))?;
            assert_like_cpu("argmin", &gpu, 0.0, |device| x(device)?.argmin(dim, KeepDims::Drop))?;
            let max = |device: &Device| Ok(x(device)?.max(dim, KeepDims::Drop)?.1);
            assert_like_cpu("max", &gpu, 0.0, max)?;
            assert_like_cpu("topk", &gpu, 0.0, |device| Ok(x(device)?.topk(3, dim)?.1))?;
        }
    }
    Ok(())
}
