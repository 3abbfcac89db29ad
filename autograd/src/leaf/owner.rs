//! The owner of a leaf, at most one at a time: its flat buffers, which may have memory only while they are used, and the
//! reduction of the gradient.

use ferrotron_tensor::{Error, Result};
use std::sync::Arc;

use super::gradient::Gradient;
use super::hooks::{Fetch, FetchSlot, GradientReduction};
use super::shared_flat::SharedFlatBuffer;
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
        self.0.fetch_value.set(None);
        self.unbind_gradient();
        Ok(())
    }

    /// Drops the gradient. The next one has a tensor of its own.
    pub fn unbind_gradient(&self) {
        *lock(&self.0.gradient) = Gradient::own();
        self.0.fetch_gradient.set(None);
    }

    /// Registers `fetch`, which fills the flat buffer of the value before each use, until the value moves elsewhere: a
    /// sharded parameter has no memory between uses.
    ///
    /// Replaces the one before. Errors if that belongs to an owner ([`Leaf::set_reduction`]) that still exists.
    pub fn set_unshard_hook(&self, fetch: Fetch) -> Result<()> {
        self.set_fetch(&self.0.fetch_value, "value", fetch)
    }

    /// Registers `fetch`, which provides the flat buffer of the gradient before each contribution, until the gradient
    /// moves elsewhere.
    ///
    /// Replaces the one before. Errors if that belongs to an owner ([`Leaf::set_reduction`]) that still exists.
    pub fn set_gradient_alloc_hook(&self, fetch: Fetch) -> Result<()> {
        self.set_fetch(&self.0.fetch_gradient, "gradient", fetch)
    }

    fn set_fetch(&self, slot: &FetchSlot, what: &str, fetch: Fetch) -> Result<()> {
        if slot.is_set() && self.0.reduction.is_set() {
            let message = format!(
                "the {what} of '{}' comes from a DataParallel or Trainer that still exists: drop that one before you \
                 register another hook (`DataParallel::unshard` keeps sharded weights)",
                self.name()
            );
            return Err(Error::config("leaf", message));
        }
        slot.set(Some(fetch));
        Ok(())
    }

    /// Errors if the leaf has an owner ([`Leaf::set_reduction`]), or had one that has taken shards of its value along.
    pub fn check_unowned(&self) -> Result<()> {
        if self.0.reduction.is_set() {
            return Err(self.owned());
        }
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
        self.0.reduction.set(reduce).ok_or_else(|| self.owned())
    }

    fn owned(&self) -> Error {
        let message = format!(
            "'{}' belongs to a DataParallel or Trainer that still exists: drop that one first (`DataParallel::unshard` \
             keeps sharded weights)",
            self.name()
        );
        Error::config("leaf", message)
    }

    /// Errors if the value is fetched before each use ([`Leaf::set_unshard_hook`]), so that a change of it would be lost.
    pub(super) fn check_whole(&self) -> Result<()> {
        if !self.0.fetch_value.is_set() {
            return Ok(());
        }
        let message = format!(
            "'{}' is fetched before each use (`Leaf::set_unshard_hook`), and a change would be lost: change what it is \
             fetched from (with ZeRO 3, its shard by `ParamAndGradBucket::write_weight`), or change it before its \
             DataParallel is made or after `DataParallel::unshard`",
            self.name()
        );
        Err(Error::config("leaf", message))
    }
}
