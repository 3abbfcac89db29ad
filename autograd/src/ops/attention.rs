//! Gradient of attention. It saves q, k, v, the output, the log-sum-exp of each row and the bias, and never materializes
//! a score matrix, except for the gradient of a bias.

use ferrotron_tensor::ops::attention::{
    AttentionConfig, attention as attend, attention_backward, attention_backward_bias,
    attention_backward_packed, split_packed,
};
use ferrotron_tensor::{Error, Result, Tensor};

use crate::{Backward, Cotangents, InputGrads, Saved, Var, forward_span};

/// The result of attention, and its options.
struct Kept {
    out: Saved,
    lse: Saved,
    bias: Option<Saved>,
    /// The options without the bias.
    config: AttentionConfig,
}

impl Kept {
    fn new(out: &Tensor, lse: &Tensor, bias: Option<&Var>, config: &AttentionConfig) -> Kept {
        Kept {
            out: Saved::tensor(out),
            lse: Saved::statistic(lse),
            bias: bias.map(Var::save),
            config: AttentionConfig { bias: None, ..config.clone() },
        }
    }

    fn saved(&self) -> impl Iterator<Item = &Saved> {
        [&self.out, &self.lse].into_iter().chain(&self.bias)
    }

    /// out, lse, and the options with the bias.
    fn values(self) -> Result<(Tensor, Tensor, AttentionConfig)> {
        let bias = self.bias.map(|bias| bias.value()).transpose()?;
        Ok((self.out.value()?, self.lse.value()?, AttentionConfig { bias, ..self.config }))
    }
}

/// The bias among the options as a constant.
fn constant_bias(config: &AttentionConfig) -> Option<Var> {
    config.bias.clone().map(Var::constant)
}

/// `config` with the value of `bias`. Errors if it has a bias already.
fn with_bias(bias: &Var, config: &AttentionConfig) -> Result<AttentionConfig> {
    if config.bias.is_some() {
        let message = "the options have a bias already: set `bias: None`, or add the two";
        return Err(Error::value("attention", message));
    }
    Ok(AttentionConfig { bias: Some(bias.value().clone()), ..config.clone() })
}

struct AttentionBackward {
    operands: [Saved; 3],
    kept: Kept,
}

impl Backward for AttentionBackward {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn saved(&self) -> Vec<Tensor> {
        self.operands.iter().chain(self.kept.saved()).filter_map(Saved::resident_tensor).collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let [q, k, v] =
            [self.operands[0].value()?, self.operands[1].value()?, self.operands[2].value()?];
        let (out, lse, config) = self.kept.values()?;
        let (dout, operands, saved) = (dy.single()?, (&q, &k, &v), (&out, &lse));
        let (dq, dk, dv) = attention_backward(&dout, operands, saved, &config)?;
        dx.accumulate(0, dq)?;
        dx.accumulate(1, dk)?;
        dx.accumulate(2, dv)?;
        if dx.needs_input_grad(3) {
            dx.accumulate(3, attention_backward_bias(&dout, operands, saved, &config)?)?;
        }
        Ok(())
    }
}

/// Attention of q (B, T, H, D) to k and v (B, S, G, D), where G divides H: (B, T, H, D). A bias among the options is a
/// constant.
pub fn attention(q: &Var, k: &Var, v: &Var, config: &AttentionConfig) -> Result<Var> {
    record(q, k, v, constant_bias(config).as_ref(), config)
}

/// [`attention`] with a bias of the scores that gets a gradient: dims that broadcast to (B, H, T, S).
///
/// Backward needs (H, T, S) for a moment, or (B, H, T, S) if samples have biases of their own.
///
/// Errors if the options have a bias, too.
pub fn attention_with_bias(
    q: &Var,
    k: &Var,
    v: &Var,
    bias: &Var,
    config: &AttentionConfig,
) -> Result<Var> {
    record(q, k, v, Some(bias), &with_bias(bias, config)?)
}

fn record(q: &Var, k: &Var, v: &Var, bias: Option<&Var>, config: &AttentionConfig) -> Result<Var> {
    let _span = forward_span("attention");
    let (out, lse) = attend(q.value(), k.value(), v.value(), config)?;
    let inputs: Vec<&Var> = [q, k, v].into_iter().chain(bias).collect();
    Var::record(&inputs, out.clone(), || AttentionBackward {
        operands: [q.save(), k.save(), v.save()],
        kept: Kept::new(&out, &lse, bias, config),
    })
}

struct PackedBackward {
    qkv: Saved,
    heads: usize,
    groups: usize,
    kept: Kept,
}

impl Backward for PackedBackward {
    fn name(&self) -> &'static str {
        "packed_attention"
    }

    fn saved(&self) -> Vec<Tensor> {
        [&self.qkv]
            .into_iter()
            .chain(self.kept.saved())
            .filter_map(Saved::resident_tensor)
            .collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let (q, k, v) = split_packed(&self.qkv.value()?, self.heads, self.groups)?;
        let (out, lse, config) = self.kept.values()?;
        let dout = dy.single()?.reshape(out.dims())?;
        let (operands, saved) = ((&q, &k, &v), (&out, &lse));
        dx.accumulate(0, attention_backward_packed(&dout, operands, saved, &config)?)?;
        if dx.needs_input_grad(1) {
            dx.accumulate(1, attention_backward_bias(&dout, operands, saved, &config)?)?;
        }
        Ok(())
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
    record_packed(qkv, heads, groups, constant_bias(config).as_ref(), config)
}

/// [`packed_attention`] with a bias of the scores that gets a gradient, as in [`attention_with_bias`].
pub fn packed_attention_with_bias(
    qkv: &Var,
    bias: &Var,
    heads: usize,
    groups: usize,
    config: &AttentionConfig,
) -> Result<Var> {
    record_packed(qkv, heads, groups, Some(bias), &with_bias(bias, config)?)
}

fn record_packed(
    qkv: &Var,
    heads: usize,
    groups: usize,
    bias: Option<&Var>,
    config: &AttentionConfig,
) -> Result<Var> {
    let _span = forward_span("packed_attention");
    let (q, k, v) = split_packed(qkv.value(), heads, groups)?;
    let (out, lse) = attend(&q, &k, &v, config)?;
    let &[batch, positions, heads, width] = out.dims() else {
        unreachable!("attention gives four dims")
    };
    let inputs: Vec<&Var> = [qkv].into_iter().chain(bias).collect();
    Var::record(&inputs, out.reshape(&[batch, positions, heads * width])?, || {
        let kept = Kept::new(&out, &lse, bias, config);
        PackedBackward { qkv: qkv.save(), heads, groups, kept }
    })
}
