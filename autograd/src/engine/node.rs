//! A node of the graph: a sequence number, edges to the sources of its operands, and one consumable backward.

use ferrotron_tensor::{DType, Device, Dims, Tensor};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use crate::{Backward, Leaf};

/// The source of a variable's value.
#[derive(Clone)]
pub(crate) enum Source {
    /// An output of an operation.
    Node(Arc<Node>, usize),
    /// A trainable value.
    Leaf(Leaf),
}

/// Dims, dtype and device of the gradient of an operand or output.
#[derive(Clone)]
pub(crate) struct Slot {
    pub(crate) dims: Dims,
    pub(crate) dtype: DType,
    pub(crate) device: Device,
}

impl Slot {
    pub(crate) fn from_tensor(value: &Tensor) -> Slot {
        Slot { dims: value.dims().into(), dtype: value.dtype(), device: value.device().clone() }
    }

    /// The slot of a leaf. It does not read the value, which may be sharded.
    pub(crate) fn from_leaf(leaf: &Leaf) -> Slot {
        Slot { dims: leaf.dims().into(), dtype: leaf.dtype(), device: leaf.device().clone() }
    }
}

/// An operand: its source, if a gradient is needed, and the slot of that gradient.
pub(crate) type Edge = (Option<Source>, Slot);

/// One recorded operation.
pub(crate) struct Node {
    pub(crate) name: &'static str,
    /// Creation order, which is a topological order and the same on every rank.
    pub(crate) seq: u64,
    pub(crate) inputs: Vec<Edge>,
    pub(crate) outputs: Vec<Slot>,
    backward: Mutex<Option<Box<dyn Backward>>>,
}

impl Node {
    pub(crate) fn new(inputs: Vec<Edge>, outputs: Vec<Slot>, backward: Box<dyn Backward>) -> Node {
        static SEQUENCE: AtomicU64 = AtomicU64::new(0);
        Node {
            name: backward.name(),
            seq: SEQUENCE.fetch_add(1, Relaxed),
            inputs,
            outputs,
            backward: Mutex::new(Some(backward)),
        }
    }

    /// The backward; `None` if it was already taken.
    pub(crate) fn take(&self) -> Option<Box<dyn Backward>> {
        self.backward.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Calls `f` with the backward if it has not been consumed.
    pub(crate) fn peek<R>(&self, f: impl FnOnce(&dyn Backward) -> R) -> Option<R> {
        self.backward.lock().unwrap_or_else(PoisonError::into_inner).as_deref().map(f)
    }
}

impl Drop for Node {
    /// Drops chains iteratively: dropping a graph of a million nodes must not recurse.
    fn drop(&mut self) {
        let mut orphans: Vec<Source> =
            self.inputs.drain(..).filter_map(|(source, _)| source).collect();
        while let Some(source) = orphans.pop() {
            if let Source::Node(node, _) = source
                && let Some(mut node) = Arc::into_inner(node)
            {
                orphans.extend(node.inputs.drain(..).filter_map(|(source, _)| source));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{Leaf, Var};
    use ferrotron_tensor::{DType, Device, Result, Tensor};

    #[test]
    fn a_chain_of_a_million_nodes_drops_without_recursion() -> Result<()> {
        let leaf = Leaf::new("x", Tensor::full(&Device::cpu(1)?, DType::F32, &[1], 1.0)?);
        let mut x: Var = leaf.var()?;
        for _ in 0..1_000_000 {
            x = x.neg()?;
        }
        drop(x);
        Ok(())
    }
}
