//! Additive biases of attention, against attention written out of products in f64.

use crate::reference::*;
use ferrotron_tensor::ops::attention::*;
use ferrotron_tensor::ops::reduce::KeepDims;
use ferrotron_tensor::{DType, Device, RandomKey, Result, ShardSpec, Tensor};

/// (B, T, S, H, G, D)
type Sizes = [usize; 6];

/// Every way in which a bias broadcasts to (B, H, T, S).
fn bias_dims([b, t, s, h, ..]: Sizes) -> Vec<Vec<usize>> {
    vec![
        vec![h, t, s],
        vec![b, h, t, s],
        vec![1, h, t, s],
        vec![b, 1, t, s],
        vec![b, 1, 1, s],
        vec![h, 1, s],
        vec![t, s],
        vec![h, t, 1],
        vec![s],
        vec![1, 1, 1, 1],
        vec![],
    ]
}

fn operands(device: &Device, dtype: DType, [b, t, s, h, g, d]: Sizes) -> Result<[Tensor; 4]> {
    Ok([
        normal(device, dtype, &[b, t, h, d], "q")?,
        normal(device, dtype, &[b, s, g, d], "k")?,
        normal(device, dtype, &[b, s, g, d], "v")?,
        normal(device, dtype, &[b, t, h, d], "dout")?,
    ])
}

/// out and lse out of products, in f64.
fn written_out(
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    bias: &Tensor,
    config: &AttentionConfig,
) -> Result<(Tensor, Tensor)> {
    let (t, s, shared) = (q.dims()[1], k.dims()[1], q.dims()[2] / k.dims()[2]);
    let by_head = |x: &Tensor| x.cast(DType::F64)?.transpose(1, 2)?.contiguous();
    // Each key-value head once for every query head that shares it.
    let spread = |x: &Tensor| {
        let x = by_head(x)?;
        let [b, g, s, d] = [0, 1, 2, 3].map(|i| x.dims()[i]);
        x.unsqueeze(2)?.broadcast_to(&[b, g, shared, s, d])?.reshape(&[b, g * shared, s, d])
    };
    let (q, k, v) = (by_head(q)?, spread(k)?, spread(v)?);
    let mut scores = q.matmul(&k.transpose(2, 3)?)?.mul_scalar(config.scale)?;
    if let Some(cap) = config.softcap {
        scores = scores.mul_scalar(1.0 / cap)?.tanh()?.mul_scalar(cap)?;
    }
    scores = scores.add(&bias.cast(DType::F64)?)?;
    if config.mask == AttentionMask::Causal {
        let later = Tensor::full(q.device(), DType::F64, &[t, s], 1.0)?
            .triu(1 + s as isize - t as isize)?;
        let hidden = later.gt(&Tensor::zeros(q.device(), DType::F64, &[])?)?;
        scores = scores.masked_fill(&hidden, f64::NEG_INFINITY)?;
    }
    let out = scores.softmax(-1)?.matmul(&v)?.transpose(1, 2)?.contiguous()?;
    Ok((out, scores.log_sum_exp(&[-1], KeepDims::Drop)?))
}

