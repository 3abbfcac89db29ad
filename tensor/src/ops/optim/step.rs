//! Optimizer step parameters, stored in the memory from which the device's kernels read them.

pub use super::config::StepParams;
use crate::{Device, Error, Result, Tensor, cuda};

/// The parameters of one optimizer step, shared by all model parameters.
///
/// ```
/// use ferrotron_tensor::{Device, ops::step::{DeviceStepParams, StepParams}};
/// let device = Device::cpu(1)?;
/// let step = DeviceStepParams::new(&device, &StepParams { update: 1, lr: 0.1, grad_scale: 1.0 })?;
/// assert!(DeviceStepParams::new(&device, &StepParams { update: 0, lr: 0.1, grad_scale: 1.0 }).is_err());
/// # drop(step);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug)]
pub struct DeviceStepParams(StepStorage);

#[derive(Debug)]
enum StepStorage {
    /// `None` if the step is skipped.
    Host(Option<StepParams>),
    /// Values in GPU memory, so that a captured step can be replayed with other values.
    Gpu(Tensor),
}

impl DeviceStepParams {
    /// Enqueues writing the values to memory that kernels of `device` read, without synchronizing.
    ///
    /// Errors if `update` is 0.
    pub fn new(device: &Device, numbers: &StepParams) -> Result<DeviceStepParams> {
        let kept = match device.gpu() {
            None => StepStorage::Host(None),
            Some(_) => StepStorage::Gpu(cuda::step::room(device)?),
        };
        let mut step = DeviceStepParams(kept);
        step.set(numbers)?;
        Ok(step)
    }

    /// Enqueues writing the values of another step to the same memory, without synchronizing. The next replay of a
    /// [captured](crate::CudaGraph) step reads them; work enqueued before still reads the old ones.
    ///
    /// Errors if `update` is 0, and while the device's work is captured.
    pub fn set(&mut self, numbers: &StepParams) -> Result<()> {
        if numbers.update == 0 {
            return Err(Error::value("step", "steps are counted from 1, got 0"));
        }
        match &mut self.0 {
            StepStorage::Host(kept) => *kept = Some(*numbers),
            StepStorage::Gpu(memory) => cuda::step::set(memory, numbers)?,
        }
        Ok(())
    }

    /// The same step with the learning rate times `factor`, without synchronizing.
    ///
    /// ```
    /// use ferrotron_tensor::{Device, ops::step::{DeviceStepParams, StepParams}};
    /// let device = Device::cpu(1)?;
    /// let step = DeviceStepParams::new(&device, &StepParams { update: 1, lr: 0.5, grad_scale: 1.0 })?;
    /// assert_eq!(step.scale_lr(0.5)?.read()?.unwrap().lr, 0.25);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn scale_lr(&self, factor: f64) -> Result<DeviceStepParams> {
        Ok(DeviceStepParams(match &self.0 {
            StepStorage::Host(numbers) => {
                let scaled =
                    |numbers: StepParams| StepParams { lr: numbers.lr * factor, ..numbers };
                StepStorage::Host(numbers.map(scaled))
            }
            StepStorage::Gpu(memory) => {
                let mut scaled = cuda::step::room(memory.device())?;
                cuda::step::scale_lr(&mut scaled, memory, factor)?;
                StepStorage::Gpu(scaled)
            }
        }))
    }

    /// Sets the gradient scale, and skips the step if `found_inf`.
    pub(crate) fn set_found_inf(&mut self, grad_scale: f64, found_inf: bool) -> Result<()> {
        match &mut self.0 {
            StepStorage::Host(kept) => {
                let numbers = kept.filter(|_| !found_inf);
                *kept = numbers.map(|numbers| StepParams { grad_scale, ..numbers });
                Ok(())
            }
            StepStorage::Gpu(_) => {
                Err(Error::device("step", "the numbers are in memory of the GPU"))
            }
        }
    }

    /// Returns whether the values are in GPU memory.
    pub(crate) fn is_on_gpu(&self) -> bool {
        matches!(self.0, StepStorage::Gpu(_))
    }

    /// The values, for CPU kernels; `None` if the step is skipped.
    pub(crate) fn host(&self) -> Result<Option<StepParams>> {
        match &self.0 {
            StepStorage::Host(numbers) => Ok(*numbers),
            StepStorage::Gpu(memory) => {
                Err(Error::device("step", format!("the numbers are on {:?}", memory.device())))
            }
        }
    }

    /// The values; `None` if the step is skipped. Waits for a GPU that holds them.
    ///
    /// Errors while the device's work is captured.
    pub fn read(&self) -> Result<Option<StepParams>> {
        match &self.0 {
            StepStorage::Host(numbers) => Ok(*numbers),
            StepStorage::Gpu(memory) => cuda::step::read(memory),
        }
    }

    /// The values in GPU memory, for GPU kernels.
    pub(crate) fn gpu(&self) -> Result<&Tensor> {
        match &self.0 {
            StepStorage::Gpu(memory) => Ok(memory),
            StepStorage::Host(_) => {
                Err(Error::device("step", "the numbers are in memory of the host"))
            }
        }
    }

    /// Like [`DeviceStepParams::gpu`], for the kernel that writes them.
    pub(crate) fn gpu_mut(&mut self) -> Result<&mut Tensor> {
        match &mut self.0 {
            StepStorage::Gpu(memory) => Ok(memory),
            StepStorage::Host(_) => {
                Err(Error::device("step", "the numbers are in memory of the host"))
            }
        }
    }
}

/// Runs a body with `$T` bound to the dtype of weights and `$G` to that of their gradients. The two are equal, or one
/// is the accumulator type of the other.
macro_rules! dispatch_update {
    ($op:expr, $weights:expr, $grads:expr, ($T:ident, $G:ident) => $body:expr) => {
        $crate::ops::optim::step::dispatch_update!(@ $op, $weights, $grads, ($T, $G) => $body,
            (F64, f64, F64, f64), (F32, f32, F32, f32),
            (F32, f32, BF16, $crate::bf16), (F32, f32, F16, $crate::f16),
            (BF16, $crate::bf16, BF16, $crate::bf16), (BF16, $crate::bf16, F32, f32),
            (F16, $crate::f16, F16, $crate::f16), (F16, $crate::f16, F32, f32))
    };
    (@ $op:expr, $weights:expr, $grads:expr, ($T:ident, $G:ident) => $body:expr,
        $(($w:ident, $weight:ty, $g:ident, $grad:ty)),*) => {
        match ($weights.dtype(), $grads.dtype()) {
            $(($crate::DType::$w, $crate::DType::$g) => {
                type $T = $weight;
                type $G = $grad;
                $body
            })*
            (weights, grads) => {
                let message = format!("{weights} weights cannot be updated from {grads} gradients");
                return Err($crate::Error::dtype($op, message));
            }
        }
    };
}
pub(crate) use dispatch_update;

/// Errors unless all tensors are contiguous vectors on one device.
pub(crate) fn check_vectors(op: &'static str, vectors: &[&Tensor]) -> Result<()> {
    let strange = |x: &&&Tensor| x.rank() != 1 || !x.is_contiguous();
    if let Some(x) = vectors.iter().find(strange) {
        return Err(Error::shape(op, format!("takes dense vectors, got {x:?}")));
    }
    vectors.windows(2).try_for_each(|pair| crate::core::tensor::check_device(op, pair[0], pair[1]))
}
