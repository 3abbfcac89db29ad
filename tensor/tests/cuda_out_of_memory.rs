//! A GPU's memory runs out, in a process of its own: until the attempt is given up, there is none for other tests.

use ferrotron_tensor::{DType, Device, ErrorKind, Result, Tensor};

#[test]
fn the_pool_counts_uses_again_and_refuses() -> Result<()> {
    let test = "the_pool_counts_uses_again_and_refuses";
    let Some(config) = ferrotron_cuda_sim::stand_in(test) else { return Ok(()) };
    let device = Device::cuda(&config)?;
    let x = Tensor::zeros(&device, DType::F32, &[1 << 20])?;
    assert_eq!((device.memory().current, device.memory().reserved), (4 << 20, 4 << 20));
    drop(x);
    let x = Tensor::zeros(&device, DType::F32, &[1 << 20])?;
    assert_eq!((device.memory().reserved, device.memory().returned), (4 << 20, 0));
    let error = Tensor::zeros(&device, DType::F32, &[2 << 30]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Memory);
    assert!(error.to_string().contains("out of memory"), "{error}");
    assert!(error.to_string().ends_with("; in use: Workspace 4194304"), "{error}");
    // Nothing is left of the attempt, so what fits still fits.
    let y = Tensor::zeros(&device, DType::F32, &[700 << 20])?;
    assert_eq!(device.memory().current, 2804 << 20);
    drop((x, y));
    Ok(())
}
