//! The head and its cross-entropy over a vocabulary in shards, against the serial ones.

use ferrotron_autograd::{Leaf, Var};
use ferrotron_nn::{Axis, Init, Param, WeightDecay};
use ferrotron_parallel::tensor_parallel::{HeadParams, TensorParallel};
use ferrotron_tensor::ops::cross_entropy::CrossEntropyConfig;
use ferrotron_tensor::{Error, Result, Tensor};

use crate::ranks::*;

/// A head that holds `tp`'s part of `vocab` rows.
fn head(tp: &TensorParallel, vocab: usize, width: usize, init: Init) -> Result<Param> {
    let place = tp.shard(&[vocab, width], 0, &[vocab])?;
    Ok(scope("head").sharded_along(Axis::Tensor).param_at("weight", place, init, WeightDecay::On))
}

fn smoothed(label_smoothing: f64) -> CrossEntropyConfig {
    CrossEntropyConfig { ignore_index: -100, label_smoothing }
}

fn targets(values: &[i64], dims: &[usize]) -> Tensor {
    Tensor::from_slice(&device(), values, dims).unwrap()
}

/// The case of test_cross_entropy.py: logits 0 to 7 over and over, 32 on each of 4 ranks, targets 0, 2, 4, ... Losses
/// are as listed there, and their gradients.
#[test]
fn losses_of_megatron() {
    let lse = (16.0 * (0..8).map(|k| f64::from(k).exp()).sum::<f64>()).ln();
    on_tensor_ranks(4, BOTH[0], |tp| {
        let weight = head(&tp, 128, 1, Init::Zeros)?;
        let logits: Vec<f64> = (0..32).map(|i| f64::from(i % 8)).collect();
        weight.leaf().set_value(&tensor(&logits, &[32, 1]))?;
        let x = Leaf::new("x", tensor(&[1.0; 16], &[1, 16, 1]));
        for (i, want) in [10.2309, 8.2309, 6.2309, 4.2309].iter().cycle().take(16).enumerate() {
            // Token i alone counts.
            let target = 2 * i as i64;
            let list: Vec<i64> = (0..16).map(|t| if t == i { target } else { -100 }).collect();
            let targets = targets(&list, &[1, 16]);
            let loss =
                tp.linear_cross_entropy(&x.var()?, &weight, &targets, &smoothed(0.0), 1 << 20)?;
            assert_eq!(loss.num_valid_tokens()?, 1);
            let got = loss.sum.value().item()?;
            assert!((got - want).abs() < 1e-4, "token {i}: got {got}, want {want}");
            weight.leaf().zero_gradient();
            loss.sum.backward()?;
            let first = 32 * tp.group().rank() as i64;
            let want: Vec<f64> = (0..32)
                .map(|class| {
                    let is_target = if first + class == target { 1.0 } else { 0.0 };
                    (f64::from((class % 8) as i32) - lse).exp() - is_target
                })
                .collect();
            let tolerance = rounding(32);
            assert_close("gradient", &gradient(weight.leaf()), &tensor(&want, &[32, 1]), tolerance);
        }
        Ok(())
    });
}

