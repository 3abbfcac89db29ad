//! The unit in which an update rule gets parameters, and in which its state is sharded.

/// The unit in which [`UpdateRule::update`](super::UpdateRule::update) gets parameters, and in which ZeRO shards weights,
/// gradients and state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ShardUnit {
    /// Ranges of elements: each rank updates an equal range of each bucket, which may split parameters.
    #[default]
    Elements,
    /// Parameters: each belongs to one rank. All parameters with equal sharding and decay are divided into equal ranges of
    /// elements; a parameter belongs to the rank whose range contains its midpoint. With tensor parallelism a rank has
    /// its shard.
    Parameters,
    /// Hidden matrices as [`ShardUnit::Parameters`], and all else by elements, by the
    /// [fallback](super::UpdateRule::fallback). Hidden matrices have two dims, weight decay, and are no embedding or output
    /// head ([`Param::as_embedding`](crate::Param::as_embedding)). The rule sees them whole under tensor parallelism, too:
    /// [`UpdateStep::on_whole_matrix`](super::UpdateStep::on_whole_matrix).
    HiddenMatrices,
}
