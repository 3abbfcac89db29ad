//! Values that operations save of their operands.

pub(crate) mod hooks;
pub(crate) mod packing;
pub(crate) mod slot;

use ferrotron_tensor::{Category, DType, Error, Result, Tensor};
use std::sync::Arc;

use crate::Leaf;
use crate::engine::recording::{Recording, current};
use crate::saved::slot::{SavedKind, SavedSlot};
use crate::spec::cast;

/// An operand or a result, saved for backward.
///
/// There are three kinds. The value itself, or its replacement by [hooks](crate::saved_tensors_hooks). A parameter
/// and its version: backward reads the value again, so that a sharded parameter need not stay gathered. A value that
/// is cheaper to recompute than to store.
#[derive(Clone)]
pub struct Saved(SavedSource);

#[derive(Clone)]
enum SavedSource {
    Tensor(SavedSlot),
    /// The leaf, its version, and the dtype that the operand was cast to.
    Leaf(Leaf, u64, DType),
    Recompute(Recipe<SavedSlot>),
}

/// A way to recompute a value.
#[derive(Clone)]
pub(crate) enum Recipe<Part> {
    /// Computes it from values that its producer saves anyway.
    Whole(Compute),
    /// Expands a tensor saved for this purpose.
    From(Part, Expand),
}

type Compute = Arc<dyn Fn() -> Result<Tensor> + Send + Sync>;
type Expand = Arc<dyn Fn(&Tensor) -> Result<Tensor> + Send + Sync>;

impl Saved {
    /// Saves an activation.
    pub fn tensor(value: &Tensor) -> Saved {
        Saved(SavedSource::Tensor(keep(value, SavedKind::Activation)))
    }

    /// Saves values that gradients need exactly, such as the log-sum-exp of a row.
    pub fn statistic(value: &Tensor) -> Saved {
        Saved(SavedSource::Tensor(keep(value, SavedKind::Statistic)))
    }

    /// Saves an activation with many zeros.
    pub fn sparse(value: &Tensor) -> Saved {
        Saved(SavedSource::Tensor(keep(value, SavedKind::Sparse)))
    }

    /// Holds a value that backward has computed.
    pub(crate) fn computed(value: Tensor) -> Saved {
        Saved(SavedSource::Tensor(SavedSlot::Tensor(value)))
    }

    /// Saves nothing: `compute` gives the value again, from values that are saved elsewhere.
    pub(crate) fn recomputed(
        compute: impl Fn() -> Result<Tensor> + Send + Sync + 'static,
    ) -> Saved {
        Saved(SavedSource::Recompute(Recipe::Whole(Arc::new(compute))))
    }

    /// Saves a recipe and the tensor that it needs.
    pub(crate) fn recipe(recipe: &Recipe<Tensor>) -> Saved {
        Saved(SavedSource::Recompute(match recipe {
            Recipe::Whole(compute) => Recipe::Whole(compute.clone()),
            Recipe::From(part, whole) => {
                Recipe::From(keep(part, SavedKind::Activation), whole.clone())
            }
        }))
    }

    /// Saves a parameter at its current version, of which the operand has the value in `dtype`.
    pub(crate) fn leaf(leaf: Leaf, dtype: DType) -> Saved {
        let version = leaf.version();
        Saved(SavedSource::Leaf(leaf, version, dtype))
    }

    /// The operand's value.
    ///
    /// Errors if a parameter was updated since the forward pass.
    pub fn value(&self) -> Result<Tensor> {
        self.check()?;
        match &self.0 {
            SavedSource::Tensor(kept) => kept.value(),
            SavedSource::Recompute(Recipe::Whole(compute)) => compute(),
            SavedSource::Recompute(Recipe::From(part, whole)) => whole(&part.value()?),
            SavedSource::Leaf(leaf, _, dtype) => cast(leaf.value()?, *dtype),
        }
    }

    /// Errors if this is a parameter that was updated since the forward pass.
    pub(crate) fn check(&self) -> Result<()> {
        match &self.0 {
            SavedSource::Leaf(leaf, version, _) if leaf.version() != *version => Err(Error::graph(
                "backward",
                format!(
                    "'{}' was updated between forward and backward; call backward before the optimizer step",
                    leaf.name()
                ),
            )),
            _ => Ok(()),
        }
    }

    /// The tensor in device memory that represents it, if there is one; memory reports count it.
    pub fn resident_tensor(&self) -> Option<Tensor> {
        match &self.0 {
            SavedSource::Tensor(kept) | SavedSource::Recompute(Recipe::From(kept, _)) => {
                kept.resident_tensor()
            }
            SavedSource::Recompute(Recipe::Whole(_)) | SavedSource::Leaf(..) => None,
        }
    }
}

/// Counts the value as saved and registers it with hooks, if this thread records; otherwise it is not saved.
fn keep(value: &Tensor, role: SavedKind) -> SavedSlot {
    current(|recording| match recording {
        Recording::On => {
            value.set_category(Category::Saved);
            SavedSlot::Tensor(value.clone())
        }
        Recording::Hooked(scope) => {
            value.set_category(Category::Saved);
            scope.keep(value, role)
        }
        Recording::Off | Recording::Region(_) => SavedSlot::Tensor(value.clone()),
    })
}