/// Uneven shards, some of them empty, smoothing, ignored labels, logits kept and in chunks.
#[test]
fn loss_and_gradients_equal_serial_ones() -> Result<()> {
    let (b, t, width, init) = (2, 12, 5, Init::Normal { std: 0.7 });
    let x = normal(&[b, t, width], "x");
    let scale = 0.37;
    for (vocab, label_smoothing, bytes) in
        [(13, 0.0, 1 << 20), (13, 0.1, 1 << 20), (13, 0.1, 150), (3, 0.1, 0), (16, 0.0, 300)]
    {
        let list: Vec<i64> =
            (0..24).map(|i| if i % 3 == 1 { -100 } else { (5 * i + 2) % vocab }).collect();
        let (targets, config) = (targets(&list, &[b, t]), smoothed(label_smoothing));
        let serial = head(&TensorParallel::single(), vocab as usize, width, init)?;
        let leaf = Leaf::new("x", x.clone());
        let want = leaf.var()?.linear_cross_entropy(&serial.var()?, &targets, &config, bytes)?;
        want.sum.backward_scaled(scale)?;
        let logits = Var::constant(x.clone()).linear(&serial.var()?, None)?;
        let (dx, dw, logits) = (gradient(&leaf), gradient(serial.leaf()), logits.value());
        let (sum, counted) = (want.sum.value(), want.num_valid_tokens()?);
        let tolerance = rounding(b * t * width);
        for (ranks, sequence) in (1..=4).flat_map(|n| BOTH.map(|sequence| (n, sequence))) {
            on_tensor_ranks(ranks, sequence, |tp| {
                let what = format!(
                    "V {vocab}, smoothing {label_smoothing}, {bytes} bytes, rank {} of {ranks}, {sequence:?}",
                    tp.group().rank()
                );
                let weight = head(&tp, vocab as usize, width, init)?;
                let leaf = Leaf::new("x", residual(&tp, &x));
                let loss =
                    tp.linear_cross_entropy(&leaf.var()?, &weight, &targets, &config, bytes)?;
                assert_eq!(loss.num_valid_tokens()?, counted, "{what}");
                assert_close(&what, loss.sum.value(), sum, tolerance);
                loss.sum.backward_scaled(scale)?;
                let want = residual(&tp, &dx);
                assert_close(&format!("{what}: dx"), &gradient(&leaf), &want, tolerance);
                let want = part(&dw, weight.shard_spec());
                assert_close(&format!("{what}: dW"), &gradient(weight.leaf()), &want, tolerance);
                let got = tp.logits(&leaf.var()?, &weight)?;
                assert_close(&format!("{what}: logits"), got.value(), logits, tolerance);
                Ok(())
            });
        }
    }
    Ok(())
}

/// A rank has the bias of its rows.
#[test]
fn a_bias_is_sharded_with_its_rows() -> Result<()> {
    let (b, t, width, vocab, init) = (2, 12, 5, 13, Init::Normal { std: 0.7 });
    let x = normal(&[b, t, width], "x");
    let list: Vec<i64> =
        (0..24).map(|i| if i % 3 == 1 { -100 } else { (5 * i + 2) % 13 }).collect();
    let (targets, config) = (targets(&list, &[b, t]), smoothed(0.1));
    let bias = |tp: &TensorParallel| {
        let place = tp.shard(&[vocab], 0, &[vocab])?;
        let scope = scope("head").sharded_along(Axis::Tensor);
        Ok::<_, Error>(scope.param_at("bias", place, init, WeightDecay::Off))
    };
    let alone = TensorParallel::single();
    let (serial, serial_bias) = (head(&alone, vocab, width, init)?, bias(&alone)?);
    let leaf = Leaf::new("x", x.clone());
    let logits = leaf.var()?.linear(&serial.var()?, Some(&serial_bias.var()?))?;
    let want = logits.cross_entropy(&targets, &config)?.sum;
    want.backward()?;
    let (dx, dw, db) = (gradient(&leaf), gradient(serial.leaf()), gradient(serial_bias.leaf()));
    let tolerance = rounding(b * t * width);
    for (ranks, sequence) in (1..=3).flat_map(|n| BOTH.map(|sequence| (n, sequence))) {
        for bytes in [0, 1 << 20] {
            on_tensor_ranks(ranks, sequence, |tp| {
                let (weight, bias) = (head(&tp, vocab, width, init)?, bias(&tp)?);
                let head = HeadParams { weight: &weight, bias: Some(&bias), softcap: None };
                let leaf = Leaf::new("x", residual(&tp, &x));
                let loss = tp.linear_cross_entropy(&leaf.var()?, head, &targets, &config, bytes)?;
                assert_close("loss", loss.sum.value(), want.value(), tolerance);
                loss.sum.backward()?;
                assert_close("dx", &gradient(&leaf), &residual(&tp, &dx), tolerance);
                let want = part(&dw, weight.shard_spec());
                assert_close("dW", &gradient(weight.leaf()), &want, tolerance);
                let want = part(&db, bias.shard_spec());
                assert_close("db", &gradient(bias.leaf()), &want, tolerance);
                let got = tp.logits(&leaf.var()?, head)?;
                assert_close("logits", got.value(), logits.value(), tolerance);
                Ok(())
            });
        }
    }
    Ok(())
}

