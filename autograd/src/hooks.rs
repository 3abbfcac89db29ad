//! Hooks of what is kept for backward: something else may be kept in its place, from which it is made again when it
//! is needed. Moving it to other memory and storing it in fewer bytes are hooks.

use ferrotron_tensor::Result;

use crate::KeptTensor;
use crate::kept::HookScope;
use crate::recording::{Recording, current, with};

/// Runs `f`, and lets `pack` decide what is kept of the tensors that its operations keep for backward: each buffer
/// once, however many operations keep it, and only those that are kept for backward alone. Parameters, and what is
/// computed again, are not among them.
///
/// `pack` is called once, when `f` is done. It may hold on to the handles and replace tensors later, from any thread:
/// until then they stay what they are. What a [checkpoint](crate::checkpoint) computes again in backward, it keeps for
/// moments only, and without hooks. Where this thread records nothing, `f` simply runs.
///
/// ```
/// use ferrotron_autograd::{Leaf, Packed, saved_tensors_hooks};
/// use ferrotron_tensor::{DType, Device, Result, Tensor};
///
/// /// Kept in 16 bits.
/// struct Half(Tensor);
///
/// impl Packed for Half {
///     fn unpack(&self) -> Result<Tensor> {
///         self.0.cast(DType::F32)
///     }
///
///     fn held(&self) -> Option<Tensor> {
///         Some(self.0.clone())
///     }
/// }
///
/// let x = Leaf::new("x", Tensor::full(&Device::cpu(1)?, DType::F32, &[8], 3.0)?);
/// let y = x.var()?.mul_scalar(2.0)?;
/// let z = saved_tensors_hooks(
///     |kept| {
///         for kept in kept {
///             if let Some(tensor) = kept.tensor()? {
///                 kept.replace(Half(tensor.cast(DType::BF16)?));
///             }
///         }
///         Ok(())
///     },
///     || y.square()?.sum_all(),
/// )?;
/// assert_eq!(z.saved_bytes(), 8 * 2);
/// z.backward()?;
/// assert_eq!(x.gradient()?.unwrap().to_f64()?, [24.0; 8]); // 2 (2 x) 2
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// Errors as `f` and `pack` do.
pub fn saved_tensors_hooks<R>(
    pack: impl FnOnce(Vec<KeptTensor>) -> Result<()>,
    f: impl FnOnce() -> Result<R>,
) -> Result<R> {
    if !current(|recording| recording.makes_nodes()) {
        return f();
    }
    let (result, ended) = with(Recording::Hooked(HookScope::default()), f);
    let result = result?;
    let Recording::Hooked(scope) = ended else { unreachable!("the mode set above comes back") };
    pack(scope.into_handles())?;
    Ok(result)
}
