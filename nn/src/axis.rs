//! The axes along which the ranks of a run are laid out, as parameters speak of them.

use std::fmt;

/// An axis of the mesh of ranks, in the order of Megatron-LM: neighbours along the first are nearest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Tensor parallel (tp): layers are cut.
    Tensor,
    /// Context parallel (cp): sequences are cut.
    Context,
    /// Data parallel (dp): the batch is cut.
    Data,
    /// Pipeline parallel (pp): the model is cut into stages.
    Pipeline,
}

impl Axis {
    /// All of them, in order.
    pub const ALL: [Axis; 4] = [Axis::Tensor, Axis::Context, Axis::Data, Axis::Pipeline];
}

/// Some of the axes.
///
/// ```
/// use ferrotron_nn::{Axis, AxisSet};
/// let batch = AxisSet::from([Axis::Context, Axis::Data]);
/// assert!(batch.contains(Axis::Data) && !batch.contains(Axis::Tensor));
/// assert_eq!(batch.with(Axis::Tensor).without(Axis::Data), AxisSet::from([Axis::Tensor, Axis::Context]));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct AxisSet(u8);

impl AxisSet {
    /// None of them.
    pub const fn none() -> AxisSet {
        AxisSet(0)
    }

    /// Whether `axis` is among them.
    pub fn contains(self, axis: Axis) -> bool {
        self.0 & (1 << axis as u8) != 0
    }

    /// These and `axis`.
    #[must_use]
    pub fn with(self, axis: Axis) -> AxisSet {
        AxisSet(self.0 | (1 << axis as u8))
    }

    /// These but `axis`.
    #[must_use]
    pub fn without(self, axis: Axis) -> AxisSet {
        AxisSet(self.0 & !(1 << axis as u8))
    }

    /// The axes, in order.
    pub fn iter(self) -> impl Iterator<Item = Axis> {
        Axis::ALL.into_iter().filter(move |&axis| self.contains(axis))
    }
}

impl<const N: usize> From<[Axis; N]> for AxisSet {
    fn from(axes: [Axis; N]) -> AxisSet {
        axes.into_iter().fold(AxisSet::none(), AxisSet::with)
    }
}

impl fmt::Debug for AxisSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}