#[test]
fn biases_of_every_shape_agree_with_products() -> Result<()> {
    let device = Device::cpu(2)?;
    for dtype in FLOATS {
        for sizes in [[2, 70, 150, 4, 2, 16], [1, 1, 1, 1, 1, 1], [2, 9, 9, 2, 1, 3]] {
            let [q, k, v, _] = operands(&device, dtype, sizes)?;
            for (dims, mask) in bias_dims(sizes)
                .iter()
                .flat_map(|dims| [AttentionMask::None, AttentionMask::Causal].map(|m| (dims, m)))
            {
                for softcap in [None, Some(1.5)] {
                    let bias = normal(&device, dtype, dims, "bias")?;
                    let plain =
                        AttentionConfig { mask, softcap, ..AttentionConfig::causal(sizes[5]) };
                    let config = AttentionConfig { bias: Some(bias.clone()), ..plain };
                    let (out, lse) = attention(&q, &k, &v, &config)?;
                    let (want, want_lse) = written_out((&q, &k, &v), &bias, &config)?;
                    let what = format!("{dtype} {sizes:?} bias {dims:?} {mask:?} {softcap:?}");
                    let eps = 8.0 * dtype.accumulator().epsilon() * (sizes[5] + 16) as f64;
                    let rounded = eps + 2.0 * dtype.epsilon();
                    assert_close(&format!("{what} out"), &out, &want.to_f64()?, rounded);
                    assert_close(&format!("{what} lse"), &lse, &want_lse.to_f64()?, eps);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_agree_with_finite_differences() -> Result<()> {
    let device = Device::cpu(1)?;
    let sizes @ [b, t, s, h, _, d] = [2, 4, 4, 2, 1, 2];
    let [q, k, v, dout] = operands(&device, DType::F64, sizes)?;
    let dropout = |p| {
        let place = ShardSpec::unsharded(&[b, h, t, s]);
        AttentionDropout::new(p, RandomKey::new(3, 1, "attention"), place).map(Some)
    };
    for (n, dims) in bias_dims(sizes).iter().enumerate() {
        let all = n % 2 == 0;
        let bias = normal(&device, DType::F64, dims, "bias")?;
        let config = AttentionConfig {
            mask: if n % 3 == 0 { AttentionMask::Causal } else { AttentionMask::None },
            window: all.then_some(3),
            ranges: all.then(|| KeyRanges::from_lengths(&[s, s - 1], t)).transpose()?,
            softcap: all.then_some(1.5),
            dropout: if all { dropout(0.3)? } else { None },
            bias: Some(bias.clone()),
            ..AttentionConfig::causal(d)
        };
        let (out, lse) = attention(&q, &k, &v, &config)?;
        let (operands, saved) = ((&q, &k, &v), (&out, &lse));
        let (dq, dk, dv) = attention_backward(&dout, operands, saved, &config)?;
        let dbias = attention_backward_bias(&dout, operands, saved, &config)?;
        let f = |q: &Tensor, k: &Tensor, v: &Tensor, bias: &Tensor| {
            let config = AttentionConfig { bias: Some(bias.clone()), ..config.clone() };
            let out = attention(q, k, v, &config)?.0.to_f64()?;
            Ok(out.iter().zip(dout.to_f64()?).map(|(a, b)| a * b).sum())
        };
        let what = format!("bias {dims:?} {config:?}");
        assert_gradient(&format!("{what} dq"), &q, &dq, |q| f(q, &k, &v, &bias))?;
        assert_gradient(&format!("{what} dk"), &k, &dk, |k| f(&q, k, &v, &bias))?;
        assert_gradient(&format!("{what} dv"), &v, &dv, |v| f(&q, &k, v, &bias))?;
        assert_gradient(&format!("{what} dbias"), &bias, &dbias, |bias| f(&q, &k, &v, bias))?;
    }
    Ok(())
}

#[test]
fn gradients_across_blocks_agree_with_those_in_f64() -> Result<()> {
    let device = Device::cpu(2)?;
    let sizes @ [_, t, s, ..] = [2, 150, 300, 4, 2, 16];
    let wide = operands(&device, DType::F64, sizes)?;
    for dims in [vec![4, t, s], vec![2, 1, t, s], vec![4, 1, s]] {
        let bias = normal(&device, DType::F64, &dims, "bias")?;
        // The gradient of a bias for each sample, summed over what shares it.
        let whole = bias.broadcast_to(&[2, 4, t, s])?.contiguous()?;
        let gradient = |dtype: DType, bias: &Tensor| -> Result<Tensor> {
            let [q, k, v, dout] = [0, 1, 2, 3].map(|i: usize| wide[i].cast(dtype).unwrap());
            let config =
                AttentionConfig { bias: Some(bias.clone()), ..AttentionConfig::causal(16) };
            let (out, lse) = attention(&q, &k, &v, &config)?;
            attention_backward_bias(&dout, (&q, &k, &v), (&out, &lse), &config)
        };
        let mut want = gradient(DType::F64, &whole)?;
        for (d, size) in [2, 4, t, s].into_iter().enumerate() {
            let own = (d + dims.len()).checked_sub(4).map_or(1, |at| dims[at]);
            if own != size {
                want = want.sum(&[d as isize], KeepDims::Keep)?;
            }
        }
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            // Sums of up to 2 * 150 terms near 1, whose products are of 16 numbers.
            let tolerance = 64.0 * dtype.epsilon() * ((2 * 150) as f64).sqrt();
            let got = gradient(dtype, &bias)?;
            assert_close(&format!("{dtype} {dims:?}"), &got, &want.to_f64()?, tolerance);
        }
    }
    Ok(())
}

/// A bias of minus infinity hides a key: also every key, also in the first of several blocks.
#[test]
fn minus_infinity_is_a_mask() -> Result<()> {
    let device = Device::cpu(2)?;
    for dtype in FLOATS {
        let [b, t, s, h, g, d] = [2, 70, 300, 2, 1, 8];
        let [q, k, v, dout] = operands(&device, dtype, [b, t, s, h, g, d])?;
        let ranges: Vec<[u32; 2]> = (0..t as u32).map(|i| [2 * i, 3 * i]).collect();
        let seen = KeyRanges::new(1, t, ranges.clone())?;
        let plain = AttentionConfig::bidirectional(d);
        let masked = AttentionConfig { ranges: Some(seen), ..plain.clone() };
        let hidden = |i: usize, j: usize| !(ranges[i][0]..ranges[i][1]).contains(&(j as u32));
        let values: Vec<f64> = (0..t * s)
            .map(|n| if hidden(n / s, n % s) { f64::NEG_INFINITY } else { 0.0 })
            .collect();
        let bias = Some(of(&device, dtype, &[t, s], &values)?);
        let biased = AttentionConfig { bias, ..plain };
        let all = |config: &AttentionConfig| -> Result<[Tensor; 5]> {
            let (out, lse) = attention(&q, &k, &v, config)?;
            let (dq, dk, dv) = attention_backward(&dout, (&q, &k, &v), (&out, &lse), config)?;
            Ok([out, lse, dq, dk, dv])
        };
        for (i, (got, want)) in all(&biased)?.iter().zip(&all(&masked)?).enumerate() {
            let tolerance = 16.0 * dtype.epsilon() * (t as f64).sqrt();
            assert_close(&format!("{dtype} result {i}"), got, &want.to_f64()?, tolerance);
        }
        let [out, lse, ..] = all(&biased)?;
        let dbias = attention_backward_bias(&dout, (&q, &k, &v), (&out, &lse), &biased)?;
        for (n, x) in dbias.to_f64()?.into_iter().enumerate() {
            assert!(x == 0.0 || !hidden(n / s, n % s) && x.is_finite(), "{dtype} {n}: {x}");
        }
    }
    Ok(())
}

/// A bias by distance is the matrix that it stands for, to the last bit.
#[test]
fn diagonals_are_the_matrix_that_they_stand_for() -> Result<()> {
    let device = Device::cpu(2)?;
    for (dtype, sizes) in FLOATS.into_iter().flat_map(|dtype| {
        [[2, 70, 150, 4, 2, 16], [1, 1, 1, 1, 1, 2], [1, 9, 4, 2, 1, 3]].map(|sizes| (dtype, sizes))
    }) {
        let [_, t, s, h, _, d] = sizes;
        let [q, k, v, dout] = operands(&device, dtype, sizes)?;
        let width = t + s - 1;
        let diagonals = normal(&device, dtype, &[h, width], "diagonals")?;
        let numbers = diagonals.to_f64()?;
        let matrix: Vec<f64> = (0..h * t * s)
            .map(|n| numbers[n / (t * s) * width + t - 1 - n / s % t + n % s])
            .collect();
        let bias = Some(of(&device, dtype, &[h, t, s], &matrix)?);
        let all = |config: &AttentionConfig| -> Result<[Tensor; 5]> {
            let (out, lse) = attention(&q, &k, &v, config)?;
            let (dq, dk, dv) = attention_backward(&dout, (&q, &k, &v), (&out, &lse), config)?;
            Ok([out, lse, dq, dk, dv])
        };
        for mask in [AttentionMask::None, AttentionMask::Causal] {
            let plain = AttentionConfig { mask, ..AttentionConfig::causal(d) };
            let want = all(&AttentionConfig { bias: bias.clone(), ..plain.clone() })?;
            let got = all(&AttentionConfig { diagonals: Some(diagonals.clone()), ..plain })?;
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                assert_same_bits(&format!("{dtype} {sizes:?} {mask:?} result {i}"), got, want);
            }
        }
    }
    Ok(())
}

#[test]
fn bits_depend_neither_on_threads_nor_on_strides() -> Result<()> {
    let results = |threads: usize, strided: bool| -> Result<Vec<Tensor>> {
        let device = Device::cpu(threads)?;
        let sizes @ [_, t, s, ..] = [2, 140, 140, 2, 1, 16];
        let [q, k, v, dout] = operands(&device, DType::F32, sizes)?;
        let mut bias = normal(&device, DType::F32, &[2, t, s], "bias")?;
        if strided {
            bias = bias.transpose(1, 2)?.contiguous()?.transpose(1, 2)?;
        }
        let config = AttentionConfig { bias: Some(bias), ..AttentionConfig::causal(16) };
        let (out, lse) = attention(&q, &k, &v, &config)?;
        let dbias = attention_backward_bias(&dout, (&q, &k, &v), (&out, &lse), &config)?;
        Ok(vec![out, lse, dbias])
    };
    let want = results(1, false)?;
    for (threads, strided) in [(2, false), (3, false), (2, true)] {
        for (got, want) in results(threads, strided)?.iter().zip(&want) {
            assert_same_bits(&format!("{threads} threads, strided {strided}"), got, want);
        }
    }
    Ok(())
}

#[test]
fn wrong_biases_are_refused_in_one_line() -> Result<()> {
    let device = Device::cpu(1)?;
    let x = Tensor::zeros(&device, DType::F32, &[2, 3, 1, 4])?;
    let says = |bias: &Tensor| {
        let config = AttentionConfig { bias: Some(bias.clone()), ..AttentionConfig::causal(4) };
        attention(&x, &x, &x, &config).unwrap_err().to_string()
    };
    assert_eq!(
        says(&Tensor::zeros(&device, DType::F32, &[2, 3, 3])?),
        "attention: a bias must have a floating-point dtype and broadcast to (B, H, T, S) = [2, 1, 3, 3], got \
         Tensor(f32 [2, 3, 3])"
    );
    assert_eq!(
        says(&Tensor::zeros(&device, DType::U8, &[3, 3])?),
        "attention: a bias must have a floating-point dtype and broadcast to (B, H, T, S) = [2, 1, 3, 3], got \
         Tensor(u8 [3, 3])"
    );
    let diagonals = Some(Tensor::zeros(&device, DType::F32, &[1, 6])?);
    let config = AttentionConfig { diagonals, ..AttentionConfig::causal(4) };
    assert_eq!(
        attention(&x, &x, &x, &config).unwrap_err().to_string(),
        "attention: a bias by distance must have a floating-point dtype and be (H, T + S - 1) = [1, 5], beside no other \
         bias, got Tensor(f32 [1, 6]) and None"
    );
    let (out, lse) = attention(&x, &x, &x, &AttentionConfig::causal(4))?;
    let none = AttentionConfig::causal(4);
    let refused = attention_backward_bias(&x, (&x, &x, &x), (&out, &lse), &none);
    assert_eq!(
        refused.unwrap_err().to_string(),
        "attention_backward: there is no bias, and so no gradient of it"
    );
    Ok(())
}
