//! A tensor that is kept for backward, or what is kept in its place.

use ferrotron_tensor::{Category, Layout, Result, Tensor};
use std::sync::{Arc, Mutex, Weak};

use crate::lock;

/// What is kept in place of a tensor: see [`saved_tensors_hooks`](crate::saved_tensors_hooks).
pub trait Packed: Send + Sync {
    /// The tensor again: a vector of the elements and the type that [`KeptTensor::tensor`] had.
    fn unpack(&self) -> Result<Tensor>;

    /// The tensor in the device's memory that is kept for it, if there is one: what a memory report counts.
    fn held(&self) -> Option<Tensor>;
}

/// What gradients need a kept tensor for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// The values of an activation: a small change of them changes gradients a little.
    Activation,
    /// The same, of which many are zero: the result of a ReLU.
    Sparse,
    /// Numbers of which every bit counts, such as the log-sum-exp of a row.
    Statistic,
}

/// A handle of a tensor that is kept for backward. It keeps nothing itself.
#[derive(Clone)]
pub struct KeptTensor(Weak<Cell>);

impl KeptTensor {
    /// All elements of the tensor's buffer as a vector, whatever views of it are kept; `None` once nobody needs it any
    /// more.
    pub fn tensor(&self) -> Result<Option<Tensor>> {
        self.0.upgrade().map(|cell| cell.packed().unpack()).transpose()
    }

    /// What it is needed for.
    pub fn role(&self) -> Role {
        self.0.upgrade().map_or(Role::Statistic, |cell| *lock(&cell.role))
    }

    /// Keeps `packed` in its place from now on.
    pub fn replace(&self, packed: impl Packed + 'static) {
        if let Some(cell) = self.0.upgrade() {
            let packed: Arc<dyn Packed> = Arc::new(packed);
            let old = std::mem::replace(&mut *lock(&cell.packed), packed);
            drop(old); // without the lock
        }
    }
}

/// What several views of one buffer share.
pub(crate) struct Cell {
    role: Mutex<Role>,
    packed: Mutex<Arc<dyn Packed>>,
}

impl Cell {
    fn packed(&self) -> Arc<dyn Packed> {
        lock(&self.packed).clone()
    }
}

/// A tensor that is kept as it is.
struct Plain(Tensor);

impl Packed for Plain {
    fn unpack(&self) -> Result<Tensor> {
        Ok(self.0.clone())
    }

    fn held(&self) -> Option<Tensor> {
        Some(self.0.clone())
    }
}

/// A kept tensor.
#[derive(Clone)]
pub(crate) enum Kept {
    /// The value itself.
    Tensor(Tensor),
    /// What hooks know of, and how its buffer is seen.
    Hooked(Arc<Cell>, Layout),
}

impl Kept {
    pub fn value(&self) -> Result<Tensor> {
        match self {
            Kept::Tensor(tensor) => Ok(tensor.clone()),
            Kept::Hooked(cell, layout) => cell.packed().unpack()?.as_strided(layout),
        }
    }

    pub fn held(&self) -> Option<Tensor> {
        match self {
            Kept::Tensor(tensor) => Some(tensor.clone()),
            Kept::Hooked(cell, _) => cell.packed().held(),
        }
    }
}

/// What was kept while hooks were set, by the identity of its buffer, which lives at least as long as this.
#[derive(Default)]
pub(crate) struct HookScope(Vec<(usize, Arc<Cell>)>);

impl HookScope {
    /// Takes up a tensor that was just counted as kept.
    pub fn keep(&mut self, value: &Tensor, role: Role) -> Kept {
        // Weights, for example, live anyway.
        if value.category() != Category::Saved {
            return Kept::Tensor(value.clone());
        }
        let id = value.buffer_id();
        let known = self.0.iter().find(|(known, _)| *known == id).map(|(_, cell)| cell.clone());
        let cell = known.unwrap_or_else(|| {
            let packed: Arc<dyn Packed> = Arc::new(Plain(value.whole_buffer()));
            let cell = Arc::new(Cell { role: Mutex::new(role), packed: Mutex::new(packed) });
            self.0.push((id, cell.clone()));
            cell
        });
        // The strictest role counts of those that several operations need it in.
        let mut strictest = lock(&cell.role);
        *strictest = role.max(*strictest);
        drop(strictest);
        Kept::Hooked(cell, value.layout().clone())
    }

    /// Handles of what is still kept by somebody else.
    pub fn into_handles(self) -> Vec<KeptTensor> {
        let handles: Vec<_> = self.0.iter().map(|(_, cell)| Arc::downgrade(cell)).collect();
        drop(self);
        handles.into_iter().filter(|cell| cell.strong_count() > 0).map(KeptTensor).collect()
    }
}
