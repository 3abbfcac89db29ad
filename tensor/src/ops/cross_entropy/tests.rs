use super::*;
use crate::ops::testing::*;
use crate::{DType, Device};

const SMOOTH: CrossEntropyConfig = CrossEntropyConfig { ignore_index: 2, label_smoothing: 0.125 };

/// Loss and gradient, computed directly from the definition.
fn naive(x: &[f64], targets: &[i64], v: usize, config: &CrossEntropyConfig) -> (f64, Vec<f64>) {
    let (mut loss, mut dx) = (0.0, vec![]);
    let e = config.label_smoothing;
    for (row, &t) in x.chunks(v).zip(targets) {
        let sum: f64 = row.iter().map(|x| x.exp()).sum();
        let counts = t >= 0 && t != config.ignore_index;
        for (j, x) in row.iter().enumerate() {
            let wanted = e / v as f64 + if j as i64 == t { 1.0 - e } else { 0.0 };
            loss -= if counts { wanted * (x.exp() / sum).ln() } else { 0.0 };
            dx.push(if counts { x.exp() / sum - wanted } else { 0.0 });
        }
    }
    (loss, dx)
}

fn targets_for(n: usize, v: usize) -> Vec<i64> {
    (0..n as i64).map(|i| if i % 5 == 3 { -1 - i } else { i * i % v as i64 }).collect()
}

#[test]
fn loss_and_gradient_equal_naive_ones_in_every_dtype_and_layout() {
    let device = Device::cpu(2).unwrap();
    for (n, v) in [(1, 1), (4, 7), (6, 33), (30, 2500), (0, 5)] {
        let (x, list) = (values(n * v, 1), targets_for(n, v));
        let targets = Tensor::from_slice(&device, &list, &[n]).unwrap();
        for config in [CrossEntropyConfig::default(), SMOOTH] {
            let (loss, dx) = naive(&x, &list, v, &config);
            let scaled: Vec<f64> = dx.iter().map(|dx| dx * 0.5).collect();
            let count = list.iter().filter(|&&t| t >= 0 && t != config.ignore_index).count();
            assert_eq!(num_valid_tokens(&targets, &config).unwrap(), count);
            for dtype in FLOATS {
                let acc = dtype.accumulator();
                let half = tensor(&device, acc, &[], &[0.5]);
                for logits in variants(&tensor(&device, dtype, &[n, v], &x)) {
                    let found = cross_entropy(&logits, &targets, &config).unwrap();
                    assert_eq!((found.loss.dtype(), found.lse.dtype()), (acc, acc));
                    assert_close("cross_entropy", &found.loss, &[loss], 32.0 * acc.epsilon());
                    let eps = dtype.epsilon().max(32.0 * acc.epsilon());
                    let before = bits(&logits);
                    let held = logits.clone();
                    let got = cross_entropy_backward(held, &targets, &found.lse, &config, &half);
                    let got = got.unwrap();
                    assert_close("cross_entropy_backward", &got, &scaled, eps);
                    assert_eq!(bits(&logits), before);
                    let owned = logits.copy().unwrap();
                    let id = owned.buffer_id();
                    let in_place =
                        cross_entropy_backward(owned, &targets, &found.lse, &config, &half)
                            .unwrap();
                    assert_eq!((bits(&in_place), in_place.buffer_id()), (bits(&got), id));
                }
            }
        }
    }
}

#[test]
fn the_gradient_equals_central_differences() {
    let device = Device::cpu(1).unwrap();
    let x = values(5 * 4, 2);
    let targets = Tensor::from_slice(&device, &[0_u32, 3, 2, 1, 1], &[5]).unwrap();
    let of = |x: &[f64]| tensor(&device, DType::F64, &[5, 4], x);
    let found = cross_entropy(&of(&x), &targets, &SMOOTH).unwrap();
    let one = tensor(&device, DType::F64, &[], &[1.0]);
    let dx = cross_entropy_backward(of(&x), &targets, &found.lse, &SMOOTH, &one).unwrap();
    assert_gradient("cross_entropy", &x, &dx, |x| {
        cross_entropy(&of(x), &targets, &SMOOTH).unwrap().loss.item().unwrap()
    });
}

#[test]
fn large_logits_and_leading_dims_are_fine() {
    let device = Device::cpu(1).unwrap();
    let x = [1e4, 0.0, -1e4, 1e4, f64::NEG_INFINITY, 0.0];
    let logits = tensor(&device, DType::F32, &[1, 2, 3], &x);
    let targets = Tensor::from_slice(&device, &[1_i64, 0], &[1, 2]).unwrap();
    let found = cross_entropy(&logits, &targets, &CrossEntropyConfig::default()).unwrap();
    assert_eq!((found.loss.item().unwrap(), found.lse.dims()), (1e4, &[1, 2][..]));
}

#[test]
fn the_number_of_threads_does_not_show() {
    let x = values(64 * 1300, 3);
    assert_same_bits("cross_entropy", |device| {
        let logits = tensor(device, DType::F32, &[64, 1300], &x);
        let targets = Tensor::from_slice(device, &targets_for(64, 1300), &[64])?;
        let found = cross_entropy(&logits, &targets, &SMOOTH)?;
        let scale = tensor(device, DType::F32, &[], &[0.3]);
        let dx = cross_entropy_backward(logits, &targets, &found.lse, &SMOOTH, &scale)?;
        Ok(vec![found.loss, found.lse, dx])
    });
}

#[test]
fn errors_name_the_values() {
    let device = Device::cpu(1).unwrap();
    let logits = Tensor::zeros(&device, DType::F32, &[2, 3]).unwrap();
    let targets = Tensor::from_slice(&device, &[0_i64, 3], &[2]).unwrap();
    let config = CrossEntropyConfig::default();
    assert_eq!(
        message(cross_entropy(&logits, &targets, &config)),
        "cross_entropy: target 3 at position 1 is not below 3"
    );
    let short = Tensor::zeros(&device, DType::I64, &[1]).unwrap();
    assert_eq!(
        message(cross_entropy(&logits, &short, &config)),
        "cross_entropy: logits are [2, 3], targets [1]"
    );
    let wild = CrossEntropyConfig { label_smoothing: 1.5, ..config };
    assert_eq!(
        message(cross_entropy(&logits, &short.broadcast_to(&[2]).unwrap(), &wild)),
        "cross_entropy: label smoothing is on [0, 1], got 1.5"
    );
}
