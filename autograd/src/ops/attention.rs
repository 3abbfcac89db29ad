//! Gradient of attention. It saves q, k, v, the output and the log-sum-exp of each row, and never materializes a
//! score matrix.

use ferrotron_tensor::ops::attention::{
    AttentionConfig, attention as attend, attention_backward, attention_backward_packed,
    split_packed,
};
use ferrotron_tensor::{Result, Tensor};

use crate::{Backward, Cotangents, InputGrads, Saved, Var, forward_span};

struct AttentionBackward {
    operands: [Saved; 3],
    out: Saved,
    lse: Saved,
    config: AttentionConfig,
}

impl Backward for AttentionBackward {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn saved(&self) -> Vec<Tensor> {
        self.operands
            .iter()
            .chain([&self.out, &self.lse])
            .filter_map(Saved::resident_tensor)
            .collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let [q, k, v] =
            [self.operands[0].value()?, self.operands[1].value()?, self.operands[2].value()?];
        let (out, lse) = (self.out.value()?, self.lse.value()?);
        let (dq, dk, dv) =
            attention_backward(&dy.single()?, (&q, &k, &v), (&out, &lse), &self.config)?;
        dx.accumulate(0, dq)?;
        dx.accumulate(1, dk)?;
        dx.accumulate(2, dv)
    }
}

/// Attention of q (B, T, H, D) to k and v (B, S, G, D), where G divides H: (B, T, H, D).
pub fn attention(q: &Var, k: &Var, v: &Var, config: &AttentionConfig) -> Result<Var> {
    let _span = forward_span("attention");
    let (out, lse) = attend(q.value(), k.value(), v.value(), config)?;
    Var::record(&[q, k, v], out.clone(), || AttentionBackward {
        operands: [q.save(), k.save(), v.save()],
        out: Saved::tensor(&out),
        lse: Saved::statistic(&lse),
        config: config.clone(),
    })
}

struct PackedBackward {
    qkv: Saved,
    out: Saved,
    lse: Saved,
    heads: usize,
    groups: usize,
    config: AttentionConfig,
}

impl Backward for PackedBackward {
    fn name(&self) -> &'static str {
        "packed_attention"
    }

    fn saved(&self) -> Vec<Tensor> {
        [&self.qkv, &self.out, &self.lse].into_iter().filter_map(Saved::resident_tensor).collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let (q, k, v) = split_packed(&self.qkv.value()?, self.heads, self.groups)?;
        let (out, lse) = (self.out.value()?, self.lse.value()?);
        let dout = dy.single()?.reshape(out.dims())?;
        dx.accumulate(
            0,
            attention_backward_packed(&dout, (&q, &k, &v), (&out, &lse), &self.config)?,
        )
    }
}

/// Self-attention of a packed projection (B, T, (H + 2G) D): (B, T, H D). Like [`attention`] of its three parts,
/// without copying the gradient.
pub fn packed_attention(
    qkv: &Var,
    heads: usize,
    groups: usize,
    config: &AttentionConfig,
) -> Result<Var> {
    let _span = forward_span("packed_attention");
    let (q, k, v) = split_packed(qkv.value(), heads, groups)?;
    let (out, lse) = attend(&q, &k, &v, config)?;
    let &[batch, positions, heads, width] = out.dims() else {
        unreachable!("attention gives four dims")
    };
    Var::record(&[qkv], out.reshape(&[batch, positions, heads * width])?, || {
        let (out, lse) = (Saved::tensor(&out), Saved::statistic(&lse));
        PackedBackward { qkv: qkv.save(), out, lse, heads, groups, config: config.clone() }
    })
}
