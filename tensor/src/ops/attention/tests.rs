//! Every instruction set's blocks, and what attention refuses.

use super::*;
use crate::gemm::small::SmallGemm;
use crate::ops::testing::assert_close;
use crate::{DType, Device, RandomKey, ShardSpec, bf16, ops::random::normal};

/// bf16 attention with the blocks of each instruction set against f64.
#[test]
fn every_instruction_set_agrees_with_f64() -> Result<()> {
    let device = &Device::cpu(2)?;
    let shape = |queries, keys, heads, groups, width| Shape {
        batch: 2,
        queries,
        keys,
        heads,
        groups,
        width,
    };
    // Torn steps along keys, queries and width; tiles on, below and beside the diagonal; chunks of keys and of queries.
    for shape in [
        shape(3, 131, 2, 2, 0),
        shape(67, 70, 4, 2, 5),
        shape(64, 64, 2, 2, 32),
        shape(129, 200, 2, 1, 16),
        shape(3, 131, 2, 2, 64),
        shape(70, 33, 2, 2, 7),
        shape(1, 1, 1, 1, 1),
        shape(300, 530, 2, 1, 40),
    ] {
        for mask in [AttentionMask::Causal, AttentionMask::None] {
            let plain = AttentionConfig { mask, ..AttentionConfig::causal(shape.width) };
            for p in [0.0, 0.2] {
                every_instruction_set(device, shape, plain.clone(), p)?;
            }
            let Shape { queries, keys, .. } = shape;
            let lengths = KeyRanges::from_lengths(&[keys / 2, keys], queries)?;
            let documents = [vec![0, queries / 3, queries], vec![0, queries / 2, queries - 1]];
            let documents = KeyRanges::from_documents(&documents, queries)?;
            let (window, ranges) = (Some(keys / 4 + 1), Some(lengths.intersect(&documents)?));
            let place = ShardSpec::unsharded(&[1, shape.heads, queries, keys]);
            let key = RandomKey::new(7, 0, "bias");
            let bias = Some(normal(device, DType::BF16, &place, &key, 0.0, 1.0)?);
            for config in [
                AttentionConfig { bias: bias.clone(), ..plain.clone() },
                AttentionConfig { bias, window, softcap: Some(1.0), ..plain.clone() },
                AttentionConfig { window, ..plain.clone() },
                AttentionConfig { ranges: Some(lengths), ..plain.clone() },
                AttentionConfig { ranges: Some(documents), ..plain.clone() },
                AttentionConfig { window, ranges, softcap: Some(1.0), ..plain },
            ] {
                every_instruction_set(device, shape, config.clone(), 0.0)?;
                every_instruction_set(device, shape, config, 0.2)?;
            }
        }
    }
    Ok(())
}

fn every_instruction_set(
    device: &Device,
    shape: Shape,
    mut config: AttentionConfig,
    p: f64,
) -> Result<()> {
    let Shape { batch, queries, keys, heads, groups, width } = shape;
    let random = |name: &str, length, heads| {
        let place = ShardSpec::unsharded(&[batch, length, heads, width]);
        normal(device, DType::BF16, &place, &RandomKey::new(5, 0, name), 0.0, 1.0)
    };
    let (q, k, v) =
        (random("q", queries, heads)?, random("k", keys, groups)?, random("v", keys, groups)?);
    let dout = random("dout", queries, heads)?;
    if p > 0.0 {
        let place = ShardSpec::unsharded(&[batch, heads, queries, keys]);
        config.dropout = Some(AttentionDropout::new(p, RandomKey::new(6, 0, "dropout"), place)?);
    }
    let wide = |x: &Tensor| x.cast(DType::F64);
    let (q64, k64, v64) = (wide(&q)?, wide(&k)?, wide(&v)?);
    let (out, lse) = attention(&q64, &k64, &v64, &config)?;
    let (dq, dk, dv) =
        attention_backward(&wide(&dout)?, (&q64, &k64, &v64), (&out, &lse), &config)?;
    let dbias = config
        .bias
        .as_ref()
        .map(|_| attention_backward_bias(&wide(&dout)?, (&q64, &k64, &v64), (&out, &lse), &config));
    let dbias = dbias.transpose()?;
    // p or ds, the output in delta, and the result are rounded, by half an epsilon at most. Errors of the terms of a
    // sum are independent, so that their squares add up, as those of the terms do.
    let tolerance = DType::BF16.epsilon();
    let saved = (out.cast(DType::BF16)?, lse.cast(DType::F32)?);
    for (level, blocks) in SmallGemm::<bf16>::available() {
        let name = format!("{level} {shape:?} {config:?} {p}");
        let bias = ScoreBias::new(shape, DType::F32, &config)?;
        let operands = AttentionOperands::new(shape, [&q, &k, &v], &config, bias.as_ref())?;
        let call = AttentionOperands { blocks, ..operands };
        let (got, got_lse) = forward_of(device, &call)?;
        assert_near(&format!("{name} out"), &got, &out, tolerance);
        assert_close(&format!("{name} lse"), &got_lse, &lse.to_f64()?, 1e-5 * (width + 1) as f64);
        let mut grads = [&q, &k, &v].map(|x| Tensor::zeros(device, DType::BF16, x.dims()).unwrap());
        let [dq_to, dk_to, dv_to] =
            grads.each_mut().map(|x| Disjoint::new(x.as_mut_slice::<bf16>().unwrap()));
        let targets = [
            Target::dense(&dq_to, queries, heads, width),
            Target::dense(&dk_to, keys, groups, width),
            Target::dense(&dv_to, keys, groups, width),
        ];
        let outputs =
            (HeadView::from_tensor(&dout)?, HeadView::from_tensor(&saved.0)?, saved.1.as_slice()?);
        backward::run(device, &call, outputs, targets)?;
        if let Some(want) = &dbias {
            let mut got = Tensor::zeros(device, DType::F32, want.dims())?;
            bias::run(device, &call, outputs, 1, &Disjoint::new(got.as_mut_slice()?))?;
            assert_near(&format!("{name} dbias"), &got, want, tolerance);
        }
        for ((what, got), want) in ["dq", "dk", "dv"].iter().zip(&grads).zip([&dq, &dk, &dv]) {
            assert_near(&format!("{name} {what}"), got, want, tolerance);
        }
    }
    Ok(())
}

