//! Tensors of any dtype from numbers, and back.

use ferrotron_cuda::gpu::GpuConfig;
use ferrotron_tensor::{DType, Device, Error, Result, Tensor, bf16, f16};
use std::cell::RefCell;

thread_local! {
    /// The device of this rank's tensors, if not the CPU.
    static GPU: RefCell<Option<Device>> = const { RefCell::new(None) };
}

/// Runs `f` with this rank's tensors on a stand-in for GPU number `ordinal`.
pub fn on_gpu<R>(ordinal: usize, f: impl FnOnce() -> Result<R>) -> Result<R> {
    let found = ferrotron_cuda_sim::stand_in("collectives of GPUs");
    let config = found.ok_or_else(|| Error::config("stand-in", "needs g++ on x86-64 Linux"))?;
    let device = Device::cuda(&GpuConfig { ordinal, ..config })?;
    GPU.set(Some(device));
    let result = f();
    GPU.set(None);
    result
}

/// The device of this rank's tensors.
pub fn device() -> Result<Device> {
    GPU.with_borrow(|gpu| gpu.clone().map_or_else(|| Device::cpu(1), Ok))
}

/// Small integers, exact in every dtype also when eight ranks' are added, different on every rank.
pub fn value(rank: usize, index: usize) -> f64 {
    ((rank * 7 + index * 3 + index / 1000) % 31) as f64
}

/// A tensor whose element i is `f(i)`.
pub fn make(dtype: DType, dims: &[usize], f: impl Fn(usize) -> f64) -> Result<Tensor> {
    let device = device()?;
    let x = (0..dims.iter().product()).map(f);
    match dtype {
        DType::F64 => Tensor::from_slice(&device, &x.collect::<Vec<_>>(), dims),
        DType::F32 => Tensor::from_slice(&device, &x.map(|x| x as f32).collect::<Vec<_>>(), dims),
        DType::BF16 => {
            Tensor::from_slice(&device, &x.map(bf16::from_f64).collect::<Vec<_>>(), dims)
        }
        DType::F16 => Tensor::from_slice(&device, &x.map(f16::from_f64).collect::<Vec<_>>(), dims),
        DType::U8 => Tensor::from_slice(&device, &x.map(|x| x as u8).collect::<Vec<_>>(), dims),
        DType::U32 => Tensor::from_slice(&device, &x.map(|x| x as u32).collect::<Vec<_>>(), dims),
        DType::I64 => Tensor::from_slice(&device, &x.map(|x| x as i64).collect::<Vec<_>>(), dims),
    }
}

/// The elements.
pub fn read(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(match tensor.dtype() {
        DType::U8 => tensor.to_vec::<u8>()?.into_iter().map(f64::from).collect(),
        DType::U32 => tensor.to_vec::<u32>()?.into_iter().map(f64::from).collect(),
        DType::I64 => tensor.to_vec::<i64>()?.into_iter().map(|x| x as f64).collect(),
        _ => tensor.to_f64()?,
    })
}

/// Fails if there are not `len` elements, or at the first that is not `want(i)`.
pub fn check(what: &str, got: &Tensor, len: usize, want: impl Fn(usize) -> f64) -> Result<()> {
    assert_eq!(got.numel(), len, "{what}: {} {:?}", got.dtype(), got.dims());
    for (i, got_i) in read(got)?.into_iter().enumerate() {
        let (dtype, dims, want) = (got.dtype(), got.dims(), want(i));
        assert!(got_i == want, "{what}: {dtype} {dims:?} at {i}: got {got_i}, want {want}");
    }
    Ok(())
}
