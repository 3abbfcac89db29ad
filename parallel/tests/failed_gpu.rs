//! A GPU that has failed: a group on it ends with that error, and no thread waits for what will never come. Runs in a
//! process of its own, since a driver that has failed stays so.

use ferrotron_cuda::gpu::GpuConfig;
use ferrotron_cuda::kernels::ElementType;
use ferrotron_parallel::collective::{NcclConfig, Reduction, WorldConfig, run_threads};
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, Device, Error, Result, Tensor};
use std::sync::mpsc::channel;
use std::time::Duration;

/// Gives the GPU a kernel that fails when it runs: a block of half a warp, which the stand-in does not take.
fn give_what_fails(device: &Device) -> Result<()> {
    let gpu = device.gpu().expect("a GPU");
    let mut step = Tensor::zeros(device, DType::U8, &[64])?;
    let kernel = gpu.kernel("step", ElementType::F64, "set_step").map_err(Error::from_gpu)?;
    let launch = kernel.value(step.device_ptr(64)?).value([0_u64; 5]);
    // SAFETY: the memory is as large as what the kernel would write.
    unsafe { launch.run([1, 1, 1], [16, 1, 1]) }.map_err(Error::from_gpu)
}

#[test]
fn a_group_on_a_gpu_that_has_failed_ends() {
    let test = "a_group_on_a_gpu_that_has_failed_ends";
    let Some(config) = ferrotron_cuda_sim::stand_in(test) else { return };
    let (told, heard) = channel();
    std::thread::spawn(move || {
        let timeout = Duration::from_secs(60);
        let ranks = run_threads(2, &WorldConfig { timeout }, |world| -> Result<()> {
            let device = Device::cuda(&GpuConfig { ordinal: world.rank(), ..config.clone() })?;
            let nccl = NcclConfig { search: config.search.clone(), timeout };
            let mesh = Mesh::new(&world, ParallelDims::new(2, 1, 1, 1)?, SequenceParallel::Off)?;
            let group = mesh.with_nccl(&device, &nccl)?.world().clone();
            let x = Tensor::full(&device, DType::F32, &[3], 1.0)?;
            give_what_fails(&device)?;
            let y = group.all_reduce(x, Reduction::Sum)?.wait()?;
            y.to_vec::<f32>().map(drop)
        });
        let errors = ranks.into_iter().map(|rank| rank.unwrap_err().to_string());
        told.send(errors.collect::<Vec<_>>()).unwrap();
    });
    // A fraction of the timeout, after which ranks would give up by themselves.
    let errors = heard.recv_timeout(Duration::from_secs(30)).expect("nobody waits");
    for error in &errors {
        assert!(error.contains("CUDA_ERROR_LAUNCH_FAILED"), "{errors:?}");
    }
}
