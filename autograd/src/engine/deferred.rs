//! Weight gradients that are computed after backward.

use ferrotron_tensor::{At, Result, Tensor};
use tracing::trace_span;

use crate::{Accum, Leaf};

/// The time at which weight gradients of linear layers are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightGrads {
    /// Computed within backward.
    Now,
    /// Computed in [`DeferredGrads::run`]: a zero-bubble pipeline schedules them into its bubbles.
    Deferred,
}

type Write = Box<dyn FnOnce(&mut Tensor, Accum) -> Result<()> + Send>;

/// Deferred weight gradients, in backward order.
#[derive(Default)]
#[must_use = "deferred weight gradients are lost unless they are run"]
pub struct DeferredGrads(Vec<(Leaf, Write)>);

impl DeferredGrads {
    pub(crate) fn push(&mut self, leaf: Leaf, write: Write) {
        self.0.push((leaf, write));
    }

    pub(crate) fn append(&mut self, mut other: DeferredGrads) {
        self.0.append(&mut other.0);
    }

    /// Number of deferred gradients.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Computes them.
    pub fn run(self) -> Result<()> {
        self.0.into_iter().try_for_each(|(leaf, write)| {
            let _span = trace_span!("weight gradient", name = leaf.name()).entered();
            leaf.accumulate_with(write).at(leaf.name())
        })
    }
}