/// The output and lse of attention by one instruction set.
fn forward_of(device: &Device, call: &AttentionOperands<'_, bf16>) -> Result<(Tensor, Tensor)> {
    let Shape { batch, queries, heads, width, .. } = call.shape;
    let mut out = Tensor::zeros(device, DType::BF16, &[batch, queries, heads, width])?;
    let mut lse = Tensor::zeros(device, DType::F32, &[batch, heads, queries])?;
    let slice = Disjoint::new(out.as_mut_slice()?);
    let to = Target::dense(&slice, queries, heads, width);
    forward::run::<bf16>(device, call, to, Disjoint::new(lse.as_mut_slice()?))?;
    Ok((out, lse))
}

/// Causal attention of one head by every instruction set, with 150 queries, keys and values of 40 elements.
fn one_head_of_each(
    q: impl Fn(usize) -> f32,
    k: impl Fn(usize) -> f32,
    v: impl Fn(usize) -> f32,
) -> Result<Vec<(Tensor, Tensor)>> {
    let device = &Device::cpu(1)?;
    let [length, width] = [150, 40];
    let shape = Shape { batch: 1, queries: length, keys: length, heads: 1, groups: 1, width };
    let rows = |row: &dyn Fn(usize) -> f32| {
        let values: Vec<bf16> =
            (0..length * width).map(|i| bf16::from_f32(row(i / width))).collect();
        Tensor::from_slice(device, &values, &[1, length, 1, width])
    };
    let (q, k, v) = (rows(&q)?, rows(&k)?, rows(&v)?);
    let config = AttentionConfig::causal(width);
    let each = SmallGemm::<bf16>::available().map(|(_, blocks)| {
        let operands = AttentionOperands::new(shape, [&q, &k, &v], &config, None)?;
        forward_of(device, &AttentionOperands { blocks, ..operands })
    });
    each.collect()
}

#[test]
fn a_key_that_is_not_a_number_shows_in_the_queries_that_see_it() -> Result<()> {
    let number = |i: usize| (i % 7) as f32 / 8.0;
    let with = one_head_of_each(number, |i| if i == 70 { f32::NAN } else { number(i) }, number)?;
    let without = one_head_of_each(number, number, number)?;
    for (with, without) in with.iter().zip(&without) {
        for (with, without) in [(&with.0, &without.0), (&with.1, &without.1)] {
            let (with, without) = (with.to_f64()?, without.to_f64()?);
            let row = with.len() / 150;
            for (i, (with, without)) in with.chunks(row).zip(without.chunks(row)).enumerate() {
                match i < 70 {
                    true => assert_eq!(with, without, "query {i}"),
                    false => assert!(with.iter().all(|x| x.is_nan()), "query {i}"),
                }
            }
        }
    }
    Ok(())
}

/// The difference of scores that are rounded, the largest of which is subtracted, is 0 for that one.
#[test]
fn the_largest_of_huge_scores_takes_all() -> Result<()> {
    for q in 0..40 {
        let q = 2e4 + 700.0 * q as f32;
        let key = |i: usize| if i == 0 { 3e4 } else { 2e4 };
        for (out, _) in one_head_of_each(|_| q, key, |i| (i + 1) as f32)? {
            assert!(out.to_f64()?.iter().all(|&x| x == 1.0), "queries of {q}");
        }
    }
    Ok(())
}

/// Asserts that the elements together are as far from `want` as `tolerance` of their length at most. What should be
/// zero is a difference of numbers near 1.
fn assert_near(what: &str, got: &Tensor, want: &Tensor, tolerance: f64) {
    let (got, want) = (got.to_f64().unwrap(), want.to_f64().unwrap());
    let apart: Vec<f64> = got.iter().zip(&want).map(|(got, want)| (got - want).abs()).collect();
    let length = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let (error, bound) = (length(&apart), tolerance * length(&want).max(1.0));
    let worst = (0..apart.len()).max_by(|&i, &j| apart[i].total_cmp(&apart[j]));
    let worst = worst.map(|i| format!("worst at {i}: got {}, want {}", got[i], want[i]));
    assert!(error <= bound, "{what}: {error} apart, not {bound}; {worst:?}");
}

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
    let dropout = |p, dims: &[usize]| AttentionDropout::new(p, key, ShardSpec::unsharded(dims));
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
