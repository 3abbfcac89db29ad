//! Saved-tensor hooks: they replace a tensor saved for backward by another object, which restores it on demand.
//! Offloading and compression are such hooks.

use ferrotron_tensor::Result;

use crate::SavedTensorHandle;
use crate::engine::recording::{Recording, current, with};
use crate::saved::slot::HookScope;

/// Runs `f`, and lets `pack` replace the tensors that its operations save for backward. `pack` gets each buffer once,
/// even if several operations save it, and only buffers saved for backward alone: no parameters, and nothing that is
/// recomputed.
///
/// `pack` is called once, after `f`. It may keep the handles and replace tensors later, from any thread. Tensors that
/// a [checkpoint](crate::checkpoint) recomputes in backward are short-lived and bypass the hooks. If recording is
/// off, `f` runs without hooks.
///
/// Errors as `f` and `pack` do.
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
///     fn resident_tensor(&self) -> Option<Tensor> {
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
pub fn saved_tensors_hooks<R>(
    pack: impl FnOnce(Vec<SavedTensorHandle>) -> Result<()>,
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
