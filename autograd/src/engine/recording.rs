//! Controls whether operations are recorded, by a value of each thread. It holds no graph.

use std::cell::RefCell;

use crate::Leaf;
use crate::saved::slot::HookScope;

thread_local! {
    static CURRENT: RefCell<Recording> = const { RefCell::new(Recording::On) };
}

/// The effect of [`crate::Var::record`] on this thread.
pub(crate) enum Recording {
    /// Creates nodes.
    On,
    /// Creates nodes, and collects the tensors that they save.
    Hooked(HookScope),
    /// Creates no nodes.
    Off,
    /// Creates no nodes, but logs the leaves that were used: the forward pass of a checkpoint region.
    Region(Vec<Leaf>),
}

impl Recording {
    /// Returns whether operations are recorded.
    pub(crate) fn makes_nodes(&self) -> bool {
        matches!(self, Recording::On | Recording::Hooked(_))
    }
}

/// Runs `f` with this thread's recording mode set to `mode`. Returns the mode at the end of `f`, which holds the log
/// of a region. The previous mode is restored even if `f` panics.
pub(crate) fn with<R>(mode: Recording, f: impl FnOnce() -> R) -> (R, Recording) {
    struct Restore(Option<Recording>);
    impl Restore {
        fn now(&mut self) -> Option<Recording> {
            self.0.take().map(|previous| CURRENT.replace(previous))
        }
    }
    impl Drop for Restore {
        fn drop(&mut self) {
            self.now();
        }
    }
    let mut restore = Restore(Some(CURRENT.replace(mode)));
    let result = f();
    let ended = restore.now().expect("restored only here or on unwinding");
    (result, ended)
}

/// Calls `f` with this thread's recording mode.
pub(crate) fn current<R>(f: impl FnOnce(&mut Recording) -> R) -> R {
    CURRENT.with_borrow_mut(f)
}

/// Runs `f` without recording: its results need no gradient and nothing is saved for backward.
///
/// ```
/// use ferrotron_autograd::{Leaf, no_grad};
/// use ferrotron_tensor::{DType, Device, Tensor};
/// let w = Leaf::new("w", Tensor::full(&Device::cpu(1)?, DType::F32, &[2], 1.0)?);
/// let y = no_grad(|| w.var()?.exp())?;
/// assert!(!y.needs_gradient());
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn no_grad<R>(f: impl FnOnce() -> R) -> R {
    with(Recording::Off, f).0
}
