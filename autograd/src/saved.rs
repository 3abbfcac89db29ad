//! What an operation keeps of an operand for its gradient.

use ferrotron_tensor::{Category, Error, Result, Tensor};
use std::sync::Arc;

use crate::Leaf;
use crate::recording::{Recording, current};

/// An operand as kept for backward.
#[derive(Clone)]
pub enum Saved {
    /// The value itself.
    Tensor(Tensor),
    /// A parameter and its version: the value is asked for again in backward, so that a sharded
    /// parameter need not stay gathered in between.
    Leaf(Leaf, u64),
    /// A value that is cheaper to compute again than to keep, from what its producer keeps anyway.
    Recompute(Arc<dyn Fn() -> Result<Tensor> + Send + Sync>),
}

impl Saved {
    /// Counts the value as kept, unless this thread records nothing: then it is not.
    pub(crate) fn tensor(value: &Tensor) -> Saved {
        if current(|recording| matches!(recording, Recording::On)) {
            value.set_category(Category::Saved);
        }
        Saved::Tensor(value.clone())
    }

    /// A parameter as it is now.
    pub(crate) fn leaf(leaf: Leaf) -> Saved {
        let version = leaf.version();
        Saved::Leaf(leaf, version)
    }

    /// The operand's value.
    ///
    /// Errors if a parameter was updated since the forward pass.
    pub fn value(&self) -> Result<Tensor> {
        self.check()?;
        match self {
            Saved::Tensor(tensor) => Ok(tensor.clone()),
            Saved::Recompute(compute) => compute(),
            Saved::Leaf(leaf, _) => leaf.value(),
        }
    }

    /// Errors if this is a parameter that was updated since the forward pass.
    pub(crate) fn check(&self) -> Result<()> {
        match self {
            Saved::Leaf(leaf, version) if leaf.version() != *version => Err(Error::graph(
                "backward",
                format!(
                    "'{}' was updated between forward and backward; call backward before the optimizer step",
                    leaf.name()
                ),
            )),
            _ => Ok(()),
        }
    }

    /// The tensor that is held, if one is: what a memory report counts.
    pub fn held(&self) -> Option<&Tensor> {
        match self {
            Saved::Tensor(tensor) => Some(tensor),
            _ => None,
        }
    }
}
