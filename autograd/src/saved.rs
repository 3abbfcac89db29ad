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
    /// A value that is cheaper to compute again than to keep.
    Recompute(Recipe),
}

/// How a value is computed again.
#[derive(Clone)]
pub struct Recipe {
    pub(crate) compute: Arc<dyn Fn() -> Result<Tensor> + Send + Sync>,
    /// What is kept for that alone, if not only what the producer keeps anyway.
    pub(crate) held: Option<Tensor>,
}

impl Saved {
    /// Counts the value as kept, unless this thread records nothing: then it is not.
    pub(crate) fn tensor(value: &Tensor) -> Saved {
        Saved::Tensor(value.clone()).counted()
    }

    /// As [`Saved::tensor`], of what a recipe keeps.
    pub(crate) fn recipe(recipe: &Recipe) -> Saved {
        Saved::Recompute(recipe.clone()).counted()
    }

    fn counted(self) -> Saved {
        if current(|recording| matches!(recording, Recording::On)) {
            self.held().into_iter().for_each(|held| held.set_category(Category::Saved));
        }
        self
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
            Saved::Recompute(recipe) => (recipe.compute)(),
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
            Saved::Recompute(recipe) => recipe.held.as_ref(),
            Saved::Leaf(..) => None,
        }
    }
}
