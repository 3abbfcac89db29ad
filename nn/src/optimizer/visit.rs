//! Access to the state of an optimizer by parameter, for checkpoints.

use ferrotron_tensor::{Error, Result, ShardSpec, Tensor};

use super::Optimizer;
use super::group_state::GroupState;
use super::moment::Moment;
use crate::AxisSet;

impl Optimizer {
    /// Calls `f` with every local shard of a moment, and of the [`MASTER`](super::MASTER) weights: parameter name, moment name,
    /// shard of the global tensor, and value.
    pub fn visit(
        &self,
        f: impl FnMut(&str, &'static str, &ShardSpec, Tensor) -> Result<()>,
    ) -> Result<()> {
        self.visit_where(|_, _| true, f)
    }

    /// Like [`Optimizer::visit`], restricted to entries whose replicated axes, of
    /// [`BufferConfig::axes`](crate::BufferConfig::axes), and shard satisfy the filter. For Adafactor's reductions over a
    /// sharded dim, these include the axis along which it is sharded.
    pub fn visit_where(
        &self,
        mut is_wanted: impl FnMut(AxisSet, &ShardSpec) -> bool,
        mut f: impl FnMut(&str, &'static str, &ShardSpec, Tensor) -> Result<()>,
    ) -> Result<()> {
        for moment in self.groups.iter().flat_map(GroupState::all) {
            for (range, piece) in moment.pieces.iter().enumerate() {
                if is_wanted(piece.replicated, &piece.place) {
                    f(&piece.param, moment.name, &piece.place, moment.flat.tensor(range)?)?;
                }
            }
        }
        Ok(())
    }

    /// Lets `write` change the shard with this number in the order of [`Optimizer::visit`], in place.
    ///
    /// Errors if there is none, a tensor still reads it, or `write` does.
    pub fn write_state(
        &mut self,
        number: usize,
        write: impl FnOnce(&mut Tensor) -> Result<()>,
    ) -> Result<()> {
        let mut range = number;
        for moment in self.groups.iter_mut().flat_map(GroupState::all_mut) {
            if range < moment.pieces.len() {
                return moment.flat.with_mut(range, write);
            }
            range -= moment.pieces.len();
        }
        Err(Error::value("optimizer", format!("there is no state {number}")))
    }

    /// Like [`Optimizer::visit`], with the value to overwrite.
    pub fn visit_mut(
        &mut self,
        mut f: impl FnMut(&str, &'static str, &ShardSpec, &mut Tensor) -> Result<()>,
    ) -> Result<()> {
        for Moment { name, pieces, flat } in self.groups.iter_mut().flat_map(GroupState::all_mut) {
            for (range, piece) in pieces.iter().enumerate() {
                flat.with_mut(range, |tensor| f(&piece.param, name, &piece.place, tensor))?;
            }
        }
        Ok(())
    }
}
