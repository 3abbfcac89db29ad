use super::*;
use crate::ops::cross_entropy::{cross_entropy, cross_entropy_backward};
use crate::ops::linear::linear;
use crate::ops::pointwise::add_assign;
use crate::ops::testing::*;
use crate::{DType, Device};

const SMOOTH: CrossEntropyConfig = CrossEntropyConfig { ignore_index: 2, label_smoothing: 0.125 };
const N: usize = 12;
const C: usize = 5;
const V: usize = 9;

fn targets(device: &Device, dims: &[usize]) -> Tensor {
    let n: usize = dims.iter().product();
    let list: Vec<i64> =
        (0..n as i64).map(|i| if i % 5 == 3 { -1 } else { i * i % V as i64 }).collect();
    Tensor::from_slice(device, &list, dims).unwrap()
}

/// A scalar in the dtype of the loss of `x`.
fn scalar(x: &Tensor, value: f64) -> Tensor {
    Tensor::full(x.device(), x.dtype().accumulator(), &[], value).unwrap()
}

const ALL: WantedGradients = WantedGradients { input: true, weight: true, bias: false };

/// dx and db, and dW written or added to `dweight`.
fn gradients<'a>(
    found: LinearCrossEntropy,
    (x, head, t): (&Tensor, impl Into<HeadWeights<'a>>, &Tensor),
    config: &CrossEntropyConfig,
    scale: f64,
    (dweight, accum): (&mut Tensor, Accum),
) -> (Option<Tensor>, Option<Tensor>) {
    let (scale, head) = (scalar(x, scale), head.into());
    match found.kept {
        Kept::Nothing => (None, None),
        Kept::Gradients(formed) => {
            let formed = formed.scaled(&scale).unwrap();
            let sum = formed.weight.unwrap().cast(dweight.dtype()).unwrap();
            match accum {
                Accum::Add => add_assign(dweight, &sum).unwrap(),
                Accum::Replace => dweight.copy_from(&sum).unwrap(),
            }
            (formed.input, formed.bias)
        }
        Kept::Logits(kept) => {
            let (mut dx, mut db) = (None, None);
            let mut take = |found| {
                dx = Some(found);
                Ok(())
            };
            let mut take_bias = |found| {
                db = Some(found);
                Ok(())
            };
            let bias: Option<GradSink> =
                if head.bias.is_some() { Some(&mut take_bias) } else { None };
            let weight = Some((dweight, accum));
            let wanted = Gradients { scale: &scale, input: Some(&mut take), weight, bias };
            linear_cross_entropy_backward(kept, x, head, t, &found.lse, config, wanted).unwrap();
            (dx, db)
        }
    }
}

/// [`gradients`] of a head without bias: dx.
fn backward(
    found: LinearCrossEntropy,
    (x, w, t): (&Tensor, &Tensor, &Tensor),
    config: &CrossEntropyConfig,
    scale: f64,
    weight: (&mut Tensor, Accum),
) -> Tensor {
    gradients(found, (x, w, t), config, scale, weight).0.expect("dx is handed over")
}

