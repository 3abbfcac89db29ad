//! Attention with heads sharded over the ranks.

use ferrotron_autograd::{Var, checkpoint_discard_output};
use ferrotron_nn::{AttentionConfig, AttentionHeads, Context, KvCache, Module, Scope};
use ferrotron_tensor::{Error, Result};

use super::{Branch, ColumnParallelLinear, RowParallelLinear, TensorParallel};
use crate::context_parallel::ContextParallel;

/// Attention like [`ferrotron_nn::Attention`], with heads sharded over the ranks and one all-reduce at the end:
/// Shoeybi et al., figure 3b. A softmax belongs to one head, so it needs no communication with ranks of other heads.
/// With context parallelism, keys and values also come from ranks of other positions.
#[derive(Debug, Clone, Module)]
pub struct ParallelAttention {
    qkv: ColumnParallelLinear,
    heads: AttentionHeads,
    #[module(skip)]
    cp: ContextParallel,
    /// Ranks that hold heads.
    ranks: usize,
    proj: RowParallelLinear,
}

impl ParallelAttention {
    /// The reason why attention cannot be sharded over `ranks`, in one line; `None` if it can. Ranks need whole
    /// heads, with the keys and values that they share.
    pub fn unsupported_reason(config: &AttentionConfig, ranks: usize) -> Option<String> {
        let sizes = [("num-attention-heads", config.heads), ("num-query-groups", config.groups)];
        let (name, size) = sizes.into_iter().find(|(_, size)| !size.is_multiple_of(ranks))?;
        Some(format!("{name} {size} is not a multiple of tensor-model-parallel-size {ranks}"))
    }

    /// Creates the two layers.
    ///
    /// Errors as [`AttentionHeads::new`], or if [`unsupported_reason`](ParallelAttention::unsupported_reason) returns a reason.
    pub fn new(
        scope: &Scope,
        tp: &TensorParallel,
        cp: &ContextParallel,
        config: &AttentionConfig,
    ) -> Result<ParallelAttention> {
        let AttentionConfig { hidden, heads, bias, init, residual_init, .. } = *config;
        let group = tp.group();
        if let Some(why) = ParallelAttention::unsupported_reason(config, group.size()) {
            return Err(Error::config("attention", why).at(scope.path()));
        }
        let widths = config.packed_widths();
        let (qkv, proj) = (scope.child("qkv"), scope.child("proj"));
        Ok(ParallelAttention {
            heads: AttentionHeads::new(scope, config, group.local_range(heads))?,
            cp: cp.clone(),
            ranks: group.size(),
            qkv: ColumnParallelLinear::new(&qkv, tp, hidden, &widths, config.qkv_bias(), init)?,
            proj: RowParallelLinear::new(&proj, tp, widths[0], hidden, bias, residual_init)?,
        })
    }

    /// (B, T, C) -> (B, T, C), with T/tp positions on both sides with sequence parallelism. T counts the positions
    /// `ctx.sequence`. With a cache, positions continue after the cached ones, the new keys and values are appended,
    /// no gradient flows back through attention, and context-parallel ranks have whole sequences.
    ///
    /// Errors as [`ContextParallel::attend`].
    pub fn forward(&self, ctx: &Context, x: &Var, cache: Option<&mut KvCache>) -> Result<Var> {
        self.forward_onto(None, ctx, x, cache).map(Branch::into_var)
    }

    /// [`ParallelAttention::forward`], with the residual if the last product can add it: see [`Branch`].
    pub fn forward_onto(
        &self,
        residual: Option<&Var>,
        ctx: &Context,
        x: &Var,
        cache: Option<&mut KvCache>,
    ) -> Result<Branch> {
        let y = self.attended(ctx, x, None, cache)?; // (B, T, H D / tp)
        self.proj.forward_onto(residual, &y) // (B, T, C)
    }

    /// Like [`forward`](ParallelAttention::forward), with `bias` added to the scores: dims that broadcast to (B, H / tp,
    /// T, S), of the local heads, the positions T of the sequence or the local ones, and all S positions. It gets the
    /// gradient of the local heads and queries. [`TensorParallel::local_bias`] cuts a bias of all heads;
    /// [`AttentionBias`](ferrotron_nn::AttentionBias) has one of local heads.
    ///
    /// Errors as `forward`, if the bias has other dims, or if it is trained and heads of several ranks share it.
    pub fn forward_with_bias(
        &self,
        ctx: &Context,
        x: &Var,
        bias: &Var,
        cache: Option<&mut KvCache>,
    ) -> Result<Var> {
        let of_heads = bias.dims().len().checked_sub(3).map_or(1, |d| bias.dims()[d]);
        if of_heads != self.heads.heads() && self.ranks > 1 && bias.needs_gradient() {
            let message = format!(
                "{} ranks have heads of the bias {:?}, and each a part of its gradient: give \
                 `tp.local_bias(&bias, heads)`",
                self.ranks,
                bias.dims()
            );
            return Err(Error::shape("attention", message).at(self.heads.path()));
        }
        let y = self.attended(ctx, x, Some(bias), cache)?; // (B, T, H D / tp)
        self.proj.forward(&y) // (B, T, C)
    }

    /// The results of all heads: (B, T, C) -> (B, T, H D / tp)
    fn attended(
        &self,
        ctx: &Context,
        x: &Var,
        bias: Option<&Var>,
        cache: Option<&mut KvCache>,
    ) -> Result<Var> {
        let qkv = self.qkv.forward(x)?; // (B, T, (H + 2G) D / tp)
        self.cp.attend(&self.heads, ctx, qkv, bias, cache)
    }

    /// Like [`forward_onto`](ParallelAttention::forward_onto) without a cache, but backward recomputes attention between
    /// the two linear layers: queries, keys and values are saved, their result is not.
    pub fn forward_checkpointed(
        &self,
        residual: Option<&Var>,
        ctx: &Context,
        x: &Var,
    ) -> Result<Branch> {
        let qkv = self.qkv.forward(x)?; // (B, T, (H + 2G) D / tp)
        let (cp, heads, ctx) = (self.cp.clone(), self.heads.clone(), ctx.clone());
        let attend =
            move |qkv: &[Var]| Ok(vec![cp.attend(&heads, &ctx, qkv[0].clone(), None, None)?]);
        let y = checkpoint_discard_output(&[&qkv], attend)?.remove(0); // (B, T, H D / tp)
        self.proj.forward_onto(residual, &y) // (B, T, C)
    }
}
