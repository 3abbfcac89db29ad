//! The granularity at which the state of an optimizer is sharded.

/// The granularity at which a bucket is sharded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ShardUnit {
    /// Elements: equal ranges of each bucket, which may split parameters.
    Elements,
    /// Parameters, for optimizers that need whole tensors. All parameters with equal sharding and decay are divided
    /// into equal ranges of elements; a parameter belongs to the rank whose range contains its midpoint.
    Parameters,
    /// Hidden matrices by [`ShardUnit::Parameters`], and all else by [`ShardUnit::Elements`]: see
    /// `Param::is_hidden_matrix`.
    HiddenMatrices,
}
