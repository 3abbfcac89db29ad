//! What an operation keeps of an operand for its gradient.

use ferrotron_tensor::{Category, Error, Result, Tensor};
use std::sync::Arc;

use crate::Leaf;
use crate::kept::{Kept, Role};
use crate::recording::{Recording, current};

/// An operand, or a result, as kept for backward.
///
/// It is one of three things: the value itself (or what [hooks](crate::saved_tensors_hooks) keep in its place); a
/// parameter and its version, whose value is asked for again in backward, so that a sharded parameter need not stay
/// gathered in between; a value that is cheaper to compute again than to keep.
#[derive(Clone)]
pub struct Saved(Inner);

#[derive(Clone)]
enum Inner {
    Tensor(Kept),
    Leaf(Leaf, u64),
    Recompute(Recipe<Kept>),
}

/// How a value is computed again.
#[derive(Clone)]
pub(crate) enum Recipe<Part> {
    /// From what its producer keeps anyway.
    Whole(Compute),
    /// From what is kept for that alone.
    From(Part, Expand),
}

type Compute = Arc<dyn Fn() -> Result<Tensor> + Send + Sync>;
type Expand = Arc<dyn Fn(&Tensor) -> Result<Tensor> + Send + Sync>;

impl Saved {
    /// The values of an activation.
    pub fn tensor(value: &Tensor) -> Saved {
        Saved(Inner::Tensor(keep(value, Role::Activation)))
    }

    /// Numbers that gradients need as they are, such as the log-sum-exp of a row.
    pub fn statistic(value: &Tensor) -> Saved {
        Saved(Inner::Tensor(keep(value, Role::Statistic)))
    }

    /// The values of an activation of which many are zero.
    pub fn sparse(value: &Tensor) -> Saved {
        Saved(Inner::Tensor(keep(value, Role::Sparse)))
    }

    /// What a recipe computes, of which its part is kept.
    pub(crate) fn recipe(recipe: &Recipe<Tensor>) -> Saved {
        Saved(Inner::Recompute(match recipe {
            Recipe::Whole(compute) => Recipe::Whole(compute.clone()),
            Recipe::From(part, whole) => Recipe::From(keep(part, Role::Activation), whole.clone()),
        }))
    }

    /// A parameter as it is now.
    pub(crate) fn leaf(leaf: Leaf) -> Saved {
        let version = leaf.version();
        Saved(Inner::Leaf(leaf, version))
    }

    /// The operand's value.
    ///
    /// Errors if a parameter was updated since the forward pass.
    pub fn value(&self) -> Result<Tensor> {
        self.check()?;
        match &self.0 {
            Inner::Tensor(kept) => kept.value(),
            Inner::Recompute(Recipe::Whole(compute)) => compute(),
            Inner::Recompute(Recipe::From(part, whole)) => whole(&part.value()?),
            Inner::Leaf(leaf, _) => leaf.value(),
        }
    }

    /// Errors if this is a parameter that was updated since the forward pass.
    pub(crate) fn check(&self) -> Result<()> {
        match &self.0 {
            Inner::Leaf(leaf, version) if leaf.version() != *version => Err(Error::graph(
                "backward",
                format!(
                    "'{}' was updated between forward and backward; call backward before the optimizer step",
                    leaf.name()
                ),
            )),
            _ => Ok(()),
        }
    }

    /// The tensor that the device's memory holds for it, if there is one: what a memory report counts.
    pub fn held(&self) -> Option<Tensor> {
        match &self.0 {
            Inner::Tensor(kept) | Inner::Recompute(Recipe::From(kept, _)) => kept.held(),
            Inner::Recompute(Recipe::Whole(_)) | Inner::Leaf(..) => None,
        }
    }
}

/// Counts the value as kept, unless this thread records nothing: then it is not. Hooks learn of it.
fn keep(value: &Tensor, role: Role) -> Kept {
    current(|recording| match recording {
        Recording::On => {
            value.set_category(Category::Saved);
            Kept::Tensor(value.clone())
        }
        Recording::Hooked(scope) => {
            value.set_category(Category::Saved);
            scope.keep(value, role)
        }
        Recording::Off | Recording::Region(_) => Kept::Tensor(value.clone()),
    })
}
