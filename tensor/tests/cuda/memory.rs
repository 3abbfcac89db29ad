//! Memory of a GPU: transfers, views, the pool, and what the host may not do.

use ferrotron_tensor::{DType, Device, ErrorKind, MemoryKind, Result, Tensor};

use crate::support::{gpu, stand_in};

#[test]
fn elements_go_there_and_back() -> Result<()> {
    let Some(device) = gpu("elements_go_there_and_back")? else { return Ok(()) };
    let x = Tensor::from_slice(&device, &[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3])?;
    assert_eq!(x.to_vec::<f32>()?, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    assert_eq!(x.transpose(0, 1)?.to_vec::<f32>()?, [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    assert_eq!(x.narrow(1, 1, 2)?.to_vec::<f32>()?, [2.0, 3.0, 5.0, 6.0]);
    assert_eq!(x.square()?.add(&x.narrow(0, 1, 1)?)?.to_f64()?, [5.0, 9.0, 15.0, 20.0, 30.0, 42.0]);
    assert_eq!(Tensor::full(&device, DType::BF16, &[2], 1.5)?.to_f64()?, [1.5, 1.5]);
    assert_eq!(Tensor::zeros(&device, DType::I64, &[2])?.to_vec::<i64>()?, [0, 0]);
    let mut y = Tensor::empty_in(MemoryKind::Host, &device, DType::F32, &[3])?;
    y.copy_from(&x.narrow(0, 1, 1)?.reshape(&[3])?)?;
    assert_eq!((y.memory_kind(), y.to_vec::<f32>()?), (MemoryKind::Host, vec![4.0, 5.0, 6.0]));
    Ok(())
}

/// The source of an upload may change at once, though the GPU fetches it later.
#[test]
fn uploads_are_not_waited_for() -> Result<()> {
    let Some(device) = stand_in("uploads_are_not_waited_for")? else { return Ok(()) };
    let before = ferrotron_cuda_sim::waits();
    let mut numbers = vec![0.0_f32; 40_000];
    let given = (0..40)
        .map(|i| {
            let length = [40_000, 3, 20_000, 1][i % 4];
            numbers[..length].fill(i as f32);
            Tensor::from_slice(&device, &numbers[..length], &[length])
        })
        .collect::<Result<Vec<_>>>()?;
    assert_eq!(ferrotron_cuda_sim::waits(), before);
    for (i, x) in given.iter().enumerate() {
        assert!(x.to_vec::<f32>()?.iter().all(|&x| x == i as f32), "upload {i}");
    }
    // The driver's own way, for large ones.
    let large = vec![7_u32; (4 << 20) / 4 + 1];
    assert_eq!(Tensor::from_slice(&device, &large, &[large.len()])?.to_vec::<u32>()?, large);
    Ok(())
}

#[test]
fn the_host_has_no_slices_of_it() -> Result<()> {
    let Some(device) = gpu("the_host_has_no_slices_of_it")? else { return Ok(()) };
    let mut x = Tensor::zeros(&device, DType::F32, &[4])?;
    let error = x.as_slice::<f32>().unwrap_err();
    assert_eq!(
        error.to_string(),
        "as_slice: Tensor(f32 [4]) is in memory of cuda:0: copy it with to_vec"
    );
    assert_eq!(error.kind(), ErrorKind::Device);
    assert_eq!(x.as_mut_slice::<f32>().unwrap_err().kind(), ErrorKind::Device);
    let y = Tensor::zeros(&Device::cpu(1)?, DType::F32, &[4])?;
    let error = x.add(&y).unwrap_err().to_string();
    assert!(error.starts_with("add: operands are on different devices"), "{error}");
    Ok(())
}
