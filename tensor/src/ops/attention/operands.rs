//! The operands of attention: their sizes, and the checks of both directions.

use super::config::{AttentionConfig, OP_BACKWARD};
use crate::core::tensor::{check_device, check_pair};
use crate::{DType, Error, Result, Tensor};

/// The sizes of a call: B, T, S, H, G and D.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub batch: usize,
    pub queries: usize,
    pub keys: usize,
    pub heads: usize,
    pub groups: usize,
    pub width: usize,
}

impl Shape {
    /// Query heads of each key-value head.
    pub(super) fn share(&self) -> usize {
        self.heads / self.groups.max(1)
    }

    /// Nanoseconds of forward, roughly: an exponential for each pair, 32 multiplications at a time.
    pub(super) fn work(&self) -> usize {
        self.batch * self.heads * self.queries * self.keys.max(1) * (1 + self.width / 32)
    }
}

/// The inputs of the gradient, each with a dense last dim.
pub(crate) struct Operands {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub dout: Tensor,
    pub out: Tensor,
    /// Contiguous.
    pub lse: Tensor,
}

impl Operands {
    pub(super) fn new(
        shape: Shape,
        dout: &Tensor,
        (q, k, v): (&Tensor, &Tensor, &Tensor),
        (out, lse): (&Tensor, &Tensor),
    ) -> Result<Operands> {
        let Shape { batch, queries, heads, .. } = shape;
        for (name, tensor) in [("dout", dout), ("out", out)] {
            check_pair(OP_BACKWARD, q, tensor)?;
            if tensor.dims() != q.dims() {
                return Err(Error::shape(
                    OP_BACKWARD,
                    format!("{name} {:?} is not of q's {:?}", tensor.dims(), q.dims()),
                ));
            }
        }
        check_device(OP_BACKWARD, q, lse)?;
        let acc = q.dtype().accumulator();
        if lse.dtype() != acc || lse.dims() != [batch, heads, queries] {
            return Err(Error::shape(
                OP_BACKWARD,
                format!("q {:?} needs lse (B, H, T) in {acc}, got {lse:?}", q.dims()),
            ));
        }
        let (q, k, v) = (dense_rows(q)?, dense_rows(k)?, dense_rows(v)?);
        let (dout, out, lse) = (dense_rows(dout)?, dense_rows(out)?, lse.contiguous()?);
        Ok(Operands { q, k, v, dout, out, lse })
    }
}

/// The tensor itself if its last dim is dense, else a contiguous copy.
pub(super) fn dense_rows(tensor: &Tensor) -> Result<Tensor> {
    match tensor.layout().row() {
        (_, 1) | (0 | 1, _) => Ok(tensor.clone()),
        _ => tensor.contiguous(),
    }
}

/// The bias as kernels read it: sample b, head h and query i add element `first` + b, h, i times `steps` + j of `numbers`
/// to the score of key j.
pub(crate) struct ScoreBias {
    pub numbers: Tensor,
    pub first: usize,
    /// The steps between elements; that of a diagonal's queries is -1.
    pub steps: [i64; 3],
}

impl ScoreBias {
    /// The bias of a call in `dtype`, if there is one.
    pub(crate) fn new(
        shape: Shape,
        dtype: DType,
        config: &AttentionConfig,
    ) -> Result<Option<ScoreBias>> {
        let Shape { batch, queries, keys, heads, .. } = shape;
        if let Some(diagonals) = &config.diagonals {
            let numbers = diagonals.cast(dtype)?.contiguous()?;
            let steps = [0, numbers.dims()[1] as i64, -1];
            return Ok(Some(ScoreBias { numbers, first: queries.saturating_sub(1), steps }));
        }
        let Some(bias) = &config.bias else { return Ok(None) };
        let mut dims = bias.dims().to_vec();
        // A number for all keys of a query still takes a row.
        match dims.last_mut() {
            Some(last) => *last = keys,
            None => dims.push(keys),
        }
        let bias = dense_rows(&bias.cast(dtype)?.broadcast_to(&dims)?)?;
        let numbers = bias.broadcast_to(&[batch, heads, queries, keys])?;
        let steps = [0, 1, 2].map(|d: usize| numbers.layout().strides()[d] as i64);
        Ok(Some(ScoreBias { numbers, first: 0, steps }))
    }
}

/// The sizes of a call. Errors if operands and options do not match.
pub(super) fn check(
    op: &'static str,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    config: &AttentionConfig,
) -> Result<Shape> {
    check_pair(op, q, k)?;
    check_pair(op, q, v)?;
    let refuse = |what: &str| {
        let (q, k, v) = (q.dims(), k.dims(), v.dims());
        Err(Error::shape(op, format!("{what}: q {q:?}, k {k:?}, v {v:?}")))
    };
    let (&[batch, queries, heads, width], &[k_batch, keys, groups, k_width]) = (q.dims(), k.dims())
    else {
        return refuse("operands must be (B, T, H, D)");
    };
    if k.dims() != v.dims() || k_batch != batch || k_width != width {
        return refuse("k and v must be (B, S, G, D) with q's B and D");
    }
    if groups == 0 && heads != 0 || groups != 0 && !heads.is_multiple_of(groups) {
        return refuse("key-value heads do not divide query heads");
    }
    if !config.scale.is_finite() {
        return Err(Error::value(op, format!("scale must be finite, got {}", config.scale)));
    }
    if config.window == Some(0) {
        return Err(Error::value(op, "a window must be at least 1, got 0: a query sees itself"));
    }
    if let Some(cap) = config.softcap.filter(|&cap| !(cap > 0.0 && cap.is_finite())) {
        return Err(Error::value(
            op,
            format!("softcap must be positive, got {cap}; omit it instead"),
        ));
    }
    if let Some(ranges) = config.ranges.as_ref().filter(|ranges| !ranges.is_for(batch, queries)) {
        let message = format!(
            "ranges of keys for {} rows of {} queries, q is {:?}",
            ranges.rows(),
            ranges.queries(),
            q.dims()
        );
        return Err(Error::shape(op, message));
    }
    let dims = [batch, heads, queries, keys];
    if let Some(bias) = &config.bias {
        check_device(op, q, bias)?;
        if !bias.dtype().is_float() || bias.layout().broadcast_to(&dims).is_err() {
            let message = format!(
                "a bias must have a floating-point dtype and broadcast to (B, H, T, S) = {dims:?}, got {bias:?}"
            );
            return Err(Error::shape(op, message));
        }
    }
    if let Some(diagonals) = &config.diagonals {
        check_device(op, q, diagonals)?;
        let want = [heads, (queries + keys).saturating_sub(1)];
        if !diagonals.dtype().is_float() || diagonals.dims() != want || config.bias.is_some() {
            let message = format!(
                "a bias by distance must have a floating-point dtype and be (H, T + S - 1) = {want:?}, beside no other bias, \
                 got {diagonals:?} and {:?}",
                config.bias
            );
            return Err(Error::shape(op, message));
        }
    }
    if let Some(dropout) = config.dropout.as_ref().filter(|dropout| dropout.place.dims() != dims) {
        let message = format!("dropout is for {:?}, attention is {dims:?}", dropout.place.dims());
        return Err(Error::shape(op, message));
    }
    Ok(Shape { batch, queries, keys, heads, groups, width })
}
