//! Tests every pass against plain loops.

use super::*;
use crate::ops::testing::{bits, message, tensor, values};

/// Shapes with several tasks in each dim, with remainders, and empty.
const SHAPES: [&[usize]; 7] =
    [&[300, 150], &[2, 70, 65], &[1, 40_000], &[40_000, 1], &[5], &[0, 3], &[3, 0]];

fn step(device: &Device, lr: f64, grad_scale: f64) -> DeviceStepParams {
    DeviceStepParams::new(device, &StepParams { update: 4, lr, grad_scale }).unwrap()
}

fn of(device: &Device, x: &[f64]) -> Tensor {
    tensor(device, DType::F64, &[x.len()], x)
}

#[test]
fn sums_and_steps_equal_loops_on_any_number_of_threads() {
    for dims in SHAPES {
        let shape = MatrixBatch::from_dims(dims);
        let (n, width) = (shape.numel(), shape.columns);
        let (row_count, column_count) = (shape.count * shape.rows, shape.count * width);
        let row_of = |i: usize| i / width;
        let column_of = |i: usize| i / (shape.rows * width) * width + i % width;
        let grads = values(n, 1); // multiples of 1/64: their squares are summed exactly
        let (mut rows, mut columns) = (vec![0.0; row_count], vec![0.0; column_count]);
        for (i, g) in grads.iter().enumerate() {
            rows[row_of(i)] += g * g;
            columns[column_of(i)] += g * g;
        }
        let factor = |k: usize| 1.0 + (k % 7) as f64 / 8.0;
        let row_factors: Vec<f64> = (0..row_count).map(factor).collect();
        let column_factors: Vec<f64> = (0..column_count).map(|k| factor(k + 3)).collect();
        let update =
            |i: usize| 0.5 * grads[i] * row_factors[row_of(i)] * column_factors[column_of(i)];
        let norm: f64 = (0..n).map(|i| update(i) * update(i)).sum();
        // Clipped to half its RMS, relative to weights of RMS 2, which decay.
        let rms = (norm / n.max(1) as f64).sqrt();
        let config = Adafactor {
            eps2: 1e-3,
            clip_threshold: if rms > 0.0 { 0.5 * rms } else { 1.0 },
            beta1: 0.5,
            weight_decay: 0.25,
        };
        for threads in [1, 2, 3] {
            let device = Device::cpu(threads).unwrap();
            let step = step(&device, 0.25, 0.5);
            let (mut r, mut c) =
                (of(&device, &vec![7.0; row_count]), of(&device, &vec![7.0; column_count]));
            let g = of(&device, &grads);
            square_sums(&shape, &g, &mut r, &mut c).unwrap();
            let sums = (r.to_f64().unwrap(), c.to_f64().unwrap());
            assert!(sums == (rows.clone(), columns.clone()), "{dims:?} on {threads} threads");
            let factors = RowColFactors {
                shape,
                rows: of(&device, &row_factors),
                columns: of(&device, &column_factors),
            };
            let found = update_sq_norm(&step, &g, &factors).unwrap();
            let sum = found.item().unwrap();
            assert!((sum - norm).abs() <= n as f64 * f64::EPSILON * norm, "{sum} {norm}");
            let (mut w, mut means) = (of(&device, &vec![2.0; n]), of(&device, &vec![1.0; n]));
            let weights = Some(of(&device, &[4.0 * n as f64]));
            let sums = SquareSums { weights, update: found, numel: n };
            // alpha = 0.25 * 2, and clipping halves the update.
            adafactor(&config, &step, &mut w, &g, (&factors, &sums), None, None).unwrap();
            let got = w.to_f64().unwrap();
            let close = |got: f64, want: f64| (got - want).abs() <= 16.0 * f64::EPSILON;
            for (i, w) in got.into_iter().enumerate() {
                let want = (1.0 - 0.5 * 0.25) * 2.0 - 0.25 * update(i);
                assert!(close(w, want), "{dims:?}[{i}]: {w}, {want}");
            }
            let mut w = of(&device, &vec![2.0; n]);
            adafactor(&config, &step, &mut w, &g, (&factors, &sums), Some(&mut means), None)
                .unwrap();
            let (got, means) = (w.to_f64().unwrap(), means.to_f64().unwrap());
            for (i, (w, mean)) in got.into_iter().zip(means).enumerate() {
                let want = 0.5 + 0.5 * 0.25 * update(i);
                assert!(close(mean, want), "{dims:?}[{i}]: {mean}");
                assert_eq!(w, (1.0 - 0.5 * 0.25) * 2.0 - mean, "{dims:?}[{i}]");
            }
        }
    }
}

