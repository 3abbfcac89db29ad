//! Hooks of a leaf: a list of those that users add, and those of its owner: the reduction of its gradient, and functions
//! that provide its flat buffers.

use ferrotron_tensor::{At, Error, Result};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{ThreadId, current};

use crate::lock;

/// Names a hook for [`Leaf::remove_hook`](crate::Leaf::remove_hook).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HookId(u64);

/// A hook, and the thread that calls it at present.
pub(super) struct Hook<F: ?Sized> {
    id: HookId,
    caller: Mutex<Option<ThreadId>>,
    function: Mutex<Box<F>>,
}

/// The hooks of a leaf, in the order in which they were added.
pub(super) struct HookList<F: ?Sized> {
    next: AtomicU64,
    hooks: Mutex<Vec<Arc<Hook<F>>>>,
}

impl<F: ?Sized> HookList<F> {
    pub(super) fn new() -> HookList<F> {
        HookList { next: AtomicU64::new(0), hooks: Mutex::new(Vec::new()) }
    }

    pub(super) fn add(&self, function: Box<F>) -> HookId {
        let id = HookId(self.next.fetch_add(1, Relaxed));
        let (caller, function) = (Mutex::new(None), Mutex::new(function));
        lock(&self.hooks).push(Arc::new(Hook { id, caller, function }));
        id
    }

    /// Returns whether it was there.
    pub(super) fn remove(&self, id: HookId) -> bool {
        let mut hooks = lock(&self.hooks);
        let before = hooks.len();
        hooks.retain(|hook| hook.id != id);
        hooks.len() < before
    }

    /// The hooks at this time: one that is called may add or remove others.
    pub(super) fn all(&self) -> Vec<Arc<Hook<F>>> {
        lock(&self.hooks).clone()
    }
}

impl<F: ?Sized> Hook<F> {
    /// Passes the hook's function to `call`. Other threads wait for its end.
    ///
    /// Errors if the hook itself has led here: it would wait for ever. `leaf` is the leaf's name.
    pub(super) fn call(&self, leaf: &str, call: impl FnOnce(&mut F) -> Result<()>) -> Result<()> {
        let own = Some(current().id());
        if *lock(&self.caller) == own {
            let message = format!("a hook of '{leaf}' adds to the gradient of '{leaf}' itself");
            return Err(Error::graph("hook", message));
        }
        let mut function = lock(&self.function);
        *lock(&self.caller) = own;
        let result = call(&mut function);
        *lock(&self.caller) = None;
        result
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

/// Provides the flat buffer of a leaf's value or gradient. Called before each use.
pub type Fetch = Arc<dyn Fn() -> Result<()> + Send + Sync>;

/// The place for a [`Fetch`].
#[derive(Default)]
pub(super) struct FetchSlot(Mutex<Option<Fetch>>);

impl FetchSlot {
    pub(super) fn set(&self, fetch: Option<Fetch>) {
        *lock(&self.0) = fetch;
    }

    pub(super) fn is_set(&self) -> bool {
        lock(&self.0).is_some()
    }

    /// Calls the function, if there is one, for the leaf of this name.
    pub(super) fn call(&self, name: &str) -> Result<()> {
        let fetch = lock(&self.0).clone();
        fetch.map_or(Ok(()), |fetch| fetch()).at(name)
    }
}
