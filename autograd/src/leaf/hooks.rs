//! Hooks of a leaf: a list of those that users add, and the reduction of its gradient, which is none of them.

use ferrotron_tensor::Result;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};

use crate::lock;

/// Names a hook for [`Leaf::remove_hook`](crate::Leaf::remove_hook).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HookId(u64);

/// The hooks of a list, in the order in which they were added.
pub(super) struct HookList<F: ?Sized> {
    next: AtomicU64,
    hooks: Mutex<Vec<(HookId, Arc<Mutex<F>>)>>,
}

impl<F: ?Sized> HookList<F> {
    pub(super) fn new() -> HookList<F> {
        HookList { next: AtomicU64::new(0), hooks: Mutex::new(Vec::new()) }
    }

    pub(super) fn add(&self, hook: Arc<Mutex<F>>) -> HookId {
        let id = HookId(self.next.fetch_add(1, Relaxed));
        lock(&self.hooks).push((id, hook));
        id
    }

    /// Returns whether it was there.
    pub(super) fn remove(&self, id: HookId) -> bool {
        let mut hooks = lock(&self.hooks);
        let before = hooks.len();
        hooks.retain(|(other, _)| *other != id);
        hooks.len() < before
    }

    /// The hooks at this time: one that is called may add or remove others.
    pub(super) fn all(&self) -> Vec<Arc<Mutex<F>>> {
        lock(&self.hooks).iter().map(|(_, hook)| hook.clone()).collect()
    }
}

/// The reduction of a leaf's gradient: see [`Leaf::set_reduction`](crate::Leaf::set_reduction). It lasts as long as
/// this handle.
pub struct GradientReduction {
    /// The contributions after which it is called; 0 for never.
    expected: AtomicUsize,
    reduce: Box<dyn Fn() -> Result<()> + Send + Sync>,
}

impl GradientReduction {
    /// Calls the reduction after so many contributions (uses times micro-batches, deferred ones included) since the
    /// last [`Leaf::zero_gradient`](crate::Leaf::zero_gradient).
    pub fn expect(&self, contributions: usize) {
        self.expected.store(contributions, Relaxed);
    }
}

/// The place for a leaf's reduction, which its owner keeps alive.
#[derive(Default)]
pub(super) struct ReductionSlot(Mutex<Weak<GradientReduction>>);

impl ReductionSlot {
    /// Registers a reduction; `None` if there is one.
    pub(super) fn set(
        &self,
        reduce: impl Fn() -> Result<()> + Send + Sync + 'static,
    ) -> Option<Arc<GradientReduction>> {
        let mut slot = lock(&self.0);
        if slot.strong_count() > 0 {
            return None;
        }
        let expected = AtomicUsize::new(0);
        let reduction = Arc::new(GradientReduction { expected, reduce: Box::new(reduce) });
        *slot = Arc::downgrade(&reduction);
        Some(reduction)
    }

    /// Calls the reduction if this is the number of contributions that it expects.
    pub(super) fn arrived(&self, contributions: usize) -> Result<()> {
        let reduction = lock(&self.0).upgrade();
        match reduction {
            Some(one) if one.expected.load(Relaxed) == contributions => (one.reduce)(),
            _ => Ok(()),
        }
    }
}