#[test]
fn means_mix_and_become_factors() {
    let device = Device::cpu(1).unwrap();
    let (step, decay) = (step(&device, 1.0, 0.5), SecondMomentDecay { rate: 0.5, eps1: 1e-3 });
    let beta2 = 0.5; // 1 - 4^-0.5
    let mixed = |mean: f64, square: f64| beta2 * mean + (1.0 - beta2) * (square + 1e-3);
    let close = |got: &Tensor, want: &[f64]| {
        for (got, want) in got.to_f64().unwrap().iter().zip(want) {
            assert!((got - want).abs() <= 4.0 * f64::EPSILON * want.abs(), "{got}, {want}");
        }
    };
    let (mut rows, mut columns) = (of(&device, &[1.0, 2.0]), of(&device, &[3.0, 4.0, 5.0]));
    update_means(&decay, &step, &mut rows, &of(&device, &[6.0, 9.0]), 3).unwrap();
    let r = [mixed(1.0, 0.25 * 2.0), mixed(2.0, 0.25 * 3.0)];
    close(&rows, &r);
    update_mean_squares(&decay, &step, &mut columns, &of(&device, &[1.0, -2.0, 3.0])).unwrap();
    let c = [mixed(3.0, 0.25), mixed(4.0, 1.0), mixed(5.0, 2.25)];
    close(&columns, &c);
    let shape = MatrixBatch::from_dims(&[2, 3]);
    for (mean_of, mean) in [
        (NormalizeBy::Rows, (r[0] + r[1]) / 2.0),
        (NormalizeBy::Columns, (c[0] + c[1] + c[2]) / 3.0),
    ] {
        let factors = matrix_factors(&shape, &rows, &columns, mean_of).unwrap();
        close(&factors.rows, &r.map(|r| (mean / r).sqrt()));
        close(&factors.columns, &c.map(|c| 1.0 / c.sqrt()));
    }
    let factors = vector_factors(&columns).unwrap();
    assert_eq!(factors.rows.to_f64().unwrap(), [1.0]);
    close(&factors.columns, &c.map(|c| 1.0 / c.sqrt()));
}

#[test]
fn sixteen_bit_numbers_are_widened() {
    let (device, shape) = (Device::cpu(2).unwrap(), MatrixBatch::from_dims(&[200, 130]));
    let n = shape.numel();
    let grads = |dtype| tensor(&device, dtype, &[n], &values(n, 1)); // exact
    let full = |dtype, n, x| Tensor::full(&device, dtype, &[n], x).unwrap();
    let config = Adafactor { eps2: 0.0, clip_threshold: 1e9, beta1: 0.0, weight_decay: 1.0 };
    let factors = RowColFactors {
        shape,
        rows: full(DType::F32, 200, 0.5),
        columns: full(DType::F32, 130, 0.25),
    };
    let run = |weights, gradients| {
        let (mut rows, mut columns) = (full(DType::F64, 200, 0.0), full(DType::F64, 130, 0.0));
        let grads = grads(gradients);
        square_sums(&shape, &grads, &mut rows, &mut columns).unwrap();
        let mut w = full(weights, n, 1.0);
        let sums = SquareSums { weights: None, update: full(DType::F64, 1, 1.0), numel: n };
        let step = step(&device, 0.1, 1.0);
        adafactor(&config, &step, &mut w, &grads, (&factors, &sums), None, None).unwrap();
        (bits(&rows), bits(&columns), w)
    };
    let (rows, columns, w) = run(DType::F32, DType::F32);
    let (rows16, columns16, w16) = run(DType::BF16, DType::BF16);
    assert!(rows == rows16 && columns == columns16);
    assert_eq!(bits(&w.cast(DType::BF16).unwrap()), bits(&w16));
}

#[test]
fn errors_name_the_values() {
    let device = Device::cpu(1).unwrap();
    let zeros = |n: usize| of(&device, &vec![0.0; n]);
    let shape = MatrixBatch::from_dims(&[2, 3]);
    assert_eq!(
        message(square_sums(&shape, &zeros(6), &mut zeros(3), &mut zeros(0))),
        "adafactor: MatrixBatch { count: 1, rows: 2, columns: 3 } for 6 elements, 3 rows and 0 columns"
    );
    let config = Adafactor { eps2: 0.0, clip_threshold: 1.0, beta1: 0.0, weight_decay: 0.0 };
    let factors = RowColFactors { shape, rows: zeros(2), columns: zeros(3) };
    let step = step(&device, 0.1, 1.0);
    let attempt = |sums: &SquareSums, mean: &mut Tensor| {
        message(adafactor(
            &config,
            &step,
            &mut zeros(6),
            &zeros(6),
            (&factors, sums),
            Some(mean),
            None,
        ))
    };
    let sums = |n| SquareSums { weights: None, update: zeros(n), numel: 6 };
    assert_eq!(attempt(&sums(1), &mut zeros(5)), "adafactor: 6 weights, a mean of 5");
    assert_eq!(attempt(&sums(2), &mut zeros(6)), "adafactor: Tensor(f64 [2]) is no sum of f64");
}