#[test]
fn every_bound_gives_what_the_composed_ops_give() {
    let device = Device::cpu(2).unwrap();
    let (x, w) = (values(N * C, 1), values(V * C, 2));
    for dtype in FLOATS {
        let (x, w) = (tensor(&device, dtype, &[3, 4, C], &x), tensor(&device, dtype, &[V, C], &w));
        let t = targets(&device, &[3, 4]);
        let logits = linear(&x, &w, None).unwrap();
        let want = cross_entropy(&logits, &t, &SMOOTH).unwrap();
        let half = scalar(&x, 0.5);
        let dlogits = cross_entropy_backward(logits, &t, &want.lse, &SMOOTH, &half).unwrap();
        let want_dx = matmul(&dlogits, &w).unwrap();
        let rows = dlogits.reshape(&[N, V]).unwrap();
        let flat = x.reshape(&[N, C]).unwrap();
        let want_dw = matmul(&rows.transpose(0, 1).unwrap(), &flat).unwrap().to_f64().unwrap();
        let once: Vec<f64> = want_dw.iter().map(|dw| dw + 1.0).collect();
        let row_bytes = V * dtype.size();
        for (bound, chunk, kept) in [
            (0, 1, false),
            (row_bytes, 1, false),
            (5 * row_bytes + 1, 4, false),
            (N * row_bytes - 1, 6, false),
            (N * row_bytes, N, true),
        ] {
            for (x, w) in variants(&x).iter().zip(variants(&w)) {
                let found = || linear_cross_entropy(x, &w, &t, &SMOOTH, bound, ALL).unwrap();
                let got = found();
                assert_eq!(matches!(got.kept, Kept::Logits(_)), kept);
                assert_eq!(matches!(got.kept, Kept::Gradients(_)), !kept);
                assert_eq!(bits(&got.loss), bits(&want.loss));
                assert_eq!(bits(&got.lse), bits(&want.lse));
                // The running sum, of formed gradients in the accumulator dtype, is rounded once per chunk.
                let eps = 4.0 * (N / chunk) as f64 * dtype.epsilon();
                let mut dweight = Tensor::full(&device, dtype, &[V, C], 1.0).unwrap();
                let dx = backward(got, (x, &w, &t), &SMOOTH, 0.5, (&mut dweight, Accum::Add));
                // A half scales exactly, before the products or behind them.
                assert_eq!((dx.dims(), bits(&dx)), (x.dims(), bits(&want_dx)));
                assert_close("dweight added", &dweight, &once, eps);
                let to = (&mut dweight, Accum::Replace);
                backward(found(), (x, &w, &t), &SMOOTH, 0.5, to);
                assert_close("dweight", &dweight, &want_dw, eps);
                // Only what is asked for, and nothing without a wish.
                let wanted = WantedGradients { input: true, ..WantedGradients::default() };
                let got = linear_cross_entropy(x, &w, &t, &SMOOTH, bound, wanted).unwrap();
                if let Kept::Gradients(formed) = got.kept {
                    assert_eq!(formed.tensors().count(), 1);
                }
                let wanted = WantedGradients::default();
                let got = linear_cross_entropy(x, &w, &t, &SMOOTH, bound, wanted).unwrap();
                assert!(matches!(got.kept, Kept::Nothing));
                assert_eq!(bits(&got.loss), bits(&want.loss));
            }
        }
    }
}

#[test]
fn gradients_equal_central_differences() {
    let device = Device::cpu(1).unwrap();
    let (x, w) = (values(N * C, 3), values(V * C, 4));
    let t = targets(&device, &[N]);
    let of = |dims: &[usize], values: &[f64]| tensor(&device, DType::F64, dims, values);
    let loss = |x: &[f64], w: &[f64]| {
        let found = linear_cross_entropy(&of(&[N, C], x), &of(&[V, C], w), &t, &SMOOTH, 300, ALL);
        found.unwrap().loss.item().unwrap()
    };
    let (xs, ws) = (of(&[N, C], &x), of(&[V, C], &w));
    let found = linear_cross_entropy(&xs, &ws, &t, &SMOOTH, 300, ALL).unwrap();
    let mut dweight = of(&[V, C], &[0.0; V * C]);
    let dx = backward(found, (&xs, &ws, &t), &SMOOTH, 1.0, (&mut dweight, Accum::Replace));
    assert_gradient("dx", &x, &dx, |x| loss(x, &w));
    assert_gradient("dweight", &w, &dweight, |w| loss(&x, w));
}

#[test]
fn the_bound_bounds_memory_and_threads_do_not_show() {
    let (n, c, v) = (96, 16, 700);
    let (x, w) = (values(n * c, 5), values(v * c, 6));
    assert_same_bits("linear_cross_entropy", |device| {
        let x = tensor(device, DType::F32, &[n, c], &x);
        let w = tensor(device, DType::F32, &[v, c], &w);
        let t = targets(device, &[n]);
        let mut dweight = Tensor::zeros(device, DType::F32, &[v, c])?;
        let config = CrossEntropyConfig::default();
        let bound = 10 * v * 4;
        let before = device.memory().current;
        device.reset_memory_peaks();
        let found = linear_cross_entropy(&x, &w, &t, &config, bound, ALL)?;
        let loss = found.loss.clone();
        let dx = backward(found, (&x, &w, &t), &config, 1.0, (&mut dweight, Accum::Add));
        let small = (n * c + v * c + 3 * n + 64) * 4; // dx, dW, lse, the losses and the loss
        let peak = device.memory().peak - before;
        assert!(peak <= bound + small, "peak {peak}, bound {bound}, gradients and lse {small}");
        Ok(vec![loss, dx, dweight])
    });
}

