//! What attention refuses, and how it says so.

use super::*;
use crate::{DType, Device};

#[test]
fn wrong_operands_are_refused_by_name() -> Result<()> {
    let device = Device::cpu(1)?;
    let x = |dims: &[usize]| Tensor::zeros(&device, DType::F32, dims);
    let causal = AttentionConfig::causal(4);
    let says = |q: &Tensor, k: &Tensor, config: &AttentionConfig| {
        attention(q, k, k, config).unwrap_err().to_string()
    };
    let q = x(&[2, 3, 6, 4])?;
    assert_eq!(
        says(&q, &x(&[2, 3, 4, 4])?, &causal),
        "attention: key-value heads do not divide query heads: \
         q [2, 3, 6, 4], k [2, 3, 4, 4], v [2, 3, 4, 4]"
    );
    assert_eq!(
        says(&q, &x(&[2, 3, 6, 5])?, &causal),
        "attention: k and v must be (B, S, G, D) with q's B and D: \
         q [2, 3, 6, 4], k [2, 3, 6, 5], v [2, 3, 6, 5]"
    );
    assert_eq!(
        says(&x(&[3, 6, 4])?, &q, &causal),
        "attention: operands must be (B, T, H, D): q [3, 6, 4], k [2, 3, 6, 4], v [2, 3, 6, 4]"
    );
    assert_eq!(
        says(&q, &Tensor::zeros(&device, DType::F64, &[2, 3, 6, 4])?, &causal),
        "attention: operands differ: lhs f32, rhs f64; cast one of them"
    );
    let ids = Tensor::zeros(&device, DType::U32, &[2, 3, 6, 4])?;
    assert_eq!(says(&ids, &ids, &causal), "attention: takes floating-point tensors, got u32");
    let nan = AttentionConfig { scale: f64::NAN, ..causal.clone() };
    assert_eq!(says(&q, &q, &nan), "attention: scale must be finite, got NaN");
    let key = RandomKey::new(0, 0, "");
    let dropout = |p, dims: &[usize]| AttentionDropout::new(p, key, Place::whole(dims));
    assert_eq!(
        dropout(1.0, &[1; 4]).unwrap_err().to_string(),
        "attention: dropout must be in 0 <= p < 1, got 1"
    );
    assert_eq!(
        dropout(0.5, &[1; 3]).unwrap_err().to_string(),
        "attention: the dropout's place must be (B, H, T, S), got [1, 1, 1]"
    );
    let other = AttentionConfig { dropout: Some(dropout(0.5, &[1; 4])?), ..causal.clone() };
    assert_eq!(
        says(&q, &q, &other),
        "attention: dropout is for [1, 1, 1, 1], attention is [2, 6, 3, 3]"
    );
    let (out, lse) = attention(&q, &q, &q, &causal)?;
    let backward = |dout: &Tensor, lse: &Tensor| {
        let result = attention_backward(dout, (&q, &q, &q), (&out, lse), &causal);
        result.unwrap_err().to_string()
    };
    assert_eq!(
        backward(&x(&[2, 3, 6, 5])?, &lse),
        "attention_backward: dout [2, 3, 6, 5] is not of q's [2, 3, 6, 4]"
    );
    assert_eq!(
        backward(&q, &x(&[2, 3, 6])?),
        "attention_backward: q [2, 3, 6, 4] needs lse (B, H, T) in f32, got Tensor(f32 [2, 3, 6])"
    );
    assert_eq!(
        split_packed(&x(&[2, 3, 10])?, 2, 1).unwrap_err().to_string(),
        "split_packed: 2 heads and 2 x 1 do not divide [2, 3, 10]"
    );
    Ok(())
}
