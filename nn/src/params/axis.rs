//! The parallelism axes of a run, as used by parameters.

use std::fmt;

/// An axis of the device mesh, in the order of Megatron-LM: ranks that are adjacent along the first axis are nearest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Tensor parallel (tp): layers are sharded.
    Tensor,
    /// Context parallel (cp): sequences are sharded.
    Context,
    /// Data parallel (dp): the batch is sharded.
    Data,
    /// Pipeline parallel (pp): the model is split into stages.
    Pipeline,
}

impl Axis {
    /// All of them, in order.
    pub const ALL: [Axis; 4] = [Axis::Tensor, Axis::Context, Axis::Data, Axis::Pipeline];
}

/// A set of axes.
///
/// ```
/// use ferrotron_nn::{Axis, AxisSet};
/// let batch = AxisSet::from([Axis::Context, Axis::Data]);
/// assert!(batch.contains(Axis::Data) && !batch.contains(Axis::Tensor));
/// assert_eq!(batch.with(Axis::Tensor).without(Axis::Data), AxisSet::from([Axis::Tensor, Axis::Context]));
/// assert_eq!(batch.intersection(AxisSet::from([Axis::Data])), AxisSet::from([Axis::Data]));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct AxisSet(u8);

impl AxisSet {
    /// The empty set.
    pub const fn none() -> AxisSet {
        AxisSet(0)
    }

    /// Returns whether the set contains `axis`.
    pub fn contains(self, axis: Axis) -> bool {
        self.0 & (1 << axis as u8) != 0
    }

    /// Adds `axis`.
    #[must_use]
    pub fn with(self, axis: Axis) -> AxisSet {
        AxisSet(self.0 | (1 << axis as u8))
    }

    /// Removes `axis`.
    #[must_use]
    pub fn without(self, axis: Axis) -> AxisSet {
        AxisSet(self.0 & !(1 << axis as u8))
    }

    /// The axes that are in both sets.
    #[must_use]
    pub fn intersection(self, other: AxisSet) -> AxisSet {
        AxisSet(self.0 & other.0)
    }

    /// The axes, in order.
    pub fn iter(self) -> impl Iterator<Item = Axis> {
        Axis::ALL.into_iter().filter(move |&axis| self.contains(axis))
    }
}

impl<const N: usize> From<[Axis; N]> for AxisSet {
    fn from(axes: [Axis; N]) -> AxisSet {
        axes.into_iter().collect()
    }
}

impl FromIterator<Axis> for AxisSet {
    fn from_iter<I: IntoIterator<Item = Axis>>(axes: I) -> AxisSet {
        axes.into_iter().fold(AxisSet::none(), AxisSet::with)
    }
}

impl fmt::Debug for AxisSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}