#[test]
fn sixteen_bits_add_into_single_precision_and_nothing_is_fine() {
    let device = Device::cpu(1).unwrap();
    let (x, w) = (values(N * C, 7), values(V * C, 8));
    let (x, w) =
        (tensor(&device, DType::BF16, &[N, C], &x), tensor(&device, DType::BF16, &[V, C], &w));
    let t = targets(&device, &[N]);
    let found = linear_cross_entropy(&x, &w, &t, &SMOOTH, 40, ALL).unwrap();
    let mut dweight = Tensor::zeros(&device, DType::F32, &[V, C]).unwrap();
    backward(found, (&x, &w, &t), &SMOOTH, 1.0, (&mut dweight, Accum::Add));
    assert!(dweight.to_f64().unwrap().iter().any(|&x| x != 0.0));

    let (none, t) = (x.narrow(0, 0, 0).unwrap(), targets(&device, &[0]));
    let found = linear_cross_entropy(&none, &w, &t, &SMOOTH, 40, ALL).unwrap();
    assert_eq!(found.loss.item().unwrap(), 0.0);
    let dx = backward(found, (&none, &w, &t), &SMOOTH, 1.0, (&mut dweight, Accum::Replace));
    assert_eq!(dx.dims(), [0, C]);
    assert!(dweight.to_f64().unwrap().iter().all(|&x| x == 0.0));
}

#[test]
fn errors_name_the_dims() {
    let device = Device::cpu(1).unwrap();
    let x = Tensor::zeros(&device, DType::F32, &[2, 3]).unwrap();
    let w = Tensor::zeros(&device, DType::F32, &[4, 5]).unwrap();
    let t = targets(&device, &[2]);
    assert_eq!(
        message(linear_cross_entropy(&x, &w, &t, &SMOOTH, 100, ALL)),
        "linear_cross_entropy: needs x (.., C), W (V, C) and targets (..), got [2, 3], [4, 5] and [2]"
    );
}

/// A bias is a feature of x that is always 1: its column of W.
#[test]
fn a_bias_is_a_column_of_ones() {
    let device = Device::cpu(2).unwrap();
    let (x, w, b) = (values(N * C, 5), values(V * C, 6), values(V, 7));
    let of = |dims: &[usize], values: &[f64]| tensor(&device, DType::F64, dims, values);
    let wide = |rows: &[f64], last: &dyn Fn(usize) -> f64| -> Vec<f64> {
        rows.chunks(C)
            .enumerate()
            .flat_map(|(i, row)| row.iter().copied().chain([last(i)]))
            .collect()
    };
    let (x_1, w_1) = (of(&[N, C + 1], &wide(&x, &|_| 1.0)), of(&[V, C + 1], &wide(&w, &|i| b[i])));
    let (x, w, b) = (of(&[N, C], &x), of(&[V, C], &w), of(&[V], &b));
    let t = targets(&device, &[N]);
    let head = HeadWeights { weight: &w, bias: Some(&b), softcap: None };
    for bound in [0, 300, 1 << 20] {
        let want = linear_cross_entropy(&x_1, &w_1, &t, &SMOOTH, bound, ALL).unwrap();
        let all = WantedGradients { bias: true, ..ALL };
        let got = linear_cross_entropy(&x, head, &t, &SMOOTH, bound, all).unwrap();
        assert_close("loss", &got.loss, &want.loss.to_f64().unwrap(), 1e-14);
        let mut want_dw = Tensor::zeros(&device, DType::F64, &[V, C + 1]).unwrap();
        backward(want, (&x_1, &w_1, &t), &SMOOTH, 0.5, (&mut want_dw, Accum::Replace));
        let mut dw = Tensor::zeros(&device, DType::F64, &[V, C]).unwrap();
        let to = (&mut dw, Accum::Replace);
        let (_, db) = gradients(got, (&x, head, &t), &SMOOTH, 0.5, to);
        let column = |from: usize, len: usize| {
            want_dw.narrow(1, from, len).unwrap().contiguous().unwrap().to_f64().unwrap()
        };
        assert_close("dweight", &dw, &column(0, C), 1e-13);
        assert_close("dbias", &db.expect("db is handed over"), &column(C, 1), 1e-13);
    }
    let short = of(&[V - 1], &values(V - 1, 7));
    let head = HeadWeights { weight: &w, bias: Some(&short), softcap: None };
    let error = linear_cross_entropy(&x, head, &t, &SMOOTH, 0, ALL).unwrap_err().to_string();
    assert_eq!(error, "linear_cross_entropy: needs a bias (V), got [8] for W [9, 5]");
}
