//! Attention, its gradients and the joining of blocks of keys.

use ferrotron_cuda::gpu::GpuConfig;
use ferrotron_tensor::ops::attention::{
    AttentionConfig, AttentionDropout, AttentionMask, attention, attention_backward,
    attention_backward_bias, attention_backward_packed, merge_attention, split_packed,
};
use ferrotron_tensor::{DType, Device, RandomKey, Result, ShardSpec, Tensor};

use crate::both::{assert_close, cpu, rounding, small, there, views};
use crate::support::{FLOATS, gpu};

/// Probability of dropout.
const DROPPED: f64 = 0.25;

/// A call: batch, queries, keys, heads, key-value heads, width.
#[derive(Debug, Clone, Copy)]
struct Sizes([usize; 6]);

impl Sizes {
    fn config(self, mask: AttentionMask, dropping: bool) -> Result<AttentionConfig> {
        let [batch, queries, keys, heads, _, width] = self.0;
        let dropout = match dropping {
            false => None,
            true => {
                // Some heads, two pieces of the queries, the end of the keys.
                let half = queries / 2;
                let place = ShardSpec::new(
                    &[batch + 1, 2 * heads, 3 * queries, keys + 5],
                    &[
                        &[(1, batch)],
                        &[(heads - 1, heads)],
                        &[(1, half), (queries + half, queries - half)],
                        &[(5, keys)],
                    ],
                )?;
                Some(AttentionDropout::new(DROPPED, RandomKey::new(7, 12, "attn"), place)?)
            }
        };
        // Twice the usual scale makes rows differ more.
        let scale = 2.0 / (width as f64).sqrt();
        Ok(AttentionConfig { mask, scale, dropout, ..AttentionConfig::causal(width) })
    }

    /// Relative and absolute tolerances of out, lse, and the gradients of queries, keys and values.
    fn tolerances(self, dtype: DType, config: &AttentionConfig) -> [[f64; 2]; 5] {
        let [_, queries, keys, heads, groups, width] = self.0.map(|n| n as f64);
        let kept = if config.dropout.is_some() { 1.0 / (1.0 - DROPPED) } else { 1.0 };
        let column = 2.0 * heads / groups;
        if rounding(dtype) == 0.0 {
            // Scores are sums of `width` products up to 1, results sums over keys or, for each query head, queries.
            let terms = width * config.scale.max(1.0) + keys + queries * heads / groups + 16.0;
            let eps = dtype.epsilon() * terms;
            let large = eps * width.sqrt() * kept;
            return [[eps, eps * kept], [eps, eps], [eps, large], [eps, large], [eps, large]];
        }
        // As for the kernels alone: probabilities are rounded to the dtype, and weigh values up to 1; ds is rounded,
        // its sum over keys is that of dp - delta, of deviation sqrt(D) / 3, weighted with probabilities.
        let eps = dtype.epsilon();
        // Tensor cores add 16 products at a time, and may truncate each sum.
        let truncated = (width / 16.0).max(1.0);
        let sums = DType::F32.epsilon() * (truncated * width * config.scale + keys / 16.0 + 16.0);
        let gradient = eps * config.scale * 6.0 * width.sqrt() / 3.0 * kept;
        // The rounded out is what delta is computed from.
        let gradient = gradient + eps * width.sqrt() * config.scale;
        let values = eps * column * kept;
        [[eps, eps * kept], [sums, sums], [eps, gradient], [eps, gradient * column], [eps, values]]
    }
}

#[test]
fn attention_gives_what_the_cpu_gives() -> Result<()> {
    let Some(gpu) = gpu("attention_gives_what_the_cpu_gives")? else { return Ok(()) };
    agrees(&gpu, &FLOATS)
}

#[test]
fn attention_without_warpgroups_gives_what_the_cpu_gives() -> Result<()> {
    let Some(gpu) = without_warpgroups("attention_without_warpgroups_gives_what_the_cpu_gives")?
    else {
        return Ok(());
    };
    agrees(&gpu, &[DType::BF16])
}

/// A GPU with the kernels that do not multiply by warpgroups, if `test` has one.
fn without_warpgroups(test: &str) -> Result<Option<Device>> {
    let Some(config) = ferrotron_cuda_sim::gpu(test) else { return Ok(None) };
    let gpu = Device::cuda(&GpuConfig { warpgroups: false, ..config })?;
    assert!(!gpu.gpu().unwrap().uses_warpgroups());
    Ok(Some(gpu))
}

