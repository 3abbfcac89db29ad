//! A tensor saved for backward, or its replacement by hooks.

use ferrotron_tensor::{Category, Layout, Result, Tensor};
use std::sync::{Arc, Mutex, Weak};

use crate::lock;

/// A replacement of a saved tensor: see [`saved_tensors_hooks`](crate::saved_tensors_hooks).
pub trait Packed: Send + Sync {
    /// Restores the tensor: a vector of the elements and dtype of [`SavedTensorHandle::tensor`].
    fn unpack(&self) -> Result<Tensor>;

    /// The tensor in device memory that represents it, if there is one; memory reports count it.
    fn resident_tensor(&self) -> Option<Tensor>;
}

/// The precision that gradients need from a saved tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SavedKind {
    /// An activation: a small change causes a small change of gradients.
    Activation,
    /// An activation with many zeros: the result of a ReLU.
    Sparse,
    /// A value that must be exact, such as the log-sum-exp of a row.
    Statistic,
}

/// A weak handle of a tensor saved for backward.
#[derive(Clone)]
pub struct SavedTensorHandle(Weak<Cell>);

impl SavedTensorHandle {
    /// All elements of the tensor's buffer as a vector, regardless of the saved views; `None` after its last use.
    pub fn tensor(&self) -> Result<Option<Tensor>> {
        self.0.upgrade().map(|cell| cell.packed().unpack()).transpose()
    }

    /// The precision that gradients need.
    pub fn kind(&self) -> SavedKind {
        self.0.upgrade().map_or(SavedKind::Statistic, |cell| *lock(&cell.role))
    }

    /// Replaces the tensor by `packed`.
    pub fn replace(&self, packed: impl Packed + 'static) {
        if let Some(cell) = self.0.upgrade() {
            let packed: Arc<dyn Packed> = Arc::new(packed);
            let old = std::mem::replace(&mut *lock(&cell.packed), packed);
            drop(old); // without the lock
        }
    }
}

/// The state shared by several views of one buffer.
pub(crate) struct Cell {
    role: Mutex<SavedKind>,
    packed: Mutex<Arc<dyn Packed>>,
}

impl Cell {
    fn packed(&self) -> Arc<dyn Packed> {
        lock(&self.packed).clone()
    }
}

/// A saved tensor that was not replaced.
struct Plain(Tensor);

impl Packed for Plain {
    fn unpack(&self) -> Result<Tensor> {
        Ok(self.0.clone())
    }

    fn resident_tensor(&self) -> Option<Tensor> {
        Some(self.0.clone())
    }
}

/// A saved tensor.
#[derive(Clone)]
pub(crate) enum SavedSlot {
    /// The value itself.
    Tensor(Tensor),
    /// A tensor that hooks can replace, and the layout of the view.
    Hooked(Arc<Cell>, Layout),
}

impl SavedSlot {
    pub fn value(&self) -> Result<Tensor> {
        match self {
            SavedSlot::Tensor(tensor) => Ok(tensor.clone()),
            SavedSlot::Hooked(cell, layout) => cell.packed().unpack()?.as_strided(layout),
        }
    }

    pub fn resident_tensor(&self) -> Option<Tensor> {
        match self {
            SavedSlot::Tensor(tensor) => Some(tensor.clone()),
            SavedSlot::Hooked(cell, _) => cell.packed().resident_tensor(),
        }
    }
}

/// The tensors saved while hooks were set, keyed by buffer identity. A buffer lives at least as long as its key.
#[derive(Default)]
pub(crate) struct HookScope(Vec<(usize, Arc<Cell>)>);

impl HookScope {
    /// Registers a saved tensor, which was just counted as saved.
    pub fn keep(&mut self, value: &Tensor, role: SavedKind) -> SavedSlot {
        // Tensors of other categories, such as weights, are kept alive elsewhere.
        if value.category() != Category::Saved {
            return SavedSlot::Tensor(value.clone());
        }
        let id = value.buffer_id();
        let known = self.0.iter().find(|(known, _)| *known == id).map(|(_, cell)| cell.clone());
        let cell = known.unwrap_or_else(|| {
            let packed: Arc<dyn Packed> = Arc::new(Plain(value.whole_buffer()));
            let cell = Arc::new(Cell { role: Mutex::new(role), packed: Mutex::new(packed) });
            self.0.push((id, cell.clone()));
            cell
        });
        // If several operations save the buffer, the strictest role applies.
        let mut strictest = lock(&cell.role);
        *strictest = role.max(*strictest);
        drop(strictest);
        SavedSlot::Hooked(cell, value.layout().clone())
    }

    /// Handles of the tensors that are still saved.
    pub fn into_handles(self) -> Vec<SavedTensorHandle> {
        let handles: Vec<_> = self.0.iter().map(|(_, cell)| Arc::downgrade(cell)).collect();
        drop(self);
        handles.into_iter().filter(|cell| cell.strong_count() > 0).map(SavedTensorHandle).collect()
    }
}