/// Gathered logits have a gradient too.
#[test]
fn logits_have_gradients() -> Result<()> {
    let (vocab, width, init) = (7, 5, Init::Normal { std: 0.7 });
    let (x, dy) = (normal(&[2, 6, width], "x"), normal(&[2, 6, vocab], "dy"));
    let serial = head(&TensorParallel::single(), vocab, width, init)?;
    let leaf = Leaf::new("x", x.clone());
    let weighted = |logits: Var| logits.mul(&Var::constant(dy.clone()))?.sum_all();
    weighted(leaf.var()?.linear(&serial.var()?, None)?)?.backward()?;
    let (dx, dw) = (gradient(&leaf), gradient(serial.leaf()));
    for (ranks, sequence) in (1..=3).flat_map(|n| BOTH.map(|sequence| (n, sequence))) {
        on_tensor_ranks(ranks, sequence, |tp| {
            let weight = head(&tp, vocab, width, init)?;
            let leaf = Leaf::new("x", residual(&tp, &x));
            weighted(tp.logits(&leaf.var()?, &weight)?)?.backward()?;
            let tolerance = rounding(12 * width);
            assert_close("dx", &gradient(&leaf), &residual(&tp, &dx), tolerance);
            assert_close(
                "dW",
                &gradient(weight.leaf()),
                &part(&dw, weight.shard_spec()),
                tolerance,
            );
            Ok(())
        });
    }
    Ok(())
}

/// Three numbers a token go round in forward, four with smoothing; in backward dx, and nothing of the size of the
/// vocabulary ever.
#[test]
fn three_numbers_a_token_are_exchanged() {
    const TOKENS: u64 = 24;
    const WIDTH: u64 = 5;
    for (label_smoothing, numbers) in [(0.0, 3), (0.1, 4)] {
        for ranks in 2..=4_u64 {
            let list: Vec<i64> = (0..TOKENS as i64).collect();
            let sent = on_tensor_ranks(ranks as usize, BOTH[0], |tp| {
                let weight = head(&tp, 50_000, WIDTH as usize, Init::Zeros)?;
                let x = Leaf::new("x", normal(&[2, 12, WIDTH as usize], "x"));
                let (targets, config) = (targets(&list, &[2, 12]), smoothed(label_smoothing));
                let loss =
                    tp.linear_cross_entropy(&x.var()?, &weight, &targets, &config, 1 << 30)?;
                let forward = tp.group().traffic();
                assert_eq!(
                    forward.calls_and_bytes("all_reduce").0,
                    2,
                    "a maximum, and a sum of the others"
                );
                assert_eq!(
                    forward.calls_and_bytes("all_reduce").1,
                    forward.bytes(),
                    "nothing else"
                );
                loss.sum.backward()?;
                let all = tp.group().traffic();
                assert_eq!(all.calls_and_bytes("all_reduce").0, 3);
                assert_eq!(all.calls_and_bytes("all_reduce").1, all.bytes(), "nothing else");
                Ok([forward.bytes(), all.bytes() - forward.bytes()])
            });
            // An all-reduce sends 2 (n - 1) times its buffer over all ranks.
            let times = 2 * (ranks - 1) * size_of::<f64>() as u64;
            let sum = |i: usize| sent.iter().map(|bytes| bytes[i]).sum::<u64>();
            assert_eq!(sum(0), times * numbers * TOKENS, "forward, {ranks} ranks");
            assert_eq!(sum(1), times * WIDTH * TOKENS, "backward, {ranks} ranks");
        }
    }
}