fn agrees(gpu: &Device, dtypes: &[DType]) -> Result<()> {
    for &dtype in dtypes {
        for sizes in [
            [1, 1, 1, 1, 1, 64],
            [2, 37, 37, 4, 2, 16],
            [1, 20, 70, 2, 1, 128],
            [1, 20, 70, 2, 1, 96],
            [1, 40, 23, 1, 1, 24], // queries that see no key, where the mask is causal
            [1, 5, 6, 2, 2, 10],   // heads that are filled up
            [1, 3, 3, 1, 1, 1],
        ] {
            let [batch, queries, keys, heads, groups, width] = sizes;
            let q = small(&cpu()?, dtype, &[batch, queries, heads, width], 1)?;
            let k = small(&cpu()?, dtype, &[batch, keys, groups, width], 2)?;
            let v = small(&cpu()?, dtype, &[batch, keys, groups, width], 3)?;
            for dropping in [false, true] {
                for mask in [AttentionMask::None, AttentionMask::Causal] {
                    check(gpu, [&q, &k, &v], Sizes(sizes), &Sizes(sizes).config(mask, dropping)?)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn biases_of_every_shape_give_what_the_cpu_gives() -> Result<()> {
    let Some(gpu) = gpu("biases_of_every_shape_give_what_the_cpu_gives")? else { return Ok(()) };
    for dtype in FLOATS {
        let sizes @ [batch, queries, keys, heads, groups, width] = [2, 21, 37, 4, 2, 16];
        let q = small(&cpu()?, dtype, &[batch, queries, heads, width], 1)?;
        let k = small(&cpu()?, dtype, &[batch, keys, groups, width], 2)?;
        let v = small(&cpu()?, dtype, &[batch, keys, groups, width], 3)?;
        for (i, dims) in [
            vec![heads, queries, keys],
            vec![batch, 1, queries, keys],
            vec![batch, heads, 1, keys],
            vec![heads, queries, 1],
            vec![keys],
            vec![],
        ]
        .iter()
        .enumerate()
        {
            let mask = [AttentionMask::None, AttentionMask::Causal][i % 2];
            let sizes = Sizes(sizes);
            let bias = Some(small(&cpu()?, dtype, dims, 4)?);
            let config = AttentionConfig { bias, ..sizes.config(mask, i % 3 == 0)? };
            check(&gpu, [&q, &k, &v], sizes, &config)?;
        }
        for mask in [AttentionMask::None, AttentionMask::Causal] {
            let diagonals = Some(small(&cpu()?, dtype, &[heads, queries + keys - 1], 4)?);
            let config = AttentionConfig { diagonals, ..Sizes(sizes).config(mask, true)? };
            check(&gpu, [&q, &k, &v], Sizes(sizes), &config)?;
        }
    }
    Ok(())
}

#[test]
fn attention_takes_views_of_any_strides() -> Result<()> {
    let Some(gpu) = gpu("attention_takes_views_of_any_strides")? else { return Ok(()) };
    for dtype in [DType::F32, DType::BF16] {
        for width in [8, 20] {
            let sizes = Sizes([2, 19, 19, 2, 1, width]);
            let q = small(&cpu()?, dtype, &[2, 19, 2, width], 1)?;
            let k = small(&cpu()?, dtype, &[2, 19, 1, width], 2)?;
            let v = small(&cpu()?, dtype, &[2, 19, 1, width], 3)?;
            let config = sizes.config(AttentionMask::Causal, false)?;
            for ((q, k), v) in views(&q)?.iter().zip(views(&k)?).zip(views(&v)?) {
                check(&gpu, [q, &k, &v], sizes, &config)?;
                check(&gpu, [&q.transpose(1, 1)?, &v, &k], sizes, &config)?;
            }
        }
    }
    Ok(())
}

/// Values and gradients there and here.
fn check(gpu: &Device, here: [&Tensor; 3], sizes: Sizes, config: &AttentionConfig) -> Result<()> {
    let [q, k, v] = here;
    let on_gpu = [there(gpu, q)?, there(gpu, k)?, there(gpu, v)?];
    let what = format!("{sizes:?} {:?} {}", config.mask, config.dropout.is_some());
    let (out, lse) = attention(q, k, v, config)?;
    let bias = config.bias.as_ref().map(|bias| there(gpu, bias)).transpose()?;
    let diagonals = config.diagonals.as_ref().map(|x| there(gpu, x)).transpose()?;
    let gpu_config = &AttentionConfig { bias, diagonals, ..config.clone() };
    let (got_out, got_lse) = attention(&on_gpu[0], &on_gpu[1], &on_gpu[2], gpu_config)?;
    let dout_here = small(&cpu()?, q.dtype(), q.dims(), 5)?;
    let (dq, dk, dv) = attention_backward(&dout_here, (q, k, v), (&out, &lse), config)?;
    // A strided cotangent, from the CPU's results.
    let dout = there(gpu, &views(&dout_here)?[2])?;
    let saved = (&there(gpu, &out)?, &there(gpu, &lse)?);
    let operands = (&on_gpu[0], &on_gpu[1], &on_gpu[2]);
    let got = attention_backward(&dout, operands, saved, gpu_config)?;
    let pairs =
        [(got_out, out.clone()), (got_lse, lse.clone()), (got.0, dq), (got.1, dk), (got.2, dv)];
    let tolerances = sizes.tolerances(q.dtype(), config);
    for ((name, (got, want)), [relative, absolute]) in
        ["out", "lse", "dq", "dk", "dv"].iter().zip(pairs).zip(tolerances)
    {
        assert_close(&format!("{what}, {name}"), &got, &want, relative, absolute)?;
    }
    if let Some(bias) = &config.bias {
        let want = attention_backward_bias(&dout_here, (q, k, v), (&out, &lse), config)?;
        let got = attention_backward_bias(&dout, operands, saved, gpu_config)?;
        // An element of dq is a sum of such terms; here up to all of them share an element of the bias.
        let shared = (sizes.0[0] * sizes.0[3] * sizes.0[1] * sizes.0[2] / bias.numel()) as f64;
        let [relative, absolute] = tolerances[2];
        let absolute = absolute / config.scale * shared.sqrt();
        assert_close(&format!("{what}, dbias {bias:?}"), &got, &want, relative, absolute)?;
    }
    Ok(())
}

/// At the lengths and widths of real models, beside the kernels of f32, which use no tensor cores.
#[test]
fn long_sequences_give_what_f32_gives() -> Result<()> {
    let Some(gpu) = gpu("long_sequences_give_what_f32_gives")? else { return Ok(()) };
    long_sequences(&gpu)
}

#[test]
fn long_sequences_without_warpgroups_give_what_f32_gives() -> Result<()> {
    let test = "long_sequences_without_warpgroups_give_what_f32_gives";
    without_warpgroups(test)?.map_or(Ok(()), |gpu| long_sequences(&gpu))
}

fn long_sequences(gpu: &Device) -> Result<()> {
    let is_real = std::env::var_os("FERROTRON_TEST_GPU").is_some();
    let lengths: &[usize] = if is_real { &[1024, 2048] } else { &[70] };
    for &length in lengths {
        for width in [64, 96, 128] {
            let sizes = Sizes([1, length, length, 2, 1, width]);
            let config = &sizes.config(AttentionMask::Causal, false)?;
            let random = |heads, seed| small(gpu, DType::BF16, &[1, length, heads, width], seed);
            let (q, k, v, dout) = (random(2, 1)?, random(1, 2)?, random(1, 3)?, random(2, 5)?);
            let all = |q: &Tensor, k: &Tensor, v: &Tensor, dout: &Tensor| -> Result<[Tensor; 5]> {
                let (out, lse) = attention(q, k, v, config)?;
                let (dq, dk, dv) = attention_backward(dout, (q, k, v), (&out, &lse), config)?;
                Ok([out, lse, dq, dk, dv])
            };
            let [q32, k32, v32, dout32] = [&q, &k, &v, &dout].map(|x| x.cast(DType::F32));
            let want = all(&q32?, &k32?, &v32?, &dout32?)?;
            let (got, tolerances) =
                (all(&q, &k, &v, &dout)?, sizes.tolerances(DType::BF16, config));
            for (((got, want), [relative, absolute]), name) in
                got.iter().zip(&want).zip(tolerances).zip(["out", "lse", "dq", "dk", "dv"])
            {
                let (what, want) = (format!("{sizes:?}, {name}"), want.cast(got.dtype())?);
                assert_close(&what, got, &want, relative, absolute)?;
            }
        }
    }
    Ok(())
}

#[test]
fn packed_projections_are_read_and_their_gradient_written_in_place() -> Result<()> {
    let Some(gpu) = gpu("packed_projections_are_read_and_their_gradient_written_in_place")? else {
        return Ok(());
    };
    for dtype in FLOATS {
        for width in [32, 12] {
            let (heads, groups, positions) = (4, 2, 41);
            let sizes = Sizes([2, positions, positions, heads, groups, width]);
            let dims = [2, positions, (heads + 2 * groups) * width];
            let packed = small(&cpu()?, dtype, &dims, 4)?;
            let dout = small(&cpu()?, dtype, &[2, positions, heads, width], 5)?;
            let config = sizes.config(AttentionMask::Causal, false)?;
            let run = |device: &Device| -> Result<(Tensor, [Tensor; 3])> {
                let (packed, dout) = (there(device, &packed)?, there(device, &dout)?);
                let (q, k, v) = split_packed(&packed, heads, groups)?;
                let (out, lse) = attention(&q, &k, &v, &config)?;
                let (qkv, saved) = ((&q, &k, &v), (&out, &lse));
                let packed = attention_backward_packed(&dout, qkv, saved, &config)?;
                let (dq, dk, dv) = attention_backward(&dout, qkv, saved, &config)?;
                Ok((packed, [dq, dk, dv]))
            };
            let (packed, parts) = run(&gpu)?;
            assert_eq!(packed.dims(), dims);
            let (dq, dk, dv) = split_packed(&packed, heads, groups)?;
            for (got, part) in [dq, dk, dv].iter().zip(&parts) {
                assert_close("packed gradient", &got.contiguous()?, part, 0.0, 0.0)?;
            }
            let tolerances = sizes.tolerances(dtype, &config);
            for ((got, want), [relative, absolute]) in
                parts.iter().zip(run(&cpu()?)?.1).zip(&tolerances[2..])
            {
                // Each from its own out and lse.
                assert_close("gradient", got, &want, 2.0 * relative, 2.0 * absolute)?;
            }
        }
    }
    Ok(())
}

#[test]
fn blocks_of_keys_join() -> Result<()> {
    let Some(gpu) = gpu("blocks_of_keys_join")? else { return Ok(()) };
    for dtype in FLOATS {
        let acc = dtype.accumulator();
        let run = |device: &Device| -> Result<(Tensor, Tensor)> {
            let of = |dims: &[usize], seed| there(device, &small(&cpu()?, dtype, dims, seed)?);
            let (q, k, v) = (of(&[2, 6, 2, 8], 1)?, of(&[2, 9, 2, 8], 2)?, of(&[2, 9, 2, 8], 3)?);
            let config =
                AttentionConfig { mask: AttentionMask::None, ..AttentionConfig::causal(8) };
            let mut out = Tensor::empty(device, acc, &[2, 6, 2, 8])?;
            let mut lse = Tensor::full(device, acc, &[2, 2, 6], f64::NEG_INFINITY)?;
            for (first, keys) in [(2, 0..4), (0, 4..5), (4, 5..9)] {
                let q = q.narrow(1, first, 6 - first)?;
                let (k, v) =
                    (k.narrow(1, keys.start, keys.len())?, v.narrow(1, keys.start, keys.len())?);
                let (block, block_lse) = attention(&q, &k, &v, &config)?;
                merge_attention((&mut out, &mut lse), first, (&block, &block_lse))?;
            }
            Ok((out, lse))
        };
        let ((got, got_lse), (want, lse)) = (run(&gpu)?, run(&cpu()?)?);
        // Each block is rounded to the dtype once on either device.
        let eps = 2.0 * rounding(dtype) + 64.0 * acc.epsilon();
        assert_close("merged out", &got, &want, eps, eps)?;
        assert_close("merged lse", &got_lse, &lse, 64.0 * acc.epsilon(), 64.0 * acc.epsilon())?;
    }
    let x = |dtype, dims: &[usize]| Tensor::zeros(&gpu, dtype, dims);
    let (mut out, mut lse) = (x(DType::F32, &[1, 4, 2, 8])?, x(DType::F32, &[1, 2, 4])?);
    let (block, block_lse) = (x(DType::F64, &[1, 2, 2, 8])?, x(DType::F32, &[1, 2, 2])?);
    let error = merge_attention((&mut out, &mut lse), 0, (&block, &block_lse)).unwrap_err();
    assert!(error.to_string().contains("a block in f64 needs f64"), "{error}");
    Ok(())
}

#[test]
fn heads_that_no_kernel_takes_are_an_error_and_empty_operands_are_not() -> Result<()> {
    let Some(gpu) = gpu("heads_that_no_kernel_takes_are_an_error_and_empty_operands_are_not")?
    else {
        return Ok(());
    };
    let x = Tensor::zeros(&gpu, DType::BF16, &[1, 2, 1, 160])?;
    let error = attention(&x, &x, &x, &AttentionConfig::causal(160)).unwrap_err().to_string();
    assert_eq!(error, "attention: a GPU takes heads of at most 128 elements in bf16, got 160");
    for dims in [[0, 3, 2, 8], [2, 0, 2, 8], [2, 3, 0, 8]] {
        let x = Tensor::zeros(&gpu, DType::BF16, &dims)?;
        let (out, lse) = attention(&x, &x, &x, &AttentionConfig::causal(8))?;
        assert_eq!((out.dims(), lse.dims()), (&dims[..], &[dims[0], dims[2], dims[1]][..]));
        attention_backward(&x, (&x, &x, &x), (&out, &lse), &AttentionConfig::causal(8))?;
    }
    let (q, k) = (
        Tensor::zeros(&gpu, DType::F32, &[1, 2, 1, 8])?,
        Tensor::zeros(&gpu, DType::F32, &[1, 0, 1, 8])?,
    );
    let (out, lse) = attention(&q, &k, &k, &AttentionConfig::causal(8))?;
    assert_eq!((out.to_f64()?, lse.to_f64()?), (vec![0.0; 16], vec![f64::NEG_INFINITY; 2]));
    Ok(())
}
