//! What changes from one step of an optimizer to the next, in the place where the device's kernels read it.

use crate::{Device, Error, Result, Tensor, cuda};

/// The numbers of one step of an optimizer, the same for all of its parameters.
///
/// ```
/// use ferrotron_tensor::{Device, ops::step::{Step, StepNumbers}};
/// let device = Device::cpu(1)?;
/// let step = Step::new(&device, &StepNumbers { update: 1, lr: 0.1, grad_scale: 1.0 })?;
/// assert!(Step::new(&device, &StepNumbers { update: 0, lr: 0.1, grad_scale: 1.0 }).is_err());
/// # drop(step);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug)]
pub struct Step(Kept);

#[derive(Debug)]
enum Kept {
    /// With nothing where the step changes nothing.
    Host(Option<StepNumbers>),
    /// In a GPU's memory, so that a recorded step can be repeated with other numbers.
    Gpu(Tensor),
}

/// What a [`Step`] is made of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepNumbers {
    /// Number of this step, from 1: moments begin at 0, and early ones are scaled up.
    pub update: u64,
    /// Learning rate.
    pub lr: f64,
    /// What the gradients are multiplied with: clip coefficient x inverse loss scale.
    pub grad_scale: f64,
}

impl Step {
    /// Puts the numbers where kernels of `device` read them. Nobody waits for that.
    ///
    /// Errors if `update` is 0.
    pub fn new(device: &Device, numbers: &StepNumbers) -> Result<Step> {
        let kept = match device.gpu() {
            None => Kept::Host(None),
            Some(_) => Kept::Gpu(cuda::step::room(device)?),
        };
        let mut step = Step(kept);
        step.set(numbers)?;
        Ok(step)
    }

    /// Puts the numbers of another step into the same place: for the next replay of a [captured](crate::CudaGraph) one,
    /// too. Nobody waits for that, nor for those who still read the old ones.
    ///
    /// Errors if `update` is 0, and while the device's work is captured.
    pub fn set(&mut self, numbers: &StepNumbers) -> Result<()> {
        if numbers.update == 0 {
            return Err(Error::value("step", "steps are counted from 1, got 0"));
        }
        match &mut self.0 {
            Kept::Host(kept) => *kept = Some(*numbers),
            Kept::Gpu(memory) => cuda::step::set(memory, numbers)?,
        }
        Ok(())
    }

    /// Sets what depends on the gradients: what they are multiplied with, and whether nothing is to change.
    pub(crate) fn judge(&mut self, grad_scale: f64, found_inf: bool) -> Result<()> {
        match &mut self.0 {
            Kept::Host(kept) => {
                let numbers = kept.filter(|_| !found_inf);
                *kept = numbers.map(|numbers| StepNumbers { grad_scale, ..numbers });
                Ok(())
            }
            Kept::Gpu(_) => Err(Error::device("step", "the numbers are in memory of the GPU")),
        }
    }

    /// Whether kernels of a GPU read the numbers.
    pub(crate) fn is_on_gpu(&self) -> bool {
        matches!(self.0, Kept::Gpu(_))
    }

    /// The numbers, for kernels of the CPU; nothing if the step changes nothing.
    pub(crate) fn host(&self) -> Result<Option<StepNumbers>> {
        match &self.0 {
            Kept::Host(numbers) => Ok(*numbers),
            Kept::Gpu(memory) => {
                Err(Error::device("step", format!("the numbers are on {:?}", memory.device())))
            }
        }
    }

    /// The numbers as kernels of a GPU read them.
    pub(crate) fn gpu(&self) -> Result<&Tensor> {
        match &self.0 {
            Kept::Gpu(memory) => Ok(memory),
            Kept::Host(_) => Err(Error::device("step", "the numbers are in memory of the host")),
        }
    }

    /// The same, for the kernel that writes them.
    pub(crate) fn gpu_mut(&mut self) -> Result<&mut Tensor> {
        match &mut self.0 {
            Kept::Gpu(memory) => Ok(memory),
            Kept::Host(_) => Err(Error::device("step", "the numbers are in memory of the host")),
        }
    }
}

/// Runs a body with `$T` bound to the type of weights and `$G` to that of their gradients: the same, or one of them
/// the type in which numbers of the other are computed.
macro_rules! dispatch_update {
    ($op:expr, $weights:expr, $grads:expr, ($T:ident, $G:ident) => $body:expr) => {
        $crate::ops::step::dispatch_update!(@ $op, $weights, $grads, ($T, $G) => $body,
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

/// Errors unless all are dense vectors on one device.
pub(crate) fn check_vectors(op: &'static str, vectors: &[&Tensor]) -> Result<()> {
    let strange = |x: &&&Tensor| x.rank() != 1 || !x.is_contiguous();
    if let Some(x) = vectors.iter().find(strange) {
        return Err(Error::shape(op, format!("takes dense vectors, got {x:?}")));
    }
    vectors.windows(2).try_for_each(|pair| crate::tensor::check_device(op, pair[0], pair[1]))
}
