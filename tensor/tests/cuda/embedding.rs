//! Embeddings, whole and in shards, and their gradients, which always add in the same order.

use ferrotron_tensor::ops::cross_entropy::VocabShard;
use ferrotron_tensor::ops::embedding::{
    embedding, embedding_backward, embedding_shard, embedding_shard_backward,
};
use ferrotron_tensor::{DType, Device, Result, Tensor, partition_range};

use crate::both::{assert_close, cpu, rounding, there, views};
use crate::support::{FLOATS, gpu, ids, random};

#[test]
fn rows_are_those_of_the_cpu_to_the_bit_and_so_are_short_sums() -> Result<()> {
    let Some(gpu) = gpu("rows_are_those_of_the_cpu_to_the_bit_and_so_are_short_sums")? else {
        return Ok(());
    };
    for (v, c, dims, index) in [
        (5, 3, &[4][..], DType::U8),
        (7, 1, &[2, 3], DType::U32),
        (1, 600, &[40], DType::I64),
        (300, 48, &[5, 100], DType::I64),
        (3, 0, &[2], DType::U32),
        (3, 2, &[0], DType::U32),
    ] {
        let tokens = ids(&cpu()?, index, dims, v)?;
        for dtype in FLOATS {
            let (own, dy) = (random(&cpu()?, dtype, &[v, c], 1)?, [dims, &[c]].concat());
            let dy = random(&cpu()?, dtype, &dy, 2)?;
            let all = |x: &Tensor| {
                if x.numel() > 0 { views(x) } else { Ok(vec![x.clone(); 3]) }
            };
            for ((weight, dy), tokens) in all(&own)?.iter().zip(all(&dy)?).zip(all(&tokens)?) {
                let tokens_there = there(&gpu, &tokens)?;
                let y = embedding(&there(&gpu, weight)?, &tokens_there)?;
                assert_close("embedding", &y, &embedding(weight, &tokens)?, 0.0, 0.0)?;
                for wide in [dtype, dtype.accumulator()] {
                    let table = random(&cpu()?, wide, &[v, c], 3)?;
                    let mut got = there(&gpu, &table)?;
                    embedding_backward(&there(&gpu, &dy)?, &tokens_there, &mut got)?;
                    let mut want = table.copy()?;
                    embedding_backward(&dy, &tokens, &mut want)?;
                    let (eps, far) = sums(wide, tokens.numel());
                    assert_close("embedding_backward", &got, &want, eps, far)?;
                }
            }
            in_shards(&gpu, &own, &tokens, &dy)?;
        }
    }
    Ok(())
}

/// Tolerance for sums of `count` numbers up to 2: a GPU adds more than 32 of a kind in another order.
fn sums(dtype: DType, count: usize) -> (f64, f64) {
    match count {
        ..=32 => (0.0, 0.0),
        _ => (rounding(dtype), dtype.accumulator().epsilon() * (2 * count) as f64),
    }
}

/// More shards than some tables have rows.
fn in_shards(gpu: &Device, weight: &Tensor, tokens: &Tensor, dy: &Tensor) -> Result<()> {
    let (rows, tokens_there) = (weight.dims()[0], there(gpu, tokens)?);
    for rank in 0..4 {
        let own = partition_range(rows, 4, rank);
        let shard = VocabShard { offset: own.start, global: rows, shards: 4 };
        let part = weight.narrow(0, own.start, own.len())?.copy()?;
        let got = embedding_shard(&there(gpu, &part)?, &tokens_there, shard)?;
        let want = embedding_shard(&part, tokens, shard)?;
        assert_close(&format!("shard {rank}"), &got, &want, 0.0, 0.0)?;
        let (mut got, mut want) = (there(gpu, &part)?, part);
        embedding_shard_backward(&there(gpu, dy)?, &tokens_there, shard, &mut got)?;
        embedding_shard_backward(dy, tokens, shard, &mut want)?;
        let (eps, far) = sums(got.dtype(), tokens.numel());
        assert_close(&format!("gradient of shard {rank}"), &got, &want, eps, far)?;
    }
    Ok(())
}

#[test]
fn an_id_out_of_range_is_an_error_when_the_device_is_waited_for() -> Result<()> {
    let Some(gpu) = gpu("an_id_out_of_range_is_an_error_when_the_device_is_waited_for")? else {
        return Ok(());
    };
    let weight = Tensor::zeros(&gpu, DType::F32, &[5, 2])?;
    let tokens = Tensor::from_slice(&gpu, &[0_i64, 4, 5, -1], &[2, 2])?;
    let error = embedding(&weight, &tokens)?.to_vec::<f32>().unwrap_err().to_string();
    assert!(error.starts_with("embedding: the index at position 2"), "{error}");
    // It is said once.
    assert_eq!(weight.to_vec::<f32>()?, [0.0; 10]);
    // Every shard says it, and what does not fit is refused at once.
    let part = Tensor::zeros(&gpu, DType::F32, &[2, 2])?;
    let shard = VocabShard { offset: 0, global: 5, shards: 3 };
    let error = embedding_shard(&part, &tokens, shard)?.to_vec::<f32>().unwrap_err().to_string();
    assert!(error.starts_with("embedding: the index at position 2"), "{error}");
    let mut dweight = Tensor::zeros(&gpu, DType::F32, &[5, 2])?;
    let _held = dweight.clone();
    let (dy, tokens) =
        (Tensor::zeros(&gpu, DType::F32, &[1, 2])?, Tensor::zeros(&gpu, DType::I64, &[1])?);
    let error = embedding_backward(&dy, &tokens, &mut dweight).unwrap_err().to_string();
    assert!(error.contains("has other holders"), "{error}");
    Ok(())
}
