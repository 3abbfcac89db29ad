//! The direction of a sort.

/// The direction of a sort.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SortOrder {
    /// The smallest first.
    Ascending,
    /// The largest first.
    Descending,
}
