//! The owner of a leaf, at most one at a time: its flat buffers, which may have memory only while they are used, and the
//! reduction of the gradient.

use ferrotron_tensor::{Error, Result};
use std::sync::Arc;

use super::gradient::Gradient;
use super::hooks::{Fetch, GradientReduction};
use super::value::SharedFlatBuffer;
use crate::{Leaf, lock};

impl Leaf {
    /// Moves the value into a range of `flat`; a lazy value is initialised there.
    pub fn bind_value(&self, flat: &SharedFlatBuffer, range: usize) -> Result<()> {
        self.0.fetch_value.call(self.name())?;
        lock(&self.0.value).bind(self.name(), flat, range)?;
        self.0.fetch_value.set(None);
        Ok(())
    }

    /// Places the gradient in a range of `flat`, whose dtype may be wider. The gradient accumulated so far is
    /// dropped.
    pub fn bind_gradient(&self, flat: &SharedFlatBuffer, range: usize) {
        *lock(&self.0.gradient) = Gradient::flat(flat, range);
        self.0.fetch_gradient.set(None);
    }

    /// Moves the value out of a flat buffer into a tensor of its own, and drops the gradient. A lazy value stays one.
    pub fn unbind(&self) -> Result<()> {
        self.0.fetch_value.call(self.name())?;
        lock(&self.0.value).unbind()?;
        *lock(&self.0.gradient) = Gradient::own();
        self.0.fetch_value.set(None);
        self.0.fetch_gradient.set(None);
        Ok(())
    }

    /// Registers `fetch`, which fills the flat buffer of the value before each use, until the value moves elsewhere: a
    /// sharded parameter has no memory between uses.
    pub fn set_unshard_hook(&self, fetch: Fetch) {
        self.0.fetch_value.set(Some(fetch));
    }

    /// Registers `fetch`, which provides the flat buffer of the gradient before each contribution, until the gradient
    /// moves elsewhere.
    pub fn set_gradient_alloc_hook(&self, fetch: Fetch) {
        self.0.fetch_gradient.set(Some(fetch));
    }

    /// Errors if the leaf has an owner ([`Leaf::set_reduction`]), or had one that has taken shards of its value along.
    pub fn check_unowned(&self) -> Result<()> {
        self.set_reduction(|| Ok(()))?;
        self.0.fetch_value.call(self.name())
    }

    /// Registers `reduce`, which reduces the gradient over ranks, for as long as the result lives. It is called after
    /// as many contributions as [`GradientReduction::expect`] says, after all hooks, and is none of them.
    ///
    /// Errors if there is one already: a leaf has one owner at a time.
    pub fn set_reduction(
        &self,
        reduce: impl Fn() -> Result<()> + Send + Sync + 'static,
    ) -> Result<Arc<GradientReduction>> {
        self.0.reduction.set(reduce).ok_or_else(|| {
            let message = format!(
                "'{}' belongs to a DataParallel or Trainer that still exists: drop that one first \
                 (`DataParallel::unshard` keeps sharded weights)",
                self.name()
            );
            Error::config("leaf", message)
        })
    }

    /// Errors if the value is a copy of shards, which a change of it would not reach.
    pub(super) fn check_whole(&self) -> Result<()> {
        if !self.0.fetch_value.is_set() {
            return Ok(());
        }
        let message = format!(
            "ranks hold shards of '{}' (ZeRO 3): change it before its DataParallel is made or after `DataParallel::unshard`, \
             or change its shard by `ParamAndGradBucket::write_weight`",
            self.name()
        );
        Err(Error::config("leaf", message))
    }
}
